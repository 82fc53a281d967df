"""What a strategy says of itself."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import fake_tpu
import pytest
import tensorflow as tf

import strategies

ROOT = pathlib.Path(__file__).parents[2]
PLAIN = strategies.Capabilities(
    num_replicas=1,
    asynchronous=False,
    multi_worker=False,
    decides_in_replica=False,
    is_chief=True,
    on_cpu=True,
)


def assert_capabilities(strategy, **different):
    """Compares all capabilities with those of one replica on a CPU, and the public predicates."""
    found = strategies.capabilities(strategy)

    assert found == dataclasses.replace(PLAIN, **different)
    assert strategies.is_asynchronous(strategy) is found.asynchronous
    assert strategies.has_workers(strategy) is found.multi_worker
    assert strategies.decides_inside(strategy) is found.decides_in_replica
    assert strategies.is_chief(strategy) is found.is_chief


@pytest.mark.parametrize("name", ["default", "one_device"])
def test_one_replica_on_the_cpu(name):
    """The default strategy and a single CPU device are plain."""
    assert_capabilities(strategies.create(name))


@pytest.mark.parametrize("replicas", [2, 3])
def test_mirrored_replicas(mirrored, replicas):
    """A mirrored strategy differs from one device in its number of replicas alone."""
    assert_capabilities(mirrored(replicas), num_replicas=replicas)


def test_a_tpu_decides_in_each_replica():
    """A TPU's cores are replicas that decide for themselves and are no CPU devices."""
    assert_capabilities(
        fake_tpu.strategy(cores=4), num_replicas=4, decides_in_replica=True, on_cpu=False
    )


def test_a_gpu_is_no_cpu(monkeypatch):
    """The default strategy computes on a GPU that is visible, and one device on the one named."""
    assert not strategies.capabilities(tf.distribute.OneDeviceStrategy("GPU:0")).on_cpu
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [f"one {kind}"])
    assert not strategies.capabilities(tf.distribute.get_strategy()).on_cpu


def test_capabilities_cannot_be_changed():
    """A strategy's capabilities are a frozen value."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.is_chief = False


PARAMETER_SERVERS = """
import dataclasses, json
import tensorflow as tf
import strategies
from strategies.launch import free_ports
cluster = {kind: [f"127.0.0.1:{port}"] for kind, port in zip(("worker", "ps"), free_ports(2))}
servers = [tf.distribute.Server(cluster, job_name=kind) for kind in cluster]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(cluster), rpc_layer="grpc"
)
strategy = tf.distribute.ParameterServerStrategy(resolver)
print(json.dumps(dataclasses.asdict(strategies.capabilities(strategy))))
"""


def test_parameter_servers_are_asynchronous():
    """Parameter servers are asynchronous; the process that makes the strategy is the chief."""
    result = subprocess.run(
        [sys.executable, "-c", PARAMETER_SERVERS],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    found = strategies.Capabilities(**json.loads(result.stdout))
    assert found == dataclasses.replace(PLAIN, asynchronous=True)
