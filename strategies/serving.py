"""What a worker or a parameter server does: it serves the chief for as long as there is one."""

import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

import tensorflow as tf
from absl import logging

from strategies.cluster import Resolver
from strategies.liveness import GONE, SILENT_SECS, Answer, ask
from strategies.rendezvous import WAIT_SECS, WARN_INTERVAL_SECS

# EX_TEMPFAIL of sysexits.h: run the command again.
EXIT_CODE = 75
# How long a process that was asked to end still serves a chief that is saving.
GRACE_SECS = 30.0
POLL_SECS = 0.5
# Seconds between two questions to a chief that answers.
ASK_SECS = 5.0


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
