"""How each built-in strategy is made, and what it expects of `devices` and of the environment."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf

import strategies
from strategies import factories


def test_devices_can_be_chosen():
    """A strategy uses exactly the devices that were named."""
    assert strategies.create("mirrored", ["CPU:1", "CPU:3"]).extended.worker_devices == (
        "/job:localhost/replica:0/task:0/device:CPU:1",
        "/job:localhost/replica:0/task:0/device:CPU:3",
    )
    assert "CPU:2" in strategies.create("one_device", ["CPU:2"]).extended.worker_devices[0]


@pytest.mark.parametrize(("device", "in_order"), [("CPU", True), ("GPU", False)])
def test_gpus_sum_in_tensorflows_own_way(monkeypatch, device, in_order):
    """Sums are computed on one device on CPUs only: GPUs send to each other, with NCCL."""
    monkeypatch.setattr(
        tf.distribute, "MirroredStrategy", lambda _, cross_device_ops: cross_device_ops
    )
    sums = factories.mirrored([f"{device}:0", f"{device}:1"])

    assert isinstance(sums, tf.distribute.ReductionToOneDevice) == in_order
    assert (sums is None) != in_order


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("default", ["CPU:0"]),
        ("one_device", ["CPU:0", "CPU:1"]),
        ("one_device", "CPU:0"),
        ("mirrored", ["CPU:0", "CPU:0"]),
        ("mirrored", ["CPU:0", "cpu:00"]),
        ("mirrored", ["CPU:0", "/job:localhost/device:CPU:0"]),
        ("mirrored", ["CPU:0", "/device:cpu:0"]),
        ("mirrored", ["CPU", "CPU:0"]),
        ("mirrored", []),
        ("multi_worker_mirrored", ["CPU:0"]),
        ("parameter_server", ["CPU:0"]),
    ],
)
def test_unsuitable_devices_are_refused(name, devices):
    """Each strategy says what it expects of `devices`."""
    with pytest.raises(ValueError, match=r"^`devices`"):
        strategies.create(name, devices)


def test_devices_have_short_names():
    """Without a choice, all CPU devices are used, by the names that a user would write."""
    assert factories._all_devices() == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


def test_three_numbers_are_added_in_order():
    """A sum of three or more numbers is the same as that of `tf.reduce_sum` over a stack."""
    values = [tf.random.normal([100]) for _ in range(3)]
    found = factories._sum_in_order(values)

    assert found.numpy().tobytes() == tf.reduce_sum(tf.stack(values), axis=0).numpy().tobytes()


@pytest.fixture
def no_job(monkeypatch):
    """Removes the variables of any job from the environment."""
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS", "HALFSTEP_WORKER_PODS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_job")
def test_workers_need_a_job():
    """Without a job, the error says what was looked for and how to start one."""
    with pytest.raises(ValueError, match="no job for multi_worker_mirrored"):
        strategies.create("multi_worker_mirrored")


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize(("kinds", "listed"), [([], "none"), (["ps", "worker"], "ps, worker")])
def test_parameter_servers_need_a_whole_job(monkeypatch, kinds, listed):
    """Without a chief, workers and servers, the error says what there is and how to start a job."""
    if kinds:
        cluster = {kind: [f"{kind}:1"] for kind in kinds}
        task = {"type": "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ValueError, match=f"no job for parameter_server.*{listed}"):
        strategies.create("parameter_server")


@pytest.mark.slow
def test_auto_takes_the_best_device_and_prints_which():
    """Without a TPU or a GPU, "auto" is the default strategy."""
    program = "import strategies; print(strategies.create('auto').num_replicas_in_sync)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert result.stdout.splitlines() == [
        "strategy: DefaultDistributionStrategy (found no TPU and no GPU)",
        "1",
    ]


@pytest.mark.parametrize(("gpus", "found"), [(1, "1 GPU"), (2, "2 GPUs")])
def test_auto_takes_all_gpus(monkeypatch, capsys, gpus, found):
    """One GPU gives a strategy on one device and several a mirrored one; their memory grows."""
    growing = []
    names = {"TPU": [], "GPU": [f"GPU:{index}" for index in range(gpus)]}
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setattr(tf.config, "list_physical_devices", names.get)
    monkeypatch.setattr(
        tf.config.experimental,
        "set_memory_growth",
        lambda gpu, enable: growing.append((gpu, enable)),
    )
    monkeypatch.setattr(factories, "_all_devices", lambda: ["CPU:1", "CPU:2"][:gpus])
    strategy = strategies.create("auto")

    assert strategy.num_replicas_in_sync == gpus
    assert growing == [(gpu, True) for gpu in names["GPU"]]
    kind = "MirroredStrategy" if gpus > 1 else "OneDeviceStrategy"
    assert capsys.readouterr().out == f"strategy: {kind} (found {found} and no TPU)\n"


def test_auto_uses_the_tpu_that_is_asked_for(monkeypatch, capsys):
    """With TPU_NAME set, "auto" does not silently use another device."""
    monkeypatch.setenv("TPU_NAME", "grpc://nowhere")
    with pytest.raises(ValueError, match="'grpc://nowhere'"):
        strategies.create("auto")

    assert capsys.readouterr().out == ""


def test_auto_uses_a_tpu_that_tensorflow_lists(monkeypatch, capsys):
    """On a machine with a TPU, "auto" does not silently use another device."""
    monkeypatch.delenv("TPU_NAME", raising=False)
    listed = {"TPU": ["TPU:0"], "GPU": [], None: []}
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda device_type=None: listed[device_type]
    )
    with pytest.raises(ValueError, match="no TPU at 'local'"):
        strategies.create("auto")

    assert capsys.readouterr().out == ""


def test_the_cpu_cannot_be_split_twice():
    """After TensorFlow has started, the same number is accepted, and another is an error."""
    strategies.split_cpu(4)
    with pytest.raises(RuntimeError, match=r"^`count` must be 4"):
        strategies.split_cpu(2)
