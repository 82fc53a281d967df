"""A lost worker is named; the jobs of several processes are in tests/laws/test_workers.py."""

import pathlib
import types

import pytest
import tensorflow as tf

from trainer import WorkerLostError
from trainer.run import lost_worker as module

GONE = (
    "Collective ops is aborted by: /job:worker/replica:0/task:0 {0} /job:worker/replica:0/task:1 "
    "is not responding"
)
CLUSTER = tf.train.ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]})


@pytest.fixture
def strategy(monkeypatch):
    """A stand-in for the strategy of worker 0 in a job of two workers and a parameter server."""
    resolver = types.SimpleNamespace(task_type="worker", task_id=0, cluster_spec=lambda: CLUSTER)
    monkeypatch.setattr(module.strategies, "has_workers", lambda _: True)
    monkeypatch.setattr(module.strategies, "is_asynchronous", lambda _: False)
    return types.SimpleNamespace(cluster_resolver=resolver)


def raising(error, strategy, checkpoint):
    """Raises an error inside the context, after 40 steps."""
    with module.worker_loss_explained(strategy, lambda: (40, checkpoint)):
        raise error


@pytest.mark.parametrize(
    ("checkpoint", "remedy"),
    [(pathlib.Path("run/ckpt-40"), "continue from run/ckpt-40"), (None, "start over")],
)
def test_the_error_names_worker_step_and_remedy(strategy, checkpoint, remedy):
    """TensorFlow's message also names this worker, which is not the lost one."""
    cause = tf.errors.UnavailableError(None, None, GONE.format("says that"))
    with pytest.raises(WorkerLostError) as error:
        raising(cause, strategy, checkpoint)

    assert str(error.value) == (
        "Lost worker 1 (b:2) after step 40. Check what it printed for the cause. Restart all "
        f"workers with the same command to {remedy}."
    )
    assert error.value.__cause__ is cause


def test_any_kind_of_task_can_be_lost(strategy):
    """A message may leave out the replica, and name a parameter server."""
    assert module.lost_worker(strategy, "connection to /job:ps/task:0 was lost") == "ps 0 (c:3)"
    assert module.lost_worker(strategy, "/job:worker/replica:0/task:0 ran out of memory") is None


def test_a_server_of_a_strategy_without_a_resolver(strategy, monkeypatch):
    """Parameter-server strategies keep no resolver, so the environment tells the cluster."""
    resolver = strategy.cluster_resolver
    strategy.cluster_resolver = None
    monkeypatch.setattr(module.strategies, "find_cluster", lambda: resolver)
    assert module.lost_worker(strategy, "target /job:ps/replica:0/task:0 while") == "ps 0 (c:3)"
    monkeypatch.setattr(module.strategies, "find_cluster", lambda: None)
    assert module.lost_worker(strategy, "target /job:ps/replica:0/task:0 while") is None


@pytest.mark.parametrize("has_workers", [True, False])
def test_other_errors_pass_unchanged(strategy, monkeypatch, has_workers):
    """An error that names no other worker, or comes from a run on one machine, is not replaced."""
    monkeypatch.setattr(module.strategies, "has_workers", lambda _: has_workers)
    text = "nothing is known" if has_workers else GONE.format("says that")
    cause = tf.errors.UnavailableError(None, None, text)
    with pytest.raises(tf.errors.UnavailableError) as error:
        raising(cause, strategy, None)

    assert error.value is cause
