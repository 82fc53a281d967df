"""The verdict: a step is applied only if everything in it was finite on every replica."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from scaling import Verdict
from trainer.step.judge import judge, stay_finite
from trainer.step.measure import global_norm

NORMS = [0.0, 1.0, float(np.finfo(np.float32).max), math.inf, math.nan]


def verdict_of(*, losses=True, statistics=True, norm=1.0, magnitude=math.nan):
    """The verdict on plain Python values."""
    return judge(
        losses_finite=tf.constant(losses),
        statistics_finite=tf.constant(statistics),
        gradient_norm=tf.constant(norm, tf.float32),
        max_magnitude=tf.constant(magnitude),
    )


@pytest.mark.parametrize(
    ("losses", "statistics", "norm"),
    list(itertools.product([True, False], [True, False], NORMS)),
)
def test_truth_table(losses, statistics, norm):
    """L5: a step is applied if the losses, the statistics and the gradient norm are all finite, and
    skipped if any of them is not.
    """
    verdict = verdict_of(losses=losses, statistics=statistics, norm=norm)

    assert verdict.grads_finite.numpy() == (losses and statistics and math.isfinite(norm))
    assert verdict.grads_finite.shape == ()


def test_the_verdict_passes_the_magnitude_on():
    """A rule gets the measured magnitude, and the default cause, which `diagnose` replaces."""
    verdict = verdict_of(magnitude=3.0)

    assert float(verdict.max_magnitude) == 3.0
    assert verdict.cause is Verdict(grads_finite=True).cause


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    place=st.integers(0, 19),
    value=st.sampled_from([1.0, 1e18, 1e25, math.inf, -math.inf, math.nan]),
)
@example([1], 0, math.nan)  # the only element
@example([3, 2], 4, math.inf)  # the last one
@example([2], 1, 1e25)  # a finite element whose square overflows
def test_one_bad_element_is_enough(sizes, place, value):
    """L5: one inf, one NaN or one element whose square overflows float32, at any place in any
    gradient, skips the step.
    """
    flat = np.ones(sum(sizes), np.float32)
    flat[place % len(flat)] = value
    gradients = [tf.constant(part) for part in np.split(flat, np.cumsum(sizes)[:-1])]
    verdict = verdict_of(norm=global_norm(gradients))

    assert verdict.grads_finite.numpy() == (value in (1.0, 1e18))


@pytest.mark.parametrize(
    ("before", "after", "finite"),
    [
        (0.0, 1.0, True),
        (0.0, math.inf, False),
        (0.0, -math.inf, False),
        (0.0, math.nan, False),
        (math.inf, 1.0, True),
        (math.inf, math.inf, True),  # it was infinite before
        (math.nan, math.inf, True),
    ],
)
def test_a_statistic_must_not_become_bad(before, after, finite):
    """A variable that would go from finite to inf or NaN skips the step; one that was bad does not."""
    values = {"1": tf.constant(before)}

    assert stay_finite({"1": tf.constant(after)}, values).numpy() == finite


def test_every_written_float_counts():
    """One bad element of one variable is enough; integers and unwritten variables do not count."""
    before = {"0": tf.constant([0.0, 0.0]), "1": tf.constant(0), "3": tf.constant(0.0)}
    good = {"0": tf.constant([1.0, 2.0]), "1": tf.constant(7), "3": tf.constant(1.0)}

    assert stay_finite(good, before).numpy()
    assert not stay_finite(good | {"0": tf.constant([1.0, math.nan])}, before).numpy()
    assert not stay_finite(good | {"3": tf.constant(math.inf)}, before).numpy()
    assert stay_finite({"1": tf.constant(7)}, before).numpy()
    assert stay_finite({}, before).numpy()
