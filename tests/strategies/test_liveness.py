"""Whether a process is alive is what the process itself answers, not what its machine does."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from strategies import liveness
from strategies.launch import free_ports
from strategies.liveness import Answer, LifeWatch, ask

SERVER = """
import sys, time
import tensorflow as tf
address = sys.argv[1]
server = tf.distribute.Server({"worker": [address]}, job_name="worker", task_index=0)
print("up", flush=True)
time.sleep(120)
"""


@contextlib.contextmanager
def served(address):
    """Runs a TensorFlow server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, address],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_tensorflow_server_answers_only_while_it_runs():
    """A server that runs is alive; stopped it is silent although the machine still accepts
    connections; ended, the connection is refused. What has been stopped and runs again is alive.
    """
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with served(address) as process:
        assert ask(address) is Answer.ALIVE
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # returns once all its threads have stopped
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 2):
            pass  # the machine accepts connections
        assert ask(address, 1.0) is Answer.SILENT
        process.send_signal(signal.SIGCONT)
        assert ask(address) is Answer.ALIVE
    assert ask(address) is Answer.REFUSED


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "[::1]"])
def test_ports_where_nothing_listens_refuse(address):
    """Names and IPv6 addresses can be asked, too."""
    assert ask(f"{address}:{free_ports(1)[0]}") is Answer.REFUSED


@pytest.mark.thorough
def test_a_watch_tells_of_a_loss_once_and_again_after_a_return():
    """A lost process is told once; after it has answered, a second loss is told again. What
    answers is never told, and nothing is told once the context has ended.
    """
    told, answering = [], threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    if answering.is_set():
                        connection.sendall(b"x")
                    else:
                        time.sleep(0.2)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0" * 2)
            if stopped.is_set():
                return

    stopped = threading.Event()
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    known = f"127.0.0.1:{listener.getsockname()[1]}"

    def wait_for(count):
        end = time.monotonic() + 20
        while len(told) < count:
            assert time.monotonic() < end, told
            time.sleep(0.01)

    watch = LifeWatch({"a": known}, lambda *loss: told.append(loss), 0.05, 0.02)
    answering.set()
    with watch:
        time.sleep(0.5)
        assert told == []
        answering.clear()
        wait_for(1)
        time.sleep(0.5)
        assert told == [("a", Answer.REFUSED)]
        answering.set()
        end = time.monotonic() + 20
        while ask(known) is not Answer.ALIVE:
            assert time.monotonic() < end
        time.sleep(0.5)
        answering.clear()
        wait_for(2)
    count = len(told)
    time.sleep(0.3)
    assert len(told) == count
    with LifeWatch({"b": gone}, lambda *loss: told.append(loss), 0.05, 0.02):
        wait_for(count + 1)
    assert told[-1] == ("b", Answer.REFUSED)
    stopped.set()
    listener.close()


def test_a_process_that_cannot_return_is_lost_sooner(monkeypatch):
    """Its port is closed, so its state is gone: that is told long before a silence would be."""
    monkeypatch.setattr(liveness, "REFUSED_SECS", 0.05)
    ports, told = free_ports(2), []
    gone = {name: f"127.0.0.1:{port}" for name, port in zip("ab", ports, strict=True)}
    with LifeWatch(gone, lambda *loss: told.append(loss), 600, 0.02, irreplaceable=["b"]):
        end = time.monotonic() + 20
        while not told:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.3)

    assert told == [("b", Answer.REFUSED)]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), OSError(113, "no route")])
def test_a_machine_that_cannot_be_reached(monkeypatch, error):
    """Its process may have ended with it, or may answer again: nobody there has refused anything."""

    def connect(*_):
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)

    assert ask("other:2222") is Answer.UNREACHABLE
