"""A lost worker is named; the jobs of several processes are in tests/laws/test_workers.py."""

import dataclasses
import pathlib
import types

import pytest
import tensorflow as tf

import strategies
from strategies.launch import free_ports
from strategies.liveness import Answer
from trainer import WorkerLostError
from trainer.run import lost_worker as module
from trainer.run import stop_signals

GONE = (
    "Collective ops is aborted by: /job:worker/replica:0/task:0 {0} /job:worker/replica:0/task:1 "
    "is not responding"
)
CLUSTER = tf.train.ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]})


def be_in_job(monkeypatch, **different):
    """Gives every strategy the capabilities of the default one, but for some."""
    found = strategies.capabilities(tf.distribute.get_strategy())
    found = dataclasses.replace(found, **different)
    monkeypatch.setattr(strategies, "capabilities", lambda _: found)


@pytest.fixture
def strategy(monkeypatch):
    """A stand-in for the strategy of worker 0 in a job of two workers and a parameter server."""
    resolver = types.SimpleNamespace(task_type="worker", task_id=0, cluster_spec=lambda: CLUSTER)
    be_in_job(monkeypatch, multi_worker=True)
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

    for part in ("worker 1 (b:2)", "step 40", remedy):
        assert part in str(error.value)
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
    be_in_job(monkeypatch, multi_worker=has_workers)
    text = "nothing is known" if has_workers else GONE.format("says that")
    cause = tf.errors.UnavailableError(None, None, text)
    with pytest.raises(tf.errors.UnavailableError) as error:
        raising(cause, strategy, None)

    assert error.value is cause


class EndedError(BaseException):
    """Raised in place of ending the process."""


def test_one_process_is_not_watched(monkeypatch):
    """Other strategies have no servers, and start no thread."""
    monkeypatch.setattr(module, "LifeWatch", None)
    with module.silent_members_end_the_run(tf.distribute.get_strategy(), lambda: (0, None)):
        pass


@pytest.fixture
def lost(monkeypatch):
    """Returns the function that is called about a lost process of a job of two workers."""
    ports = free_ports(3)
    spec = tf.train.ClusterSpec(
        {
            "chief": ["127.0.0.1:1"],
            "worker": [f"127.0.0.1:{port}" for port in ports[:2]],
            "ps": [f"127.0.0.1:{ports[2]}"],
        }
    )
    watched = {}

    class Watch:
        def __init__(self, addresses, lost, irreplaceable):
            assert irreplaceable == ["ps 0"]
            watched.update(addresses=addresses, lost=lost)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def end(code):
        raise EndedError(code)

    monkeypatch.setattr(module, "LifeWatch", Watch)
    monkeypatch.setattr(stop_signals.os, "_exit", end)
    be_in_job(monkeypatch, asynchronous=True)
    job = types.SimpleNamespace(cluster_spec=lambda: spec)
    monkeypatch.setattr(module.strategies, "find_cluster", lambda: job)
    with module.silent_members_end_the_run(None, lambda: (40, pathlib.Path("run/ckpt-40"))):
        assert set(watched["addresses"]) == {"worker 0", "worker 1", "ps 0"}
        return watched["lost"]


@pytest.mark.parametrize(
    ("name", "answer", "alive", "ends"),
    [
        ("ps 0", Answer.REFUSED, True, True),
        ("ps 0", Answer.SILENT, True, True),
        ("worker 0", Answer.SILENT, True, True),
        ("worker 0", Answer.REFUSED, True, False),
        ("worker 0", Answer.REFUSED, False, True),
    ],
)
def test_what_ends_the_run(lost, monkeypatch, capsys, caplog, name, answer, alive, ends):
    """A lost server, a stopped worker and the last worker end the run with 75; a worker that has
    ended does not, because the others take its steps.
    """
    monkeypatch.setattr(module, "ask", lambda _: Answer.ALIVE if alive else Answer.REFUSED)
    if ends:
        with pytest.raises(EndedError) as error:
            lost(name, answer)
        assert error.value.args == (75,)
        assert capsys.readouterr().err.startswith(f"lost {name} (127.0.0.1:")
    else:
        lost(name, answer)
        assert "has ended" in caplog.text
