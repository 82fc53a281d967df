"""On a machine without a TPU, the error says where one was looked for, within a bounded time."""

import socket
import time

import pytest

import strategies
from strategies import tpu


def error_of(devices):
    """Returns the error message for these devices, and after how many seconds it was raised."""
    start = time.monotonic()
    with pytest.raises(ValueError, match="TPU") as error:
        strategies.create("tpu", devices)
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("address", ["grpc://here", "grpc://127.0.0.1:1"])
def test_nothing_answers(address):
    """The error names the address at once."""
    found, seconds = error_of([address])

    assert found.startswith(f"found no TPU at {address!r}: ")
    assert seconds < 10


def test_a_server_that_never_answers(monkeypatch):
    """An open connection without an answer is an error; TensorFlow alone waits over a minute."""
    monkeypatch.setattr(tpu, "TIMEOUT_SECS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found, seconds = error_of([f"grpc://127.0.0.1:{listening.getsockname()[1]}"])

    assert found.endswith(": silent")
    assert seconds < 10


@pytest.mark.parametrize("devices", [["local"], None])
def test_this_machine_has_no_tpu(monkeypatch, devices):
    """The address "local", which is also the default, is an error with TensorFlow's reason."""
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

    assert isinstance(tpu.call_with_timeout(lambda: time.sleep(5)), TimeoutError)
    assert tpu.call_with_timeout(lambda: 7) == 7
