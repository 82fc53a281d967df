"""A machine without a TPU: what is looked for, and what is said, in a time that is stated."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import tensorflow as tf

import strategies
from strategies import tpu

HERE = "/physical_device:CPU:0"


def told(address, reason):
    """The one error."""
    return (
        f"`devices` must lead to a TPU; got {address!r}: {reason}. It was looked for there; this "
        f"machine itself has {HERE}. Pass a TPU's name, local or grpc://HOST:PORT (--tpu=...), or "
        'use the strategy "auto", which takes what there is.'
    )


@pytest.fixture
def server():
    """Starts servers that do something with the first connection; returns their ports."""
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


def error_of(address):
    """What is said of an address, and how long it took."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="TPU") as error:
        strategies.create("tpu", [address])
    return str(error.value), time.monotonic() - began


def test_nobody_listens():
    """The connection is refused."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    address = f"grpc://127.0.0.1:{port}"

    assert error_of(address)[0] == told(address, "[Errno 111] Connection refused")


def test_an_address_that_never_answers(server, monkeypatch):
    """It accepts the connection and says nothing: stock TensorFlow waits for more than a minute."""
    monkeypatch.setattr(tpu, "TIMEOUT", 1.0)
    address = f"grpc://127.0.0.1:{server(None)}"
    found, seconds = error_of(address)

    assert found == told(address, "timed out")
    assert seconds < 10


def test_somebody_else_answers(server):
    """A web server, say."""
    address = f"grpc://127.0.0.1:{server(b'HTTP/1.1 400 Bad Request')}"

    assert error_of(address)[0] == told(address, "it does not speak gRPC, but answers b'HTTP/1.1 '")


@pytest.mark.parametrize("address", ["grpc://here", "grpc://:8470", "grpc://here:port"])
def test_an_address_that_is_none(address):
    """It is not tried."""
    assert error_of(address)[0] == told(address, "it is no grpc://HOST:PORT")


def test_a_server_of_tensorflow_answers():
    """What is taken for an answer is what a gRPC server says: TensorFlow's own."""
    server = tf.distribute.Server.create_local_server()
    host, _, port = server.target.removeprefix("grpc://").rpartition(":")
    tpu.check_answers(host, int(port))


def test_here_is_none():
    """TensorFlow has no kernel for it."""
    found, seconds = error_of("local")

    reason = found.partition("'local': ")[2].partition(". It was looked")[0]
    assert found == told("local", reason)
    assert "No OpKernel was registered" in reason
    assert seconds < 20


def test_a_name_nobody_knows(monkeypatch):
    """Whatever TensorFlow says of it, or if it says nothing in time."""
    monkeypatch.setattr(tpu, "TIMEOUT", 10.0)
    found, seconds = error_of("my-tpu")

    assert found.startswith("`devices` must lead to a TPU; got 'my-tpu': ")
    assert seconds < 20


def test_a_resolver_that_hangs(monkeypatch):
    """It is left to itself."""
    monkeypatch.setattr(tpu, "TIMEOUT", 0.2)
    outcome = tpu.in_time(lambda: time.sleep(5))

    assert str(outcome) == "no answer within 0.2 s"
    assert tpu.in_time(lambda: 7) == 7


@pytest.mark.parametrize("devices", ["local", [], ["a", "b"]])
def test_one_address_in_a_list(devices):
    """As devices are given elsewhere."""
    with pytest.raises(ValueError, match="devices") as error:
        strategies.create("tpu", devices)

    assert str(error.value) == (
        f"`devices` must be a list of one address for tpu; got {devices!r}. It leads to all cores of "
        'a TPU. Pass for instance ["local"], or None.'
    )


def test_auto_takes_what_there_is_and_says_so():
    """On this machine the CPU."""
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
        "strategy: DefaultDistributionStrategy: there is neither a TPU nor a GPU",
        "1",
    ]


def test_auto_looks_for_the_tpu_it_is_told_of(monkeypatch, capsys):
    """And does not take something else in its place without a word."""
    monkeypatch.setenv("TPU_NAME", "grpc://nowhere")
    with pytest.raises(ValueError, match="'grpc://nowhere'"):
        strategies.create("auto")

    assert capsys.readouterr().out == ""
