"""The processes of a job wait for each other, here as threads and as a single process."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from strategies import rendezvous
from strategies.launch import free_ports

ROOT = pathlib.Path(__file__).parents[2]


def job(count, host="127.0.0.1"):
    """Returns the addresses of a job of workers, by task."""
    return {f"worker {index}": f"{host}:{port}" for index, port in enumerate(free_ports(count))}


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.thorough)])
def test_all_continue_once_the_last_has_started(host):
    """No process continues before all of them have started; their addresses may be IPv6."""
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    addresses, started = job(4, host), []
    servers = contextlib.ExitStack()

    def start(task, delay):
        time.sleep(delay)
        started.append(task)
        rendezvous.wait_for_all(addresses, task)
        # TensorFlow's server then listens on the port.
        port = int(addresses[task].rpartition(":")[2])
        servers.enter_context(rendezvous.listening(port))
        return len(started)

    with servers, concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(start, task, 0.3 * index) for index, task in enumerate(addresses)]
        assert [each.result(timeout=20) for each in waiting] == [4] * 4


def test_a_process_joins_its_job_once(monkeypatch):
    """Where a program asks for the job's strategy again, it gets the same one, whose server has the
    port.
    """
    monkeypatch.setattr(rendezvous, "_joined", {})
    port = free_ports(1)[0]
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}"]}), task_type="worker", task_id=0
    )
    with contextlib.ExitStack() as servers:

        def create(_):
            servers.enter_context(rendezvous.listening(port))
            return tf.distribute.get_strategy()

        first = rendezvous.join_job(cluster, create)
        assert rendezvous.join_job(cluster, create) is first


def test_missing_processes_are_named(monkeypatch, caplog):
    """Only the processes that are missing are named, first in a warning and then in the error."""
    monkeypatch.setattr(rendezvous, "WAIT_SECS", 1.5)
    monkeypatch.setattr(rendezvous, "WARN_INTERVAL_SECS", 0.5)
    addresses = job(3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(rendezvous.wait_for_all, addresses, "worker 1")
        with pytest.raises(TimeoutError) as error:
            rendezvous.wait_for_all(addresses, "worker 0")
    absent = f"worker 2 at {addresses['worker 2']}"

    assert str(error.value).startswith(f"waited 2 s for {absent}:")
    assert isinstance(other.exception(timeout=20), TimeoutError)
    assert f"Still waiting for {absent} after 1 s." in caplog.messages


@pytest.mark.thorough
def test_a_waiting_process_can_be_stopped():
    """SIGTERM stops a waiting process at once, because TensorFlow has not taken over yet."""
    workers = list(job(2).values())
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    code = "import strategies; print(1, flush=True); strategies.create('multi_worker_mirrored')"
    waiting = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CONFIG": json.dumps(task)},
    )
    try:
        waiting.stdout.readline()
        for _ in range(200):
            if rendezvous.answers(workers[1]):
                break
            time.sleep(0.1)
        assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(timeout=10) == -signal.SIGTERM
    finally:
        waiting.kill()
        waiting.communicate(timeout=20)
