"""Trains an architecture by a `Trainer` and by a plain loop, and compares where the weights go."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from world.entry import CELLS, FAULT, REFUSED, SHARES, TRAINS

from trainer import Losses, Skips, Trainer

# How far a variable's move may be from the plain loop's, relative to the larger of the move's norm
# and a hundredth of the norm of all moves. In float16: 64 times the distance from 1 to the next
# number, because a tiny transformer rounds some tens of times one after the other.
FLOOR = 1e-2
TOLERANCES = {"float32": 1e-3, "mixed_float16": 64 * 2.0**-10}
# Of float32 weights, whose own rounding limits how exactly a small move is known.
EPS = 2.0**-23


@contextlib.contextmanager
def policy(name):
    """Sets Keras's dtype policy for a block."""
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def batches_of(entry):
    """The batches of all steps."""
    return [entry.batch(np.random.default_rng(seed)) for seed in range(entry.steps)]


def data_of(batches):
    """A dataset of batches as they are."""
    data = [tf.data.Dataset.from_tensors(batch) for batch in batches]
    return functools.reduce(tf.data.Dataset.concatenate, data)


def values(variables):
    """The values of variables, on the first replica."""
    return [np.array(first_copy(v).numpy()) for v in variables]


def first_copy(variable):
    """A variable's copy on the first replica."""
    inner = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(inner, "values", [inner])[0]


def trainer_of(entry, cell, strategy):
    """A trainer of an architecture, through the public API alone."""
    settings = {
        "precision": cell.precision,
        "strategy": strategy,
        "num_microbatches": cell.num_microbatches,
        "losses": Losses(reduction="global" if entry.coupled else "mean"),
        "skips": Skips(on_overflow="retry", max_retries=20),
        "jit_compile": False,
        "verbose": False,
        "seed": 1,
    }
    if entry.loss is None:
        arguments = {"model": entry.model, "optimizer": entry.optimizer, "loss_fn": entry.loss_fn()}
        return Trainer(**arguments, **settings)

    class Theirs(Trainer):
        def build_model(self):
            return entry.model()

        def build_optimizer(self):
            return entry.optimizer()

        def compute_loss(self, batch, training):
            return entry.losses(self.model, batch, training, self.all_gather)

    return Theirs(**settings)


def train(entry, cell, strategy):
    """Trains by a `Trainer`. Returns all weights and the trainable ones before, and `moved` after."""
    trainer = trainer_of(entry, cell, strategy)
    start = values(trainer.model.variables)
    before = values(trainer.model.trainable_variables)
    totals = trainer.train(data_of(batches_of(entry)), steps=entry.steps).totals
    assert totals.applied == entry.steps, totals
    return start, before, moved(trainer.model)


def moved(model):
    """The values of the trainable and of the other floating-point variables."""
    others = [v for v in model.non_trainable_variables if "float" in str(v.dtype)]
    return values(model.trainable_variables), values(others)


def plain(entry, cell, start, precision="float32"):
    """Trains by a plain loop: a tape, the mean of the losses, and the optimizer.

    Returns: the trainable weights before, and what `moved` returns after.
    """
    with policy(precision):
        model = entry.model()
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
    optimizer = entry.optimizer()
    parts = cell.shares if entry.outcome(key_of(cell)) == SHARES else 1
    scale = 1.0 if precision == "float32" else 2.0**10

    def step(batch):
        total = None
        for part in range(parts):
            share = part_of(batch, part, parts)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(entry.losses(model, share, training=True))
                added = [tf.cast(each, tf.float32) for each in getattr(model, "losses", [])]
                scaled = tf.add_n([loss, *added]) * (scale / parts)
            gradients = tape.gradient(scaled, model.trainable_variables)
            dense = [
                None if each is None else tf.convert_to_tensor(each) / scale for each in gradients
            ]
            total = (
                dense
                if total is None
                else [sum_of(*pair) for pair in zip(total, dense, strict=True)]
            )
        known = [
            (gradient, variable)
            for gradient, variable in zip(total, model.trainable_variables, strict=True)
            if gradient is not None
        ]
        optimizer.apply_gradients(known)

    before = values(model.trainable_variables)
    optimizer.build(model.trainable_variables)
    compiled = tf.function(step, autograph=False)
    for batch in batches_of(entry):
        compiled(tf.nest.map_structure(tf.constant, batch))
    return before, moved(model)


