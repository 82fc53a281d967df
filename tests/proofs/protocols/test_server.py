"""Workers of a parameter-server job move one loss scale: in the model as in the code."""

import itertools
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

import scaling
from proofs.protocols import server
from proofs.protocols.search import search

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def step():
    """What a worker does in a step, from the traced code."""
    return server.traced()


@pytest.mark.parametrize(
    ("workers", "steps"),
    [
        (2, 2),
        pytest.param(2, 3, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_the_claims_hold_for_every_order_of_accesses(step, workers, steps):
    """No scale is halved twice, none grows from steps at another, and no step is lost."""
    found = search(server.model(step, workers, steps))

    assert found.broken == "", "\n".join(found.story)
    assert found.states > 4_000


@pytest.mark.parametrize("fault", server.FAULTS)
def test_a_fault_is_found(fault):
    """A protocol with a fault breaks a claim, and there is a story of how."""
    found = search(server.FAULTS[fault]())

    assert found.broken
    assert found.story[0] == "worker 0 reads loss_scale 2^4"


def test_a_story_can_be_read(step):
    """Two workers that merge at once lose a step."""
    found = search(server.model(server.without(step, "lock", "unlock"), 2, 2))

    assert (
        found.broken == "a scale is halved once for the overflows at it" or "lost" in found.broken
    )
    assert "worker 0 reads loss_scale 2^4" in found.story
    assert any("worker 1 finds" in line for line in found.story)


def test_the_traced_step_is_a_transaction(step):
    """Everything that a merge reads and writes lies between taking the lock and giving it back."""
    place = {access.kind: at for at, access in enumerate(step)}
    fields = {
        kind: sorted(access.field for access in step if access.kind == kind)
        for kind in ("again", "write")
    }

    assert fields == {"again": [0, 1, 2], "write": [0, 1, 2]}
    for at, access in enumerate(step):
        if access.kind in {"again", "write"}:
            assert place["lock"] in access.after
            assert at in step[place["unlock"]].after
        if access.kind == "write":
            assert {
                each for each, other in enumerate(step) if other.kind == "again"
            } <= access.after


def test_merging_is_what_the_model_says():
    """From every small state, with every verdict and at every scale, alone, `merge` writes what the
    model writes.
    """
    rule = server.rule()
    for scale, steps, left, used, finite in itertools.product(
        (3, 4), (0, 1), (0, 1, 2), (3, 4), (True, False)
    ):
        scaler = scaling.LossScaler(rule)
        before = {"loss_scale": 2.0**used, "finite_steps": 1, "overflows_left": 2}
        scaler.load_state_dict(before)
        read = scaler.state
        now = dict(zip(server.FIELDS, (2.0**scale, steps, left), strict=True))
        scaler.load_state_dict(now)
        scaler.merge(read, rule.advance(read, finite), finite)
        wanted = (scale, steps, left)
        if scale == used:
            wanted = server.advanced(wanted, finite=finite)

        assert scaler.state_dict() == dict(
            zip(server.FIELDS, (2.0 ** wanted[0], *wanted[1:]), strict=True)
        )


PROGRAM = """
import socket, sys
import tensorflow as tf
import scaling

def free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]

address = lambda: f"127.0.0.1:{free_port()}"
cluster = tf.train.ClusterSpec({"worker": [address() for _ in range(3)], "ps": [address()]})
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8)
servers = [
    tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc", config=config)
    for job in cluster.jobs for index in range(cluster.num_tasks(job))
]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    scaler = scaling.LossScaler(scaling.DynamicLossScale(growth_interval=2**20))
if sys.argv[1] == "unlocked":
    scaler._lock = None

@tf.function
def step():
    used = scaler.state
    with tf.control_dependencies([tf.reduce_sum(tf.random.uniform([3000]))]):
        good = tf.math.is_finite(used.loss_scale)
    scaler.merge(used, scaler.rule.advance(used, good), good)

for _ in range(200):
    coordinator.schedule(step)
coordinator.join()
print("counted", int(scaler.state.finite_steps), flush=True)
import os
os._exit(0)
"""


def counted(how):
    """How many of 200 finite steps are in the counts of a job of three workers."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(ended.stdout.split("counted ")[1])


@pytest.mark.slow
def test_no_step_of_real_workers_is_lost():
    """Three workers of a job count every finite step; without the lock, they lose some."""
    assert counted("locked") == 200
    assert counted("unlocked") < 200


def test_only_parameter_servers_have_a_lock():
    """Elsewhere, the scale is moved outside the replicas, by one process."""
    assert scaling.LossScaler(server.rule())._lock is None
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert scaling.LossScaler(server.rule())._lock is None
