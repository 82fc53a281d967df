"""What is said when another worker's process has ended, or answers no more."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

import strategies

TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")


class WorkerLostError(RuntimeError):
    """Another worker's process has ended or answers no more, so that no step can be taken."""


@contextlib.contextmanager
def naming_the_lost(strategy: tf.distribute.Strategy, where: Callable[[], str]) -> Iterator[None]:
    """Within, TensorFlow's error for a lost worker is a WorkerLostError that names it.

    Args:
        strategy: whose workers.
        where: returns what to say of where the run stands.
    """
    try:
        yield
    except tf.errors.OpError as error:
        lost = strategies.has_workers(strategy) and lost_task(strategy, error.message)
        if not lost:
            raise
        raise WorkerLostError(
            f"`strategy` must keep all its workers; got an end of {lost} {where()} No step can be "
            "taken without it. See what it has printed, and start all of them again with the same "
            "command."
        ) from error


def lost_task(strategy: tf.distribute.Strategy, message: str) -> str | None:
    """Returns the task that TensorFlow's message says is gone, and its address; None of none."""
    cluster = strategy.cluster_resolver
    own = (cluster.task_type, str(cluster.task_id))
    for kind, index in TASK.findall(message):
        if (kind, index) != own:
            return f"{kind} {index} ({cluster.cluster_spec().task_address(kind, int(index))})"
    return None
