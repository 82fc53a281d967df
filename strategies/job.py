"""What a process does in its job: it waits for all others, and a server then serves the chief.

TensorFlow itself waits inside a constructor that holds Python's global lock: the process prints
nothing and reacts to no signal but SIGKILL. Therefore the processes wait here first. Each process
listens on its own address until it has reached all others. It then releases the port to
TensorFlow's server, which answers the processes that are still waiting.
"""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import tensorflow as tf
from absl import logging

from strategies.cluster import Resolver, addresses_of
from strategies.liveness import GONE, SILENT_SECS, Answer, ask

WAIT_SECS = 1800.0
WARN_INTERVAL_SECS = 30.0
POLL_SECS = 0.2
CONNECT_TIMEOUT_SECS = 2.0
# EX_TEMPFAIL of sysexits.h: run the command again.
EXIT_CODE = 75
# How long a process that was asked to end still serves a chief that is saving.
GRACE_SECS = 30.0
# Seconds between two questions to a chief that answers.
ASK_SECS = 5.0

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


def serve(cluster: Resolver) -> NoReturn:
    """Serves the chief of a parameter-server job, until the chief ends or no longer answers.

    The first SIGTERM or SIGINT does not end the process at once: a scheduler sends it to all
    processes of a job, and the chief saves what the parameter servers hold. The process ends with
    the chief, or after `GRACE_SECS`, or at the second signal.

    Args:
        cluster: the job, and this process's task in it.

    Raises:
        SystemExit: with 0 if the chief has ended; with 75 if this process was asked to end, or if
            the chief is running but no longer answers; with 128 plus the number of a second signal.
        TimeoutError: if no chief has answered within half an hour.
    """
    signals = StopRequests()
    server = tf.distribute.Server(
        cluster.cluster_spec(),
        job_name=cluster.task_type,
        task_index=cluster.task_id,
        protocol=cluster.rpc_layer or "grpc",
    )
    chief = cluster.cluster_spec().task_address("chief", 0)
    name = f"{cluster.task_type} {cluster.task_id}"
    wait_for_chief(chief, name, signals)
    code = wait_for_end(chief, name, signals)
    del server  # has served until here
    sys.exit(code)


class StopRequests:
    """Counts SIGTERM and SIGINT from now on; the second one ends the process."""

    def __init__(self) -> None:
        """Installs the handlers, if this is the main thread; no other thread can handle signals."""
        self.first: float | None = None  # time of the first signal
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Notes the time of the first signal; ends the process at the second."""
        del frame
        if self.first is not None:
            sys.exit(128 + number)
        self.first = time.monotonic()

    def seconds_ago(self) -> float | None:
        """Returns the seconds since the first signal, or None before it."""
        return None if self.first is None else time.monotonic() - self.first


def wait_for_chief(chief: str, name: str, signals: StopRequests) -> None:
    """Returns once the chief has answered.

    Args:
        chief: "HOST:PORT" of the chief.
        name: the name of this process.
        signals: the requests to end this process.
    """
    start = last_warning = time.monotonic()
    while ask(chief) is not Answer.ALIVE:
        now = time.monotonic()
        if signals.first is not None:
            sys.exit(EXIT_CODE)
        if now - start > WAIT_SECS:
            raise TimeoutError(
                f"waited {WAIT_SECS:.0f} s for the chief at {chief}: {name} gets no answer"
            )
        if now - last_warning > WARN_INTERVAL_SECS:
            last_warning = now
            logging.warning("Still waiting for the chief at %s after %.0f s.", chief, now - start)
        time.sleep(POLL_SECS)


def wait_for_end(chief: str, name: str, signals: StopRequests) -> int:
    """Returns the exit code, once there is nothing to serve any more.

    Args:
        chief: "HOST:PORT" of the chief, which has answered before.
        name: the name of this process.
        signals: the requests to end this process.
    """
    heard = asked = time.monotonic()
    while True:
        time.sleep(POLL_SECS)
        stopping = signals.seconds_ago()
        if stopping is None and time.monotonic() - asked < ASK_SECS:
            continue
        answer, asked = ask(chief), time.monotonic()
        if answer is Answer.ALIVE:
            heard = asked
        if stopping is not None and (answer in GONE or stopping > GRACE_SECS):
            return EXIT_CODE
        if asked - heard < SILENT_SECS:
            continue
        if answer in GONE:
            logging.info("The chief at %s has ended, and %s with it.", chief, name)
            return 0
        logging.error(
            "The chief at %s has not answered for %.0f s, so %s ends. Start all processes again to "
            "continue from the newest checkpoint.",
            chief,
            SILENT_SECS,
            name,
        )
        return EXIT_CODE
