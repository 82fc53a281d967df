"""L11: the advice after skipped steps fits the run: its curve, its precision and its scale."""

import keras
import numpy as np
import pytest
from helpers import linear_model

import scaling
from scaling import Cause
from trainer import Skips, StepReport, Trainer, TrainingStuckError
from trainer.callbacks.hints import (
    FIXED_HINTS,
    HINTS,
    UNSCALED_HINTS,
    WINDOW,
    Curve,
    RunFacts,
    hint_for,
)

RULES = [None, scaling.NoLossScale(), scaling.FixedLossScale(1024.0), scaling.DynamicLossScale()]


def curve_of(losses, norms, finite=None):
    """A curve of the given steps, beginning with step 1."""
    fields = dict.fromkeys(StepReport._fields, np.zeros(len(losses)))
    fields |= {
        "step": np.arange(1, len(losses) + 1),
        "loss": np.float32(losses),
        "gradient_norm": np.float32(norms),
        "grads_finite": np.ones(len(losses), bool) if finite is None else np.array(finite),
    }
    curve = Curve()
    curve.add(StepReport(**fields))
    return curve


def test_every_cause_of_a_skip_has_a_hint():
    """An error never ends without saying what to try."""
    assert HINTS.keys() == set(Cause) - {Cause.NONE}
    for cause in HINTS:
        for rule in RULES:
            for dtype in ("float32", "float16", "bfloat16"):
                text = hint_for(cause, RunFacts(rule, dtype, True, "0.1"), skips=9)
                assert text.endswith(".")
                assert "{" not in text


def test_advice_names_only_the_precision_that_the_run_uses():
    """Float16's range, half precision, XLA and a loss scale appear only where they are in use."""
    for cause in HINTS:
        for rule in RULES:
            text = hint_for(cause, RunFacts(rule))
            assert not {"65504", "float16", "half", "XLA"} & set(text.replace(",", "").split())
            assert "dtype" not in text
        if cause is not Cause.MODEL:  # only rules whose scale moves have this cause
            assert "loss scale" not in hint_for(cause, RunFacts(scaling.NoLossScale()))
        assert "65504" not in hint_for(cause, RunFacts(None, "bfloat16"))
    assert hint_for(Cause.FORWARD, RunFacts(None, "float16", xla=True)) == (
        "The loss was not finite before it was scaled, so no loss scale can help. Check the data "
        "and the model for inf or NaN in the inputs, the logarithm of 0, and a division by 0. In "
        'float16, activations above 65504 are inf too: compute such layers with dtype="float32". '
        "Under XLA, a label outside the model's classes gives a NaN loss where TensorFlow would "
        "raise an error."
    )


def test_no_lower_scale_is_advised_where_there_is_none():
    """A run without a loss scale, or with a fixed one, gets other advice after an overflow."""
    for cause in HINTS:
        for rule, hints in ((RULES[1], UNSCALED_HINTS), (RULES[2], FIXED_HINTS)):
            changed = hint_for(cause, RunFacts(rule)) != hint_for(cause, RunFacts())
            assert changed or cause not in hints
            if cause is not Cause.MODEL:  # only rules whose scale moves have this cause
                assert "allow a lower" not in hint_for(cause, RunFacts(rule))
    assert "scale of 2^10" in hint_for(Cause.BACKWARD, RunFacts(RULES[2]))


@pytest.mark.parametrize(
    ("losses", "norms", "words"),
    [
        ([1, 1e9], [2, 1e6], "the gradient norm grew from 2 at step 1 to 1e+06 at step 2"),
        ([1, 1, 90, 1e9], [0, 0, 0, 0], "the loss grew from 1 at step 2 to 1e+09 at step 4"),
        ([9, 7, 5, 3], [1, 99, 1, 99], ""),
        ([9], [1e9], ""),
        ([], [], ""),
        ([-5, -9, -900], [1, 1, 1], ""),
        ([1, 1e6, 1], [1, 1e6, 1], ""),
    ],
)
def test_growth_is_read_from_the_applied_steps(losses, norms, words):
    """A hundredfold growth over the median counts if it lasts to the end."""
    assert curve_of(losses, norms).growth() == words
    assert curve_of(
        [*losses, np.nan], [*norms, np.nan], [True] * len(losses) + [False]
    ).growth() == (words)


def test_the_curve_keeps_a_window():
    """The memory of a long run does not grow."""
    curve = curve_of(np.ones(3 * WINDOW), np.ones(3 * WINDOW))

    assert len(curve._applied) == WINDOW
    assert curve.last == 3 * WINDOW


LINE = np.linspace(-1, 1, 16, dtype="float32")[:, None]


@pytest.mark.parametrize(
    ("precision", "rate", "words"),
    [
        (
            "float32",
            1e3,
            "The run diverged at a learning rate of 1000: the gradient norm grew from ",
        ),
        (
            "float32",
            1e38,
            "The loss was not finite. Check the data and the model for inf or NaN in the inputs, "
            "the logarithm of 0, and a division by 0. Every loss has been inf or NaN since the "
            "update of step 1: if the data is sound, the learning rate of 1e+38 is too high.",
        ),
    ],
)
def test_a_learning_rate_that_is_too_high_is_named(precision, rate, words):
    """L11: divergence is told from the curve, never by a precision that the run does not use."""
    trainer = Trainer(
        model=linear_model,
        optimizer=lambda: keras.optimizers.SGD(rate),
        loss_fn="mse",
        precision=precision,
        skips=Skips(max_consecutive=3),
        verbose=False,
    )
    with pytest.raises(TrainingStuckError) as error:
        trainer.train((LINE, 5 * LINE), steps=100, global_batch=16)

    text = str(error.value)
    assert words in text
    assert "Latest loss scales" not in text
    assert "float16" not in text
