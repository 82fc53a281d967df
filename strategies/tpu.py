"""TPUs: found, connected to and initialised, or one error that says which was looked for."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# How long a TPU may take to answer: seconds.
TIMEOUT = 20.0
# A gRPC server greets with a frame of HTTP/2 settings, once it has been greeted with this.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4  # what the fourth byte of its answer says


def tpu(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """A copy of the model on each core of a TPU, kept in step.

    `devices` is one address: a TPU's name, "local" on a TPU machine, or "grpc://HOST:PORT". None
    takes `TPU_NAME` from the environment, and else "local".
    """
    if isinstance(devices, str) or (devices is not None and len(devices) != 1):
        raise ValueError(
            f"`devices` must be a list of one address for tpu; got {devices!r}. It leads to all "
            'cores of a TPU. Pass for instance ["local"], or None.'
        )
    address = devices[0] if devices else os.environ.get("TPU_NAME", "local")
    resolver = resolve(address)
    try:
        if address != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise no_tpu(address, str(error)) from error
    return tf.distribute.TPUStrategy(resolver)


def resolve(address: str) -> Any:
    """Returns TensorFlow's resolver for an address behind which something answers.

    Raises:
        ValueError: if nothing does within `TIMEOUT` seconds: TensorFlow would wait without end.
    """
    if address.startswith("grpc://"):
        host, _, port = address.removeprefix("grpc://").rpartition(":")
        if not host or not port.isdigit():
            raise no_tpu(address, "it is no grpc://HOST:PORT")
        try:
            check_answers(host, int(port))
        except OSError as error:
            raise no_tpu(address, str(error) or type(error).__name__) from error
    made = in_time(lambda: tf.distribute.cluster_resolver.TPUClusterResolver(address))
    if isinstance(made, Exception):
        raise no_tpu(address, str(made)) from made
    return made


def check_answers(host: str, port: int) -> None:
    """Raises OSError unless a gRPC server answers at an address."""
    with socket.create_connection((host, port), timeout=TIMEOUT) as connection:
        connection.settimeout(TIMEOUT)
        connection.sendall(GREETING)
        answer = connection.recv(9)
    if len(answer) < 4 or answer[3] != SETTINGS:
        raise OSError(f"it does not speak gRPC, but answers {answer!r}")


def in_time(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or the exception it raises, or a TimeoutError."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001  # it is told, whatever it is
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return outcome[0] if outcome else TimeoutError(f"no answer within {TIMEOUT:g} s")


def no_tpu(address: str, reason: str) -> ValueError:
    """Returns the error for an address that leads to no TPU."""
    here = ", ".join(device.name for device in tf.config.list_physical_devices())
    return ValueError(
        f"`devices` must lead to a TPU; got {address!r}: {reason.strip().splitlines()[0]}. It was "
        f"looked for there; this machine itself has {here}. Pass a TPU's name, local or "
        'grpc://HOST:PORT (--tpu=...), or use the strategy "auto", which takes what there is.'
    )