def part_of(batch, part, parts):
    """One of several equal parts of a batch; the batch itself if there is only one."""
    if parts == 1:
        return batch
    return tf.nest.map_structure(lambda leaf: tf.split(leaf, parts)[part], batch)


def sum_of(one, other):
    """The sum of two gradients, of which None stands for zeros."""
    return other if one is None else one if other is None else one + other


def key_of(cell):
    """The key of a cell."""
    return next(key for key, each in CELLS.items() if each == cell)


def distances(before, found, expected):
    """How far each variable is from where it should be, relative to its move; see `TOLERANCES`."""
    moves = [after - old for old, after in zip(before, expected, strict=True)]
    all_moves = np.linalg.norm([np.linalg.norm(move) for move in moves])
    assert all_moves > 0, "the plain loop moved nothing"
    for old, mine, theirs, move in zip(before, found, expected, moves, strict=True):
        rounding = 4 * EPS * np.linalg.norm(old)
        distance = max(0.0, float(np.linalg.norm(mine - theirs)) - rounding)
        found = distance / max(float(np.linalg.norm(move)), FLOOR * float(all_moves))
        yield found if np.isfinite(mine).all() else np.inf


def check(entry, cell, strategy):
    """Raises AssertionError unless a cell comes out as its entry says."""
    outcome = entry.outcome(key_of(cell))
    if outcome == REFUSED:
        return check_refused(entry, cell, strategy)
    if outcome == FAULT:
        return check_fault(entry, cell)
    start, before, (trained, others) = train(entry, cell, strategy)
    assert all(np.isfinite(value).all() for value in [*trained, *others])
    if outcome == TRAINS:
        assert any((new != old).any() for new, old in zip(trained, before, strict=True))
        return None
    _, (expected, expected_others) = plain(entry, cell, start)
    found = list(distances(before, trained, expected))
    bounds = [TOLERANCES[cell.precision]] * len(found)
    if cell.precision != "float32" and any(each > bounds[0] for each in found):
        # A model that is more sensitive to rounding: at most twice what float16 does to a plain loop.
        _, (half, _) = plain(entry, cell, start, cell.precision)
        noises = distances(before, half, expected)
        bounds = [max(2 * noise, bounds[0]) for noise in noises]
    elif any(each > bounds[0] for each in found):
        # A deep network without training, of whose gradients float32 leaves few digits: at most twice
        # as far from a plain loop in float64 as the one in float32 is.
        _, (exact, _) = plain(entry, cell, start, "float64")
        found = list(distances(before, trained, exact))
        bounds = [max(bounds[0], 2 * max(distances(before, expected, exact)))] * len(found)
    worst = max(range(len(found)), key=lambda place: found[place] / bounds[place])
    assert found[worst] <= bounds[worst], (worst, found[worst], bounds[worst])
    if cell.shares == 1:
        for mine, theirs in zip(others, expected_others, strict=True):
            largest = float(np.abs(theirs).max(initial=1e-3))
            np.testing.assert_allclose(
                mine, theirs, rtol=TOLERANCES[cell.precision], atol=bounds[0] * largest
            )
    return None


def check_refused(entry, cell, strategy):
    """Training raises a ValueError or TypeError of ours, of one line."""
    with pytest.raises((TypeError, ValueError)) as caught:
        train(entry, cell, strategy)
    assert raised_by_us(caught.value), caught.value
    assert "\n" not in str(caught.value)


def raised_by_us(error):
    """Whether the innermost frame of an error is a `raise` of the product."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    name = frame.tb_frame.f_globals.get("__name__", "")
    return name.split(".")[0] in {"trainer", "scaling", "strategies"}


def check_fault(entry, cell):
    """The plain loop fails in the cell's precision, or on the shares of a batch, by itself."""
    with policy(cell.precision):
        start = values(entry.model().variables)
    try:
        _, (trained, _) = plain(entry, cell, start, cell.precision)
    except (ValueError, TypeError, tf.errors.OpError):
        return
    assert not all(np.isfinite(value).all() for value in trained), "the plain loop trains"
