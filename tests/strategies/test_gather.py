"""The processes of a job wait for each other; in threads, and one that is alone as a process."""

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

from strategies import gather
from strategies.launch import free_ports

ROOT = pathlib.Path(__file__).parents[2]


def job(count):
    """Addresses of a job of workers."""
    return {f"worker {index}": f"127.0.0.1:{port}" for index, port in enumerate(free_ports(count))}


def test_all_go_on_when_the_last_has_come():
    """Whoever comes first waits, and none before the last has begun."""
    addresses, begun = job(4), []
    servers = contextlib.ExitStack()

    def come(task, after):
        time.sleep(after)
        begun.append(task)
        gather.gather(addresses, task)
        # As TensorFlow's server does.
        port = int(addresses[task].rpartition(":")[2])
        servers.enter_context(socket.create_server(("", port)))
        return len(begun)

    with servers, concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(come, task, 0.3 * place) for place, task in enumerate(addresses)]
        assert [each.result(timeout=20) for each in waiting] == [4] * 4


def test_who_does_not_come_is_named(monkeypatch, caplog):
    """At first in a warning, in the end in the error; who did come is not."""
    monkeypatch.setattr(gather, "WAIT_SECS", 1.5)
    monkeypatch.setattr(gather, "SAY_SECS", 0.5)
    addresses = job(3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(gather.gather, addresses, "worker 1")
        with pytest.raises(TimeoutError) as error:
            gather.gather(addresses, "worker 0")
    absent = f"worker 2 at {addresses['worker 2']}"

    assert str(error.value) == (
        f"`strategy` must have all processes of its job within 2 s; got no answer from {absent}. All "
        "have to be there to begin. Start them, or look at their own output, and that this one can "
        "reach them."
    )
    assert isinstance(other.exception(timeout=20), TimeoutError)
    assert f"Waiting since 1 s for {absent}." in caplog.text


def test_a_process_that_waits_can_be_ended():
    """By SIGTERM, at once: it is not yet in TensorFlow's hands."""
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
            if gather.answers(workers[1]):
                break
            time.sleep(0.1)
        assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(timeout=10) == -signal.SIGTERM
    finally:
        waiting.kill()
        waiting.communicate(timeout=20)
