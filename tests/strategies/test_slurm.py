"""The tasks of a Slurm step find each other, and divide the GPUs of their node."""

import re

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import strategies
from strategies import slurm

STEP = ("STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE")
NAMES = ("PROCID", "LOCALID", *STEP, "GPUS_PER_TASK", "GPUS_ON_NODE")


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """Removes the variables of any job from the environment, before and after each test."""
    others = ("TF_CONFIG", "HALFSTEP_WORKER_PODS", "SLURMD_NODENAME")
    for name in (*others, *(f"SLURM_{each}" for each in NAMES)):
        monkeypatch.delenv(name, raising=False)


def in_step(monkeypatch, nodes, per_node, rank=0, tasks=None, **more):
    """Sets what Slurm sets for a task, and further variables."""
    if tasks is None:
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        tasks = sum(int(count) * int(times or 1) for count, times in counts)
    values = {
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }
    for name, value in (values | more).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("nodes", "per_node", "workers"),
    [
        ("n[1-2]", "2,1", ["n1:8888", "n1:8889", "n2:8888"]),
        ("n[9-10]", "1(x2)", ["n9:8888", "n10:8888"]),  # sorted by name, n10 would be first
        ("n[8-10]", "2,1,1", ["n8:8888", "n8:8889", "n9:8888", "n10:8888"]),
        ("n[99-100],m1", "1(x3)", ["n99:8888", "n100:8888", "m1:8888"]),
        ("n[08-10]", "1(x3)", ["n08:8888", "n09:8888", "n10:8888"]),
        ("gpu9,gpu10", "1(x2)", ["gpu9:8888", "gpu10:8888"]),
        ("b[3,1],a", "1,1,1", ["b3:8888", "b1:8888", "a:8888"]),
        ("r[0-1]n[1-2]x", "1(x4)", ["r0n1x:8888", "r0n2x:8888", "r1n1x:8888", "r1n2x:8888"]),
        ("node-1.cluster.org", "2", ["node-1.cluster.org:8888", "node-1.cluster.org:8889"]),
    ],
)
def test_the_tasks_of_a_step_are_workers(monkeypatch, nodes, per_node, workers):
    """They are in the order in which Slurm numbers them, also on nodes without GPUs."""
    for rank in (0, len(workers) - 1):
        in_step(monkeypatch, nodes, per_node, rank)
        found = strategies.find_cluster()

        assert found.cluster_spec().as_dict() == {"worker": workers}
        assert (found.task_type, found.task_id, found.rpc_layer) == ("worker", rank, "grpc")
        assert found.num_accelerators() == {}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(0, 200))
def test_each_task_has_its_own_place(counts, first):
    """Node after node, as many on each as Slurm says."""
    nodes = f"n[{first}-{first + len(counts) - 1}]"
    places = slurm.places_of_tasks(nodes, ",".join(map(str, counts)))

    expected = [(f"n{first + node}", k) for node, count in enumerate(counts) for k in range(count)]
    assert places == expected


@pytest.fixture
def four_gpus(monkeypatch):
    """Imitates four GPUs; returns a list of those that TensorFlow was told to use."""
    chosen = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _kind: ["0", "1", "2", "3"])
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda devices, _kind: chosen.append(devices)
    )
    return chosen


@pytest.mark.parametrize("rank", [0, 1])
def test_the_tasks_of_a_node_share_its_gpus(monkeypatch, four_gpus, rank):
    """On a node with four GPUs, each of two tasks gets two of its own."""
    in_step(monkeypatch, "n1", "2", rank, SLURM_LOCALID=rank, SLURMD_NODENAME="n1")
    found = strategies.find_cluster()

    assert four_gpus == [[["0", "1"], ["2", "3"]][rank]]
    assert found.cluster_spec().as_dict() == {"worker": ["n1:8888", "n1:8889"]}
    assert (found.task_type, found.task_id) == ("worker", rank)
    assert found.num_accelerators() == {"GPU": 2}


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_GPUS_PER_TASK": "4"},
        {"SLURM_GPUS_PER_TASK": "a100:4", "SLURM_GPUS_ON_NODE": "8"},
        {"SLURM_GPUS_PER_TASK": "a100:1,h100:3", "SLURM_GPUS_ON_NODE": "4"},
        {"SLURM_GPUS_ON_NODE": "8"},  # --gpu-bind=per_task:4
    ],
)
def test_a_task_keeps_the_gpus_that_it_was_bound_to(monkeypatch, four_gpus, variables):
    """Each of two tasks sees four GPUs, which are its own."""
    in_step(monkeypatch, "n1", "2", 1, **variables)
    found = strategies.find_cluster()

    assert four_gpus == []
    assert found.task_id == 1
    assert found.num_accelerators() == {"GPU": 4}


@pytest.mark.parametrize(
    ("per_node", "rank", "own"),
    [("2", 0, ["0", "1"]), ("2", 1, ["2", "3"]), ("3,2", 3, ["0", "1"]), ("3,2", 4, ["2", "3"])],
)
def test_unbound_tasks_take_as_many_gpus_as_were_asked_for(
    monkeypatch, four_gpus, per_node, rank, own
):
    """With --gpus-per-task=2 --gpu-bind=none, both tasks of a node see its four GPUs."""
    nodes = "n[1-2]" if "," in per_node else "n1"
    variables = {"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4"}
    in_step(monkeypatch, nodes, per_node, rank, **variables)
    found = strategies.find_cluster()

    assert four_gpus == [own]
    assert found.num_accelerators() == {"GPU": 2}


@pytest.mark.parametrize(("per_node", "rank", "share"), [("3", 2, 1), ("4,2", 5, 1), ("2,1", 2, 2)])
def test_each_task_has_as_many_gpus(monkeypatch, four_gpus, per_node, rank, share):
    """All replicas of a job do the same work; what is left over is used by no task."""
    in_step(monkeypatch, "n[1-2]" if "," in per_node else "n1", per_node, rank)
    strategies.find_cluster()

    assert len(four_gpus[0]) == share


def test_fewer_gpus_than_tasks_are_refused(monkeypatch, four_gpus):
    """TensorFlow would give all of them to each task."""
    in_step(monkeypatch, "n1", "5")
    with pytest.raises(ValueError, match="5 tasks on a node see 4 GPUs"):
        strategies.find_cluster()

    assert four_gpus == []


def test_tasks_that_are_not_placed_in_blocks_are_refused(monkeypatch):
    """With --distribution=cyclic, task 1 of 4 is the first one on the second node. A step of one task
    is no job.
    """
    in_step(monkeypatch, "n[1-2]", "2(x2)", 1, SLURM_LOCALID=0, SLURMD_NODENAME="n2")
    with pytest.raises(ValueError, match="--distribution=block"):
        strategies.find_cluster()
    in_step(monkeypatch, "n1", "1")
    assert strategies.find_cluster() is None
