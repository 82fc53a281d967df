"""The processes of a job wait for each other, and say for whom.

TensorFlow waits inside a constructor that holds Python's lock, says nothing, and ends at no signal
but SIGKILL. So they wait here before: each listens at its own address until it has reached all
others. Whoever goes on leaves its port to TensorFlow's server, which then answers in its place.
"""

import socket
import time

from absl import logging

WAIT_SECS = 1800.0
SAY_SECS = 30.0  # between two warnings
LOOK_SECS = 0.2
CONNECT_SECS = 2.0


def gather(addresses: dict[str, str], own: str) -> None:
    """Returns when every process of a job has answered.

    Args:
        addresses: "HOST:PORT" of every process, by task, as "worker 1".
        own: the task of this process.

    Raises:
        TimeoutError: if some have not answered within half an hour; it names them.
    """
    began = said = time.monotonic()
    missing = {task: address for task, address in addresses.items() if task != own}
    port = int(addresses[own].rpartition(":")[2])
    # Nobody is accepted: that a connection is made is the answer.
    with socket.create_server(("", port), backlog=4096):
        while True:
            missing = {task: each for task, each in missing.items() if not answers(each)}
            if not missing:
                return
            absent = " and ".join(f"{task} at {each}" for task, each in missing.items())
            now = time.monotonic()
            if now - began > WAIT_SECS:
                raise TimeoutError(
                    f"`strategy` must have all processes of its job within {WAIT_SECS:.0f} s; got "
                    f"no answer from {absent}. All have to be there to begin. Start them, or look "
                    "at their own output, and that this one can reach them."
                )
            if now - said > SAY_SECS:
                said = now
                logging.warning("Waiting since %.0f s for %s.", now - began, absent)
            time.sleep(LOOK_SECS)


def answers(address: str) -> bool:
    """Returns whether somebody takes connections at "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECS):
            return True
    except OSError:
        return False
