"""What becomes of a run when another process of its job ends or no longer answers.

TensorFlow raises an error in the other workers of a synchronous strategy, which is explained here.
With parameter servers, its coordinator gives the steps of a worker that has died to another worker.
It waits without an end for one that is stopped, and for a parameter server; the chief then hangs
inside TensorFlow, where no exception reaches it. So a thread asks the others, and ends the chief's
process.
"""

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf
from absl import logging

import strategies
from strategies.cluster import addresses_of
from strategies.liveness import GONE, Answer, LifeWatch, ask
from trainer.run.stop_signals import end

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
        of_job = strategies.capabilities(strategy).several_processes
        lost = of_job and lost_worker(strategy, error.message)
        if not lost:
            raise
        step, checkpoint = progress()
        remedy = f"to continue from {checkpoint}" if checkpoint else "to start over"
        raise WorkerLostError(
            f"lost {lost} after step {step}; restart all workers with the same command {remedy}"
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
    cluster = strategies.find_cluster() if strategies.capabilities(strategy).asynchronous else None
    if cluster is None:
        yield
        return
    addresses = addresses_of(cluster)
    workers = [address for name, address in addresses.items() if name.startswith("worker")]
    others = {name: each for name, each in addresses.items() if not name.startswith("chief")}

    def lost(name: str, answer: Answer) -> None:
        is_worker = name.startswith("worker")
        alive = (ask(worker) is Answer.ALIVE for worker in workers)
        if answer in GONE and is_worker and any(alive):
            logging.warning("%s has ended; the other workers take its steps", name)
            return
        step, checkpoint = progress()
        what = "has ended" if answer in GONE else "no longer answers"
        remedy = f"to continue from {checkpoint}" if checkpoint else "to start over"
        end(
            f"lost {name} ({addresses[name]}) after step {step}: it {what}; run the same command "
            f"again for all processes {remedy}"
        )

    # A server's variables end with it. TensorFlow notices, too, but may hang while it retries.
    with LifeWatch(others, lost, irreplaceable=[n for n in others if n.startswith("ps")]):
        yield
