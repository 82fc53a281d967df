"""The processes of a job wait for each other, and servers serve their chief until it has ended."""

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

from strategies import job
from strategies.launch import free_ports
from strategies.liveness import Answer

ROOT = pathlib.Path(__file__).parents[2]


def addresses_of(count, host="127.0.0.1"):
    """Returns the addresses of a job of workers, by task."""
    return {f"worker {index}": f"{host}:{port}" for index, port in enumerate(free_ports(count))}


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.thorough)])
def test_all_continue_once_the_last_has_started(host):
    """No process continues before all of them have started; their addresses may be IPv6."""
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    addresses, started = addresses_of(4, host), []
    servers = contextlib.ExitStack()

    def start(task, delay):
        time.sleep(delay)
        started.append(task)
        job.wait_for_all(addresses, task)
        # TensorFlow's server then listens on the port.
        port = int(addresses[task].rpartition(":")[2])
        servers.enter_context(job.listening(port))
        return len(started)

    with servers, concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(start, task, 0.3 * index) for index, task in enumerate(addresses)]
        assert [each.result(timeout=20) for each in waiting] == [4] * 4


def test_a_process_joins_its_job_once(monkeypatch):
    """Where a program asks for the job's strategy again, it gets the same one, whose server has the
    port.
    """
    monkeypatch.setattr(job, "_joined", {})
    port = free_ports(1)[0]
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}"]}), task_type="worker", task_id=0
    )
    with contextlib.ExitStack() as servers:

        def create(_):
            servers.enter_context(job.listening(port))
            return tf.distribute.get_strategy()

        first = job.join_job(cluster, create)
        assert job.join_job(cluster, create) is first


@pytest.mark.thorough
def test_missing_processes_are_named(monkeypatch, caplog):
    """Only the processes that are missing are named, first in a warning and then in the error."""
    monkeypatch.setattr(job, "WAIT_SECS", 1.5)
    monkeypatch.setattr(job, "WARN_INTERVAL_SECS", 0.5)
    addresses = addresses_of(3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(job.wait_for_all, addresses, "worker 1")
        with pytest.raises(TimeoutError) as error:
            job.wait_for_all(addresses, "worker 0")
    absent = f"worker 2 at {addresses['worker 2']}"

    assert str(error.value).startswith(f"waited 2 s for {absent}:")
    assert isinstance(other.exception(timeout=20), TimeoutError)
    assert f"Still waiting for {absent} after 1 s." in caplog.messages


@pytest.mark.thorough
def test_a_waiting_process_can_be_stopped():
    """SIGTERM stops a waiting process at once, because TensorFlow has not taken over yet."""
    workers = list(addresses_of(2).values())
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
            if job.answers(workers[1]):
                break
            time.sleep(0.1)
        assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(timeout=10) == -signal.SIGTERM
    finally:
        waiting.kill()
        waiting.communicate(timeout=20)


@pytest.fixture
def chief(monkeypatch):
    """The answers of a chief, one for each question; the last one is repeated."""
    answers = []
    monkeypatch.setattr(job, "POLL_SECS", 0.01)
    monkeypatch.setattr(job, "ASK_SECS", 0.0)
    monkeypatch.setattr(job, "SILENT_SECS", 0.3)
    monkeypatch.setattr(job, "GRACE_SECS", 0.6)
    monkeypatch.setattr(job, "ask", lambda _: answers.pop(0) if len(answers) > 1 else answers[0])
    return answers


@pytest.fixture
def signals():
    """Stop requests, whose handlers are removed after the test."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield job.StopRequests()
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_chief_that_does_not_answer_is_named(chief, signals, caplog):
    """It is running, so something is wrong with it: an error, and 75. A short silence is none."""
    chief += [Answer.ALIVE] * 3 + [Answer.SILENT] * 3 + [Answer.ALIVE] * 3 + [Answer.SILENT]
    assert job.wait_for_end("chief:1", "worker 0", signals) == 75
    assert "The chief at chief:1 has not answered for" in caplog.text
    assert "so worker 0 ends" in caplog.text


def test_after_a_signal_it_waits_only_so_long(chief, signals):
    """A chief that goes on for ever is not served for ever."""
    chief += [Answer.ALIVE]
    os.kill(os.getpid(), signal.SIGINT)
    began = time.monotonic()
    assert job.wait_for_end("chief:1", "worker 0", signals) == 75
    assert time.monotonic() - began >= 0.6


def test_the_second_signal_ends_it(signals):
    """Without waiting for anything."""
    signals._note(signal.SIGTERM, None)
    with pytest.raises(SystemExit) as ended:
        signals._note(signal.SIGINT, None)
    assert ended.value.code == 128 + signal.SIGINT


def test_a_chief_that_never_comes(monkeypatch, signals, caplog):
    """It is named while a worker waits, and after the whole time in an error; a signal ends the
    wait.
    """
    monkeypatch.setattr(job, "POLL_SECS", 0.01)
    monkeypatch.setattr(job, "WAIT_SECS", 0.2)
    monkeypatch.setattr(job, "WARN_INTERVAL_SECS", 0.1)
    chief = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(TimeoutError, match=f"the chief at {chief}"):
        job.wait_for_chief(chief, "ps 0", signals)
    assert f"Still waiting for the chief at {chief} after 0 s." in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        job.wait_for_chief(chief, "ps 0", signals)
    assert ended.value.code == 75


@pytest.mark.parametrize(("signalled", "code"), [(False, 0), (True, 75)])
def test_it_ends_with_the_chief(chief, signals, signalled, code):
    """A chief that has ended leaves nothing to serve. The first signal does not end it while the chief
    answers, which may still save.
    """
    chief += [Answer.ALIVE] * 10 + [Answer.REFUSED]
    if signalled:
        os.kill(os.getpid(), signal.SIGTERM)
    assert job.wait_for_end("chief:1", "worker 0", signals) == code
    assert chief == [Answer.REFUSED]
