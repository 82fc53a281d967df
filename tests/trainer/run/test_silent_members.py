"""A parameter-server job whose process no longer answers is ended; see also test_parameter_server.py."""

import pathlib
import types

import pytest
import tensorflow as tf

from strategies.launch import free_ports
from strategies.liveness import Answer
from trainer.run import silent_members as module

CHECKPOINT = pathlib.Path("run/ckpt-40")


class EndedError(BaseException):
    """Raised in place of ending the process."""


@pytest.mark.parametrize(
    ("name", "answer", "checkpoint", "text"),
    [
        (
            "ps 0",
            Answer.REFUSED,
            CHECKPOINT,
            "Lost ps 0 (a:1) after step 40: it has ended. The run cannot go on without it, because it "
            "holds variables of the model. Nothing more is saved. End all processes of the job and "
            "run the same command again to continue from run/ckpt-40.",
        ),
        (
            "worker 1",
            Answer.SILENT,
            None,
            "Lost worker 1 (a:1) after step 40: it no longer answers: it is stopped, or cannot be "
            "reached. The run cannot go on without it, because it has been given a step that no "
            "other worker can take. Nothing more is saved. End all processes of the job and run the "
            "same command again to start over.",
        ),
    ],
)
def test_what_is_printed(name, answer, checkpoint, text):
    """The process, the step and the checkpoint are named, and why the run cannot go on."""
    assert module.describe_loss(name, "a:1", answer, 40, checkpoint) == text


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
    monkeypatch.setattr(module.os, "_exit", end)
    monkeypatch.setattr(module.strategies, "is_asynchronous", lambda _: True)
    job = types.SimpleNamespace(cluster_spec=lambda: spec)
    monkeypatch.setattr(module.strategies, "find_cluster", lambda: job)
    with module.silent_members_end_the_run(None, lambda: (40, CHECKPOINT)):
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
        assert capsys.readouterr().err.startswith(f"Lost {name} (127.0.0.1:")
    else:
        lost(name, answer)
        assert "has ended. The other workers take its steps." in caplog.text
