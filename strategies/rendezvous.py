"""Joins a job once all its processes have started, and names the ones that are missing.

TensorFlow itself waits inside a constructor that holds Python's global lock: the process prints
nothing and reacts to no signal but SIGKILL. Therefore the processes wait here first. Each process
listens on its own address until it has reached all others. It then releases the port to
TensorFlow's server, which answers the processes that are still waiting.
"""

import socket
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from strategies.cluster import Resolver, addresses_of

WAIT_SECS = 1800.0
WARN_INTERVAL_SECS = 30.0
POLL_SECS = 0.2
CONNECT_TIMEOUT_SECS = 2.0

# The strategies of the jobs that this process has joined. It cannot join a job again: TensorFlow's
# server keeps its port until the process ends.
_joined: dict[tuple[object, ...], tf.distribute.Strategy] = {}


def join_job(
    cluster: Resolver, create: Callable[[Resolver], tf.distribute.Strategy]
) -> tf.distribute.Strategy:
    """Returns the strategy of a job, the same one in every call, once all processes have started.

    Args:
        cluster: the addresses of all processes, and this process's task.
        create: returns a strategy that connects this process to the others.

    Raises:
        TimeoutError: if a process has not answered within half an hour.
    """
    addresses = addresses_of(cluster)
    task = f"{cluster.task_type} {cluster.task_id}"
    job = (create, task, *addresses.items())
    if job not in _joined:
        wait_for_all(addresses, task)
        _joined[job] = create(cluster)
    return _joined[job]


def wait_for_all(addresses: dict[str, str], task: str) -> None:
    """Returns once every process of a job has answered.

    Args:
        addresses: the "HOST:PORT" of every process, keyed by task, for instance "worker 1".
        task: the task of this process.

    Raises:
        TimeoutError: if a process has not answered within half an hour. The message names it.
    """
    start = last_warning = time.monotonic()
    missing = {other: address for other, address in addresses.items() if other != task}
    port = int(addresses[task].rpartition(":")[2])
    # Connections are never accepted: being able to connect shows that this process has started.
    with listening(port):
        while True:
            missing = {other: each for other, each in missing.items() if not answers(each)}
            if not missing:
                return
            absent = " and ".join(f"{other} at {each}" for other, each in missing.items())
            now = time.monotonic()
            if now - start > WAIT_SECS:
                raise TimeoutError(
                    f"waited {WAIT_SECS:.0f} s for {absent}: no process answers there"
                )
            if now - last_warning > WARN_INTERVAL_SECS:
                last_warning = now
                logging.warning("Still waiting for %s after %.0f s.", absent, now - start)
            time.sleep(POLL_SECS)


def listening(port: int) -> socket.socket:
    """Returns a socket that is reached by IPv4 and, where this machine has it, by IPv6."""
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


def answers(address: str) -> bool:
    """Returns whether a process accepts connections at "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECS):
            return True
    except OSError:
        return False
