"""A `train_step` attempts exactly one update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer

X = np.ones([8, 2], np.float32)


def twice(step, batch):
    """Two updates with one batch."""
    step(batch)
    return step(batch)


def never(step, batch):
    """No update: the report of nothing."""
    del batch
    return step.__self__.no_report


def in_a_loop(step, batch):
    """Traced once, and run three times."""
    report = step(batch)
    tf.while_loop(lambda i: i < 2, lambda i: (i + 1, step(batch))[:1], [tf.constant(0)])
    return report


def looped(step, batch):
    """One trace of the step, in a loop."""
    reports = []

    def body(i):
        reports.append(step(batch))
        return (i + 1,)

    tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])
    return reports[0]


INSTEAD = (
    "A run counts its steps by these calls, and a resumed run would end at another step. Leave out "
    "@tf.function, since the step is a graph already; choose the batch in the condition and take the "
    "step after it; for several updates with one batch, let train_data yield it several times; for "
    "several updates of a part, pass updates_per_step=."
)


@pytest.mark.parametrize(
    ("how", "got"),
    [
        (twice, "2 calls"),
        (never, "0 calls"),
        (in_a_loop, "2 calls"),
        (looped, "a call in one of these"),
    ],
)
@pytest.mark.parametrize("online", [False, True])
def test_any_other_number_of_updates_is_refused(how, got, online):
    """Before the first step, in a run and with `train_on_batch`."""

    class Own(Trainer):
        no_report = None

        def train_step(self, batch):
            return how(super().train_step, batch)

    trainer = Own(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
    )
    data = X, X[:, :1]
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        trainer.train_on_batch(data) if online else trainer.train(data, steps=2, global_batch=4)

    assert str(error.value) == (
        "`train_step` must call super().train_step, or attempt_step, exactly once, and not in a loop, "
        f"a condition or a tf.function; got {got}. {INSTEAD}"
    )
    assert trainer.totals.attempted == 0


def test_data_may_yield_a_batch_several_times():
    """What the error recommends: every update is a step of its own."""
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(4)
    again = data.flat_map(lambda *batch: tf.data.Dataset.from_tensors(batch).repeat(3))
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
    )

    assert trainer.train(again, steps=6).totals.applied == 6
