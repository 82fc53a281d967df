"""Explains the error that occurs when another worker's process ends or stops responding."""

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

import strategies

TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")


class WorkerLostError(RuntimeError):
    """Raised when another worker's process has ended or no longer responds."""


@contextlib.contextmanager
def worker_loss_explained(
    strategy: tf.distribute.Strategy, progress: Callable[[], tuple[int, pathlib.Path | None]]
) -> Iterator[None]:
    """Context manager: turns TensorFlow's error for a lost worker into a WorkerLostError.

    The message of the WorkerLostError names the lost worker.

    Args:
        strategy: the strategy whose workers take the steps.
        progress: returns the number of attempted steps, and the newest checkpoint or None.
    """
    try:
        yield
    except tf.errors.OpError as error:
        of_job = strategies.has_workers(strategy) or strategies.is_asynchronous(strategy)
        lost = of_job and lost_worker(strategy, error.message)
        if not lost:
            raise
        step, checkpoint = progress()
        remedy = f"to continue from {checkpoint}." if checkpoint else "to start over."
        raise WorkerLostError(
            f"Lost {lost} after step {step}. Check what it printed for the cause. Restart all "
            f"workers with the same command {remedy}"
        ) from error


def lost_worker(strategy: tf.distribute.Strategy, message: str) -> str | None:
    """Returns the lost task and its address, for example "worker 1 (host:2222)".

    Args:
        strategy: a strategy with several workers.
        message: TensorFlow's error message.

    Returns:
        None if the message names no other task of the job.
    """
    # A strategy of parameter servers does not tell its cluster.
    cluster = strategy.cluster_resolver or strategies.find_cluster()
    if cluster is None:
        return None
    this_task = (cluster.task_type, str(cluster.task_id))
    for kind, index in TASK.findall(message):
        if (kind, index) != this_task:
            return f"{kind} {index} ({cluster.cluster_spec().task_address(kind, int(index))})"
    return None
