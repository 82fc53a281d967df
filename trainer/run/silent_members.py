"""Ends a parameter-server job one of whose processes no longer answers.

TensorFlow's coordinator gives the steps of a worker that has died to another worker. It waits
without an end for one that is stopped, and for a parameter server; the chief then hangs inside
TensorFlow, where no exception reaches it. So a thread asks the others, and ends the chief's
process.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import tensorflow as tf
from absl import logging

import strategies
from strategies.cluster import addresses_of
from strategies.liveness import GONE, Answer, LifeWatch, ask
from trainer.run.stop_signals import EXIT_CODE


@contextlib.contextmanager
def silent_members_end_the_run(
    strategy: tf.distribute.Strategy, progress: Callable[[], tuple[int, pathlib.Path | None]]
) -> Iterator[None]:
    """Context manager: watches the other processes of a job with parameter servers.

    If a parameter server or all workers have ended, or if one of them is stopped, this process
    prints which one, and ends with exit code 75. Nothing is saved: what the servers hold cannot be
    read.

    Args:
        strategy: the strategy that takes the steps.
        progress: returns the last known step, and the newest checkpoint or None. It is called in
            another thread, and must not read variables.
    """
    cluster = strategies.find_cluster() if strategies.is_asynchronous(strategy) else None
    if cluster is None:
        yield
        return
    addresses = addresses_of(cluster)
    workers = [address for name, address in addresses.items() if name.startswith("worker")]
    others = {name: each for name, each in addresses.items() if not name.startswith("chief")}

    def lost(name: str, answer: Answer) -> None:
        is_worker = name.startswith("worker")
        if answer in GONE and is_worker and any_alive(workers):
            logging.warning(
                "%s at %s has ended. The other workers take its steps.", name, addresses[name]
            )
            return
        step, checkpoint = progress()
        why = describe_loss(name, addresses[name], answer, step, checkpoint)
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    # A server's variables end with it. TensorFlow notices, too, but may hang while it retries.
    with LifeWatch(others, lost, irreplaceable=[n for n in others if n.startswith("ps")]):
        yield


def any_alive(addresses: list[str]) -> bool:
    """Returns whether a process answers at one of the addresses."""
    return any(ask(address) is Answer.ALIVE for address in addresses)


def describe_loss(
    name: str, address: str, answer: Answer, step: int, checkpoint: pathlib.Path | None
) -> str:
    """Returns what is printed when a process of the job is lost.

    Args:
        name: the process, such as "ps 0".
        address: its "HOST:PORT".
        answer: what it last answered.
        step: the last known step.
        checkpoint: the newest checkpoint, or None.
    """
    refused = answer in GONE
    what = "has ended" if refused else "no longer answers: it is stopped, or cannot be reached"
    worker = "it has been given a step that no other worker can take"
    why = worker if name.startswith("worker") else "it holds variables of the model"
    remedy = f"to continue from {checkpoint}" if checkpoint else "to start over"
    return (
        f"Lost {name} ({address}) after step {step}: it {what}. The run cannot go on without it, "
        f"because {why}. Nothing more is saved. End all processes of the job and run the same "
        f"command again {remedy}."
    )
