"""Recommending a loss scale from gradient statistics."""

import generators
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given

import scaling
from scaling.base.number_formats import HALF_MAX, is_power_of_two
from scaling.telemetry.recommend import describe_share

NAN, INF = np.nan, np.inf


def at(scale):
    """The state of a fixed scale."""
    return scaling.FixedLossScale(scale).initial_state()


# For a magnitude of exactly 65504 / 2^4 a scale of 1 is recommended; also the next number above.
@example(np.array([HALF_MAX / 16], np.float32))
@example(np.array([np.nextafter(np.float32(HALF_MAX / 16), np.float32(INF))]))
@given(generators.float32_arrays())
def test_the_recommended_scale_is_the_largest_that_leaves_room(gradient):
    """The recommended scale leaves a headroom of four bits, and twice that scale would not."""
    advice = scaling.recommend(scaling.gradient_stats([gradient], at(1.0)))
    largest = float(np.abs(gradient).max())
    assert is_power_of_two(advice.loss_scale)
    if largest:
        assert largest * advice.loss_scale * 16 <= HALF_MAX or advice.loss_scale == 2.0**-126
        assert largest * advice.loss_scale * 32 > HALF_MAX or advice.loss_scale == 2.0**126


def test_the_recommendation_names_the_variables_that_lose_elements():
    """The text has the names, the fractions and the reason."""
    gradients = [
        tf.constant([2.0**-20] * 999 + [2.0**-40]),
        tf.constant([1.0] + [2.0**-40] * 3),
        tf.constant([1.0]),
    ]
    stats = scaling.gradient_stats(gradients, at(1.0))
    advice = scaling.recommend(stats, ["conv2", "conv1", "dense"])

    assert advice.loss_scale == 2.0**11
    assert advice.lost == {"conv1": 0.75, "conv2": pytest.approx(1e-3)}
    assert str(advice) == (
        "2^11 would lose 75.00% of conv1, 0.10% of conv2. The largest gradient, 1 in conv1, stays "
        "at least 4 factors of two below the largest float16."
    )


@pytest.mark.parametrize("gradients", [[[INF, NAN]], [[2.0**-20], [INF, -INF, 1.0]]])
def test_after_an_overflow_half_of_the_scale_is_recommended(gradients):
    """If a gradient is not finite, half of its scale is recommended."""
    stats = scaling.gradient_stats([tf.constant(row) for row in gradients], at(2.0**15))
    advice = scaling.recommend(stats)

    assert advice.loss_scale == 2.0**14
    assert str(advice) == (
        "2^14 would lose nothing. At 2^15, 2 elements were inf or NaN. Try at most half of that "
        "scale; a smaller one may not help if the model itself overflows."
    )


@pytest.mark.parametrize(
    ("variables", "ends"), [(5, "of gradient 4. The"), (6, "of gradient 4 and 1 more. The")]
)
def test_at_most_five_variables_are_named(variables, ends):
    """Of more than five variables the others are counted; equal fractions keep their order."""
    stats = scaling.gradient_stats([tf.constant([1.0, 2.0**-60])] * variables, at(1.0))

    assert ends in str(scaling.recommend(stats))


def test_a_recommendation_that_loses_nothing_is_short():
    """The text names the largest gradient, whichever variable it belongs to."""
    stats = scaling.gradient_stats([tf.constant([0.25]), tf.constant([-0.5, 0.0])], at(1.0))

    assert str(scaling.recommend(stats)) == (
        "2^12 would lose nothing. The largest gradient, 0.5 in gradient 1, stays at least 4 "
        "factors of two below the largest float16."
    )


@pytest.mark.parametrize(
    ("share", "words"), [(1e-4, "0.01%"), (0.5, "50.00%"), (9e-5, "less than 0.01%")]
)
def test_a_fraction_is_printed_with_two_decimals(share, words):
    """A fraction too small for two decimals is not printed as zero."""
    assert words == describe_share(share)


def test_if_all_gradients_are_zero_a_larger_scale_is_recommended():
    """All-zero gradients mean that the scale may be far too small."""
    advice = scaling.recommend(scaling.gradient_stats([tf.zeros([3])], at(4.0)))

    assert advice.loss_scale == 2.0**22
    assert str(advice) == (
        "2^22 would lose nothing. Every gradient is zero: either float16 has flushed them, or they "
        "are truly zero. Try a scale that is 2^20 times as large."
    )


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["kernel", "kernel"]])
def test_every_gradient_has_a_name_of_its_own(names):
    """The shares of two gradients under one name would hide the larger one."""
    stats = scaling.gradient_stats([tf.ones([2]), tf.ones([2])], at(1.0))
    with pytest.raises(ValueError, match=r"^`names`"):
        scaling.recommend(stats, names)
