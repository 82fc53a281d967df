"""Strategies by name: how each is made, and what it expects of `devices` and of the environment."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf

import strategies
from strategies import registry


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("default", tf.distribute.Strategy),
        ("one_device", tf.distribute.OneDeviceStrategy),
        ("mirrored", tf.distribute.MirroredStrategy),
    ],
)
def test_every_name_makes_its_strategy(name, kind):
    """Each name creates a strategy of its kind; "mirrored" uses all four CPU devices."""
    strategy = strategies.create(name)

    assert isinstance(strategy, kind)
    assert strategy.num_replicas_in_sync == (4 if name == "mirrored" else 1)


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: tf.distribute.OneDeviceStrategy("GPU:0"), "GPU:0"),
        (lambda: tf.distribute.OneDeviceStrategy("CPU:77"), "CPU:77"),
        (lambda: tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"]), "GPU:0"),
    ],
    ids=["one GPU", "a CPU too many", "two GPUs"],
)
def test_a_missing_device_is_named(make, missing):
    """TensorFlow would compute on the CPU instead, or hang in the first step."""
    with pytest.raises(ValueError, match=f"^`strategy` must use devices of .*got {missing}"):
        strategies.check_devices(make())


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
    sums = registry.mirrored([f"{device}:0", f"{device}:1"])

    assert isinstance(sums, tf.distribute.ReductionToOneDevice) == in_order
    assert (sums is None) != in_order


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("default", ["CPU:0"]),
        ("one_device", ["CPU:0", "CPU:1"]),
        ("mirrored", ["CPU:0", "CPU:0"]),
        ("mirrored", ["CPU:0", "cpu:00"]),
        ("mirrored", []),
        ("multi_worker_mirrored", ["CPU:0"]),
        ("parameter_server", ["CPU:0"]),
    ],
)
def test_unsuitable_devices_are_refused(name, devices):
    """Each strategy says what it expects of `devices`."""
    with pytest.raises(ValueError, match=r"^`devices`"):
        strategies.create(name, devices)


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
    monkeypatch.setattr(registry, "_all_devices", lambda: ["CPU:1", "CPU:2"][:gpus])
    strategy = strategies.create("auto")

    assert strategy.num_replicas_in_sync == gpus
    assert growing == [(gpu, True) for gpu in names["GPU"]]
    kind = "MirroredStrategy" if gpus > 1 else "OneDeviceStrategy"
    assert capsys.readouterr().out == f"strategy: {kind} (found {found} and no TPU)\n"


def test_the_cpu_cannot_be_split_twice():
    """After TensorFlow has started, the same number is accepted, and another is an error."""
    strategies.split_cpu(4)
    with pytest.raises(RuntimeError, match=r"^`count` must be 4"):
        strategies.split_cpu(2)


def test_a_registered_strategy_is_created_by_name():
    """Its name is the last; an unknown name is an error that lists all of them."""
    strategies.register("mine", lambda devices: tf.distribute.OneDeviceStrategy("CPU:3"))  # noqa: ARG005

    assert strategies.names()[-1] == "mine"
    assert isinstance(strategies.create("mine"), tf.distribute.OneDeviceStrategy)
    with pytest.raises(ValueError, match=r"^`strategy` must be one of .*, mine;"):
        strategies.create("miror")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("multi_worker_mirrored", []),
        ("parameter_server", []),
        ("parameter_server", ["ps", "worker"]),
    ],
)
def test_strategies_of_several_processes_need_a_job(monkeypatch, name, kinds):
    """Without one, or without a chief among parameter servers, the error says what there is."""
    for variable in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS", "HALFSTEP_WORKER_PODS"):
        monkeypatch.delenv(variable, raising=False)
    if kinds:
        cluster = {kind: [f"{kind}:1"] for kind in kinds}
        task = {"type": "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ValueError, match=f"no job for {name}.*{', '.join(kinds)}"):
        strategies.create(name)


@pytest.mark.parametrize("how", ["named", "listed"])
def test_auto_uses_a_tpu(monkeypatch, capsys, how):
    """With TPU_NAME set, or where TensorFlow lists a TPU, "auto" does not silently use another device."""
    monkeypatch.delenv("TPU_NAME", raising=False)
    if how == "named":
        monkeypatch.setenv("TPU_NAME", "grpc://nowhere")
    else:
        listed = {"TPU": ["TPU:0"], "GPU": [], None: []}
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda device_type=None: listed[device_type]
        )
    with pytest.raises(ValueError, match="no TPU at"):
        strategies.create("auto")

    assert capsys.readouterr().out == ""
