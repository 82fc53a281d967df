"""Asks the processes of a job whether they are alive, and tells which one is not.

A process that has been stopped or whose machine is cut off still has its connections: TensorFlow
waits for it without an end. The kernel accepts connections for a stopped process, too. So it is the
process itself that must answer here: TensorFlow's servers speak HTTP/2 (RFC 9113), in which both
sides begin with a SETTINGS frame.
"""

import enum
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Self

# A process that has not answered for so long is lost. With the times below, this is known within a
# minute.
SILENT_SECS = 40.0
REFUSED_SECS = 10.0  # of a process that cannot return, if its port is closed
POLL_SECS = 5.0
ANSWER_SECS = 5.0

# What a client of HTTP/2 sends first: the preface, and a SETTINGS frame without settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Answer(enum.Enum):
    """What a process's address answers."""

    ALIVE = "alive"
    REFUSED = "refused"  # the machine answers that no process listens there
    UNREACHABLE = "unreachable"  # no way leads to the machine, or its name is not known
    SILENT = "silent"  # nothing answers in time: a process is stopped, or the machine is cut off


GONE = frozenset({Answer.REFUSED, Answer.UNREACHABLE})  # what a process that has ended answers


def ask(address: str, timeout_secs: float = ANSWER_SECS) -> Answer:
    """Asks a TensorFlow server for an answer.

    Args:
        address: "HOST:PORT".
        timeout_secs: seconds to wait for the connection, and for the answer.

    Returns:
        The answer. A process that listens and then closes the connection counts as alive.

    Example:
        >>> from strategies.launch import free_ports
        >>> ask(f"127.0.0.1:{free_ports(1)[0]}").value
        'refused'
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_secs) as connection:
            connection.sendall(GREETING)
            connection.recv(1)
    except TimeoutError:
        return Answer.SILENT
    except ConnectionError:
        return Answer.REFUSED
    except OSError:
        return Answer.UNREACHABLE
    return Answer.ALIVE


class LifeWatch:
    """Context manager: a thread that asks processes for answers, and reports those that are lost.

    Args:
        addresses: the "HOST:PORT" of each process, keyed by its name, such as "worker 1".
        lost: called in the thread when a process has not answered for `silent_secs`, and not again
            before it has answered: with its name, and with its last answer.
        silent_secs: the seconds without an answer after which a process is lost.
        poll_secs: the seconds between two questions.
        irreplaceable: names of processes whose state ends with them. One of these is lost as soon
            as its port has been closed for `REFUSED_SECS`; another may still be started again.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        lost: Callable[[str, Answer], object],
        silent_secs: float = SILENT_SECS,
        poll_secs: float = POLL_SECS,
        irreplaceable: Collection[str] = (),
    ) -> None:
        """Stores the arguments; entering the context starts the thread."""
        self._addresses = dict(addresses)
        self._lost = lost
        self._irreplaceable = frozenset(irreplaceable)
        self._silent_secs = silent_secs
        self._poll_secs = poll_secs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Asks no more."""
        self._ended.set()

    def _watch(self) -> None:
        """Asks all processes in turn until the context ends."""
        heard = dict.fromkeys(self._addresses, time.monotonic())
        told: set[str] = set()
        while not self._ended.wait(self._poll_secs):
            for name, address in self._addresses.items():
                answer, now = ask(address), time.monotonic()
                if answer is Answer.ALIVE:
                    heard[name] = now
                    told.discard(name)
                elif now - heard[name] >= self._patience(name, answer) and name not in told:
                    if self._ended.is_set():
                        return
                    told.add(name)
                    self._lost(name, answer)

    def _patience(self, name: str, answer: Answer) -> float:
        """Returns the seconds without an answer after which a process is lost."""
        ended = answer is Answer.REFUSED and name in self._irreplaceable
        return min(REFUSED_SECS, self._silent_secs) if ended else self._silent_secs
