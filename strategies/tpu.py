"""Finds and initializes a TPU, or raises an error within a limited time."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from strategies.liveness import Answer, ask

TIMEOUT_SECS = 20.0  # how long to wait for an answer from a TPU


def tpu(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Returns a strategy with a replica on each core of a TPU.

    Args:
        devices: a list of one address: a TPU's name, "local" on a machine with a TPU, or
            "grpc://HOST:PORT". None uses the environment variable `TPU_NAME` or, if it is not
            set, "local".

    Raises:
        ValueError: if no TPU is found at the address.
    """
    address = devices[0] if devices else os.environ.get("TPU_NAME", "local")
    resolver = resolve(address)
    try:
        if address != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise not_found(address, str(error)) from error
    return tf.distribute.TPUStrategy(resolver)


def resolve(address: str) -> Any:
    """Returns TensorFlow's resolver for the address of a TPU.

    Raises:
        ValueError: if nothing answers within `TIMEOUT_SECS`. TensorFlow itself would wait forever.
    """
    if address.startswith("grpc://"):
        server = address.removeprefix("grpc://")
        has_port = server.rpartition(":")[2].isdigit()
        answer = ask(server, TIMEOUT_SECS) if has_port else Answer.UNREACHABLE
        if answer is not Answer.ALIVE:
            raise not_found(address, answer.value)
    result = call_with_timeout(lambda: tf.distribute.cluster_resolver.TPUClusterResolver(address))
    if isinstance(result, Exception):
        raise not_found(address, str(result)) from result
    return result


def call_with_timeout(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, the exception it raised, or a TimeoutError.

    A call that hangs keeps its thread, which ends with the process.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001  # returned to the caller
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECS)
    return outcome[0] if outcome else TimeoutError(f"no answer within {TIMEOUT_SECS:g} s")


def not_found(address: str, reason: str) -> ValueError:
    """Returns the error for an address where no TPU was found."""
    first_line = reason.strip().partition("\n")[0].rstrip(".")
    return ValueError(f"found no TPU at {address!r}: {first_line}")
