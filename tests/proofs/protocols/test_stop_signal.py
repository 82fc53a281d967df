"""A signal to one of several workers ends all of them: in the model as in the code."""

from unittest import mock

import helpers
import numpy as np
import pytest
import tensorflow as tf

from proofs.protocols import stop_signal
from proofs.protocols.search import search
from trainer.loop.inner import run_steps
from trainer.run.outer_loop import OuterLoop
from trainer.run.saving import RunSaver


@pytest.mark.parametrize(
    ("workers", "signalled", "blocks"),
    [(2, 1, 0), (3, 1, 0), (2, 2, 1), (2, 2, 2), pytest.param(3, 3, 3, marks=pytest.mark.thorough)],
)
def test_the_claims_hold_whenever_the_signal_comes(workers, signalled, blocks):
    """All are saved at one step, at most one after the signal; or, if the data of one stops coming,
    all end.
    """
    found = search(stop_signal.model(workers, signalled=signalled, blocks=blocks))

    assert found.broken == "", "\n".join(found.story)
    assert found.states > 300


@pytest.mark.parametrize("fault", stop_signal.FAULTS)
def test_a_fault_is_found(fault):
    """A protocol with a fault breaks a claim, and there is a story of how."""
    found = search(stop_signal.FAULTS[fault]())

    assert found.broken
    assert any("SIGTERM" in line for line in found.story)


def test_data_that_stops_on_a_worker_without_a_signal_is_waited_for():
    """What the claims leave out: the others cannot tell this from a slow step. Schedulers send the
    signal to all.
    """
    found = search(stop_signal.model(2, signalled=1, blocks=1))

    assert found.broken == "everybody can go on until all is done"
    assert found.story[-1] == "the data of worker 1 stops coming"


def test_the_inner_loop_votes_before_each_batch():
    """As in the model: a vote, a batch, a step, a vote, and so on; a vote to stop ends it."""
    done, votes = [], iter([False, False, True])

    class Pending:
        def begin(self, count):
            return count * 0

        def write(self, index, report, waited, room):
            del index, report, waited
            return room

        def read(self, taken):
            return taken

    class Batches:
        element_spec = ()

        def __next__(self):
            done.append("next")
            return ()

    def vote():
        done.append("stop_requested")
        return tf.constant(next(votes))

    def step(batch):
        del batch
        done.append("train_step")

    taken, _ = run_steps(step, tf.Variable(False), vote, Pending(), Batches(), tf.constant(5))

    one = ["next", "train_step", stop_signal.VOTE_INSIDE]
    assert done == [stop_signal.VOTE_INSIDE, *one, *one]
    assert int(taken) == 2


@pytest.mark.thorough
def test_the_outer_loop_votes_before_each_inner_loop(monkeypatch):
    """As in the model: a vote, an inner loop, a vote; and saving once a vote ends it. The flag that
    this vote asks for is set before the one in the graph.
    """
    done = []
    line = helpers.Linear(steps_per_loop=stop_signal.STEPS_PER_LOOP, verbose=False)
    asked = OuterLoop._stop_asked

    def vote(self):
        done.append("_stop_asked")
        return asked(self)

    take = OuterLoop._take_steps

    def steps(self):
        done.append("_take_steps")
        take(self)
        if done.count("_take_steps") == 2:
            line.stop()

    monkeypatch.setattr(OuterLoop, "_stop_asked", vote)
    monkeypatch.setattr(OuterLoop, "_take_steps", steps)

    def save(self, step):
        del self, step
        done.append("save")

    monkeypatch.setattr(RunSaver, "save", save)
    line.train(
        {"x": np.ones([4, 1], "float32"), "slope": np.ones([4], "float32")},
        steps=100,
        global_batch=4,
    )

    assert done == [
        "_stop_asked",
        "_take_steps",
        "_stop_asked",
        "_take_steps",
        "_stop_asked",
        "save",
    ]

    order = []
    with mock.patch.object(
        line._parts.stop, "assign", lambda value: order.append((line.stop_asked, value))
    ):
        line.stop_asked = False
        line.stop()
    assert order == [(True, True)]
