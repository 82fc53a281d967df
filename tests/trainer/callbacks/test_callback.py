"""Callbacks: objects with hooks that hear of a run, and whose states are saved with it."""

import gc
import inspect
import math
import weakref

import keras
import numpy as np
import pytest
from helpers import Linear, slopes

from trainer import Callback, Trainer
from trainer.callbacks.callback import HOOKS, check_hooks, keys_of


class Record(Callback):
    """Notes every call, and counts loops in an array that checkpoints save."""

    def __init__(self):
        """Has noted nothing."""
        self.calls = []
        self.loops = np.zeros([1], np.int32)

    def state_dict(self):
        """Returns the count."""
        return {"loops": self.loops}

    def load_state_dict(self, state):
        """Restores the count."""
        self.loops = state["loops"]

    def on_train_begin(self):
        """Notes the call."""
        self.calls.append("train_begin")

    def on_log(self, step, values):
        """Notes the call."""
        self.calls.append(("log", step, values["loss"]))

    def on_evaluate_begin(self, step):
        """Notes the call."""
        self.calls.append(("evaluate_begin", step))

    def on_evaluate_end(self, step, results):
        """Notes the call."""
        self.calls.append(("evaluate_end", step, sorted(results)))

    def on_epoch_end(self, epoch):
        """Notes the call."""
        self.calls.append(("epoch_end", epoch))

    def on_loop_end(self, step):
        """Counts."""
        self.loops += 1

    def on_train_end(self, summary):
        """Notes the call."""
        self.calls.append(("train_end", summary.step))


@pytest.mark.thorough
def test_a_callback_hears_what_a_trainer_hears(tmp_path):
    """Its hooks are those of a trainer, in the same order, and its state is saved: a run that is
    resumed has the same state as one without interruption.
    """
    data = slopes(1.0, 1.0)

    def run(*targets, folder=None):
        for target in targets:
            record = Record()
            line = Linear(
                log_interval=2,
                steps_per_loop=2,
                callbacks=[record],
                model_dir=folder,
                verbose=False,
            )
            line.train(data, steps=target, global_batch=1, eval_data=data, eval_interval=2)
        assert record.trainer is line
        return record

    whole, resumed = run(4), run(2, 4, folder=tmp_path)

    assert whole.calls == [
        "train_begin",
        ("log", 2, 0.5),
        ("evaluate_begin", 2),
        ("evaluate_end", 2, ["loss"]),
        ("epoch_end", 1),
        ("log", 4, -1.5),
        ("evaluate_begin", 4),
        ("evaluate_end", 4, ["loss"]),
        ("epoch_end", 2),
        ("train_end", 4),
    ]
    assert resumed.calls[1:] == whole.calls[5:]
    assert resumed.loops == whole.loops == [2]


def test_a_callback_does_not_keep_its_trainer_alive():
    """A trainer that nobody else holds is freed; the callback then says that it has none."""
    record = Record()
    line = weakref.ref(Linear(callbacks=[record], verbose=False))
    gc.collect()

    assert line() is None
    with pytest.raises(RuntimeError, match="Record has no trainer"):
        record.trainer  # noqa: B018  # the property raises


def test_a_callback_has_one_trainer():
    """A callback remembers what it has seen in one run, so it is refused in another."""
    record = Record()
    Linear(callbacks=[record], verbose=False)

    with pytest.raises(ValueError, match="`callbacks` must be new"):
        Linear(callbacks=[record], verbose=False)


def test_states_are_saved_by_name():
    """The name is that of the class; a second callback of a class has a number."""
    first, second, other = Record(), Record(), Callback()

    assert keys_of([first, other, second]) == {
        "Record": first,
        "Callback": other,
        "Record_2": second,
    }


def test_an_unknown_hook_is_an_error():
    """A method that looks like a hook, and would never be called, is refused; so is one of Keras's
    callbacks.
    """
    kinds = [type("Own", (kind,), {"on_evaluation_end": print}) for kind in (Linear, Callback)]
    with pytest.raises(TypeError, match="`on_evaluation_end`"):
        kinds[0](verbose=False)
    with pytest.raises(TypeError, match="`on_evaluation_end`"):
        Linear(callbacks=[kinds[1]()], verbose=False)
    with pytest.raises(TypeError, match="`callbacks`"):
        Linear(callbacks=[keras.callbacks.History()], verbose=False)


def test_the_hooks_of_a_callback_are_those_of_a_trainer():
    """With the same arguments; an attribute that is no function is none."""
    for name in HOOKS:
        own, of_trainer = (inspect.signature(getattr(kind, name)) for kind in (Callback, Trainer))
        assert list(own.parameters) == list(of_trainer.parameters)
    check_hooks(type("Own", (Trainer,), {"on_screen": True}))


class Squares(Callback):
    """Is called after the steps 1, 4, 9 and so on."""

    def __init__(self):
        """Has not been called."""
        self.called = []

    def next_stop(self, step):
        """Returns the next square."""
        return (math.isqrt(step) + 1) ** 2

    def after(self, step):
        """Notes the call."""
        self.called.append((step, self.trainer.totals.attempted))


def test_a_callback_chooses_its_steps():
    """Inner loops end where `next_stop` says, and `after` is called there."""
    squares = Squares()
    line = Linear(callbacks=[squares], steps_per_loop=100, verbose=False)
    line.train(slopes(1.0, 2.0), steps=12, global_batch=2)

    assert squares.called == [(1, 1), (4, 4), (9, 9)]
