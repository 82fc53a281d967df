"""On a machine without a TPU, the error says where one was looked for, within a bounded time."""

import contextlib
import socket
import threading
import time

import pytest
import tensorflow as tf

import strategies
from strategies import tpu


def message(address, reason):
    """Returns the error message for an address without a TPU."""
    return f"found no TPU at {address!r}: {reason}"


@pytest.fixture
def server():
    """Starts servers that answer their first connection, or never answer; returns their ports."""
    opened = []

    def start(answer):
        listening = socket.create_server(("127.0.0.1", 0))
        opened.append(listening)

        def serve():
            connection, _ = listening.accept()
            opened.append(connection)
            if answer is not None:
                connection.recv(100)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return listening.getsockname()[1]

    yield start
    for each in opened:
        each.close()


def error_of(devices):
    """Returns the error message for these devices, and after how many seconds it was raised."""
    start = time.monotonic()
    with pytest.raises(ValueError, match="TPU") as error:
        strategies.create("tpu", devices)
    return str(error.value), time.monotonic() - start


def test_no_server_listens():
    """The error says that the connection was refused."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = f"grpc://127.0.0.1:{port}"

    assert error_of([address])[0] == message(address, "[Errno 111] Connection refused")


def test_a_server_that_never_answers(server, monkeypatch):
    """An open connection without an answer is an error; TensorFlow alone waits over a minute."""
    monkeypatch.setattr(tpu, "TIMEOUT_SECS", 1.0)
    address = f"grpc://127.0.0.1:{server(None)}"
    found, seconds = error_of([address])

    assert found == message(address, "timed out")
    assert seconds < 10


def test_a_machine_that_never_answers(monkeypatch):
    """A connection that is never opened is an error; the system alone would try for two minutes."""
    monkeypatch.setattr(tpu, "TIMEOUT_SECS", 1.0)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        contextlib.ExitStack() as waiting,
    ):
        for _ in range(4):  # the first fills the queue; Linux then drops further requests
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        address = f"grpc://127.0.0.1:{full.getsockname()[1]}"
        found, seconds = error_of([address])

    assert found == message(address, "timed out")
    assert seconds < 10


def test_a_server_that_does_not_speak_grpc(server):
    """The answer of, for instance, a web server is shown in the error."""
    address = f"grpc://127.0.0.1:{server(b'HTTP/1.1 400 Bad Request')}"

    reason = "the server does not speak gRPC; it answered b'HTTP/1.1 '"
    assert error_of([address])[0] == message(address, reason)


@pytest.mark.parametrize("address", ["grpc://here", "grpc://:8470", "grpc://here:port"])
def test_an_invalid_address(address):
    """An address without a host or a port is refused without a connection."""
    reason = "the address is not of the form grpc://HOST:PORT"
    assert error_of([address])[0] == message(address, reason)


def test_tensorflows_server_is_recognized():
    """The check accepts a real gRPC server, TensorFlow's own."""
    server = tf.distribute.Server.create_local_server()
    host, _, port = server.target.removeprefix("grpc://").rpartition(":")
    tpu.check_grpc_server(host, int(port))


@pytest.mark.parametrize("devices", [["local"], None])
def test_this_machine_has_no_tpu(monkeypatch, devices):
    """The address "local", which is also the default, is an error here, with TensorFlow's reason: it has
    no TPU kernels.
    """
    monkeypatch.delenv("TPU_NAME", raising=False)
    found, seconds = error_of(devices)

    assert found.startswith("found no TPU at 'local': ")
    assert "No OpKernel was registered" in found
    assert seconds < 20


def test_an_unknown_name(monkeypatch):
    """An unknown TPU name is an error, also if TensorFlow does not answer in time."""
    monkeypatch.setattr(tpu, "TIMEOUT_SECS", 10.0)
    found, seconds = error_of(["my-tpu"])

    assert found.startswith("found no TPU at 'my-tpu': ")
    assert seconds < 20


def test_a_call_that_hangs(monkeypatch):
    """A call that does not return in time gives a TimeoutError; others give their result."""
    monkeypatch.setattr(tpu, "TIMEOUT_SECS", 0.2)
    outcome = tpu.call_with_timeout(lambda: time.sleep(5))

    assert str(outcome) == "no answer within 0.2 s"
    assert tpu.call_with_timeout(lambda: 7) == 7


def test_the_first_line_of_a_long_reason_is_shown():
    """TensorFlow's reasons can have many lines, of which the first says what is wrong."""
    error = tpu.not_found("my-tpu", "\nNo such TPU.\nTraceback:\n")

    assert str(error) == message("my-tpu", "No such TPU")
