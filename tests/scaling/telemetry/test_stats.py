"""Gradient statistics, compared with NumPy, and the scales that they recommend."""

import generators
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given

import scaling
from scaling.base.number_formats import HALF_MAX, is_power_of_two
from scaling.telemetry.stats import COUNTS, describe_share

NAN, INF = np.nan, np.inf


def at(scale):
    """The state of a fixed scale."""
    return scaling.FixedLossScale(scale).initial_state()


# Flushed at this scale, but not at twice this scale.
@example(np.array([2.0**-26], np.float32), 2.0)
# 2^-25 is a tie and rounds to 0; the next larger number does not.
@example(
    np.array([2.0**-25, np.nextafter(np.float32(2.0**-25), np.float32(1)), 0.0], np.float32), 1.0
)
@given(generators.float32_arrays(), generators.powers_of_two(-14, 24))
def test_flushed_is_what_the_cast_to_float16_loses(gradient, scale):
    """At the scale, and at twice and half of it, the fraction equals that of a cast to float16."""
    stats = scaling.gradient_stats([gradient], at(scale))
    for factor in (0.5, 1.0, 2.0):
        with np.errstate(over="ignore"):
            half = tf.cast(gradient * np.float32(scale * factor), tf.float16).numpy()
        lost = (half == 0) & (gradient != 0)

        assert np.float32(lost.mean()) == stats.flushed(factor).numpy()[0], factor
    assert stats.flushed().numpy() == stats.flushed(1.0).numpy()


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_counts(dtype, mode):
    """L15: counts, sizes and largest magnitudes are the same in every dtype and mode."""
    gradients = [
        tf.constant([[0.0, NAN, -4.0], [INF, -INF, 0.5]], dtype),
        None,
        tf.zeros([0, 3], dtype),
        tf.constant(-8.0, dtype),
    ]

    def measure(*gradients):
        return scaling.gradient_stats(gradients, at(2.0))

    if mode != "eager":
        measure = tf.function(measure, jit_compile=mode == "xla")
    stats = measure(*gradients)

    assert stats.size.numpy().tolist() == [6, 0, 0, 1]
    assert stats.zero_count.numpy().tolist() == [1, 0, 0, 0]
    assert stats.inf_count.numpy().tolist() == [2, 0, 0, 0]
    assert stats.nan_count.numpy().tolist() == [1, 0, 0, 0]
    assert stats.max_magnitude.numpy().tolist() == [4, 0, 0, 8]
    assert stats.flushed().numpy().tolist() == [0, 0, 0, 0]
    assert (stats.counts.shape, stats.counts.dtype) == ((4, COUNTS), tf.float32)
    assert float(stats.loss_scale) == 2.0


def test_sparse_rows_with_the_same_index_are_summed_before_counting():
    """Two sparse rows with the same index are counted as their sum."""
    slices = tf.IndexedSlices(tf.constant([[3.0], [5.0], [0.0]]), tf.constant([1, 1, 2]))
    stats = scaling.gradient_stats(slices, at(1.0))

    assert stats.max_magnitude.numpy().tolist() == [8.0]
    assert (float(stats.size[0]), float(stats.zero_count[0])) == (2.0, 1.0)


def test_magnitudes_outside_the_histogram_are_counted_in_its_end_columns():
    """Magnitudes below and above all columns are counted in the first and the last column."""
    stats = scaling.gradient_stats(
        [tf.constant([2e-38, 1e38, 2.0**-96, 2.0**-95, 2.0**31])], at(1.0)
    )

    assert stats.counts.numpy()[0, :2].tolist() == [2, 1]
    assert stats.counts.numpy()[0, 127] == 2


@pytest.mark.parametrize("exponent", range(-126, 127, 3))
def test_no_scale_is_said_to_lose_less_than_it_does(exponent):
    """Beyond the histogram, `flushed` counts the end columns whole: too much, never too little."""
    values = [2.0**power for power in range(-120, 120, 3)]
    stats = scaling.gradient_stats([tf.constant(values)], at(1.0))
    flushed = sum(value <= 2.0 ** (-25 - exponent) for value in values) / len(values)
    found = float(stats.flushed(2.0**exponent)[0])

    assert found >= flushed - 1e-6
    if -55 <= exponent <= 71:
        assert found == pytest.approx(flushed)


def test_measuring_needs_no_host_callback():
    """L14: the graph contains no callback, print or other host operation."""
    traced = tf.function(lambda g: scaling.gradient_stats([g], at(1.0))).get_concrete_function(
        tf.TensorSpec([None], tf.float32)
    )
    kinds = {operation.type for operation in traced.graph.get_operations()}

    assert not [kind for kind in kinds if "PyFunc" in kind or "Host" in kind or "Print" in kind]


def test_float64_out_of_the_range_of_float32_is_counted_as_what_it_is():
    """1e300 is finite, and 1e-60 is not 0."""
    gradient = tf.constant([1e300, 1e-60, 0.0, np.inf, 1.0], tf.float64)
    stats = scaling.gradient_stats([gradient], at(1.0))
    assert (int(stats.inf_count[0]), int(stats.zero_count[0])) == (1, 1)
    assert float(stats.max_magnitude[0]) == float(np.finfo(np.float32).max)


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


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["kernel", "kernel"]])
def test_every_gradient_has_a_name_of_its_own(names):
    """The shares of two gradients under one name would hide the larger one."""
    stats = scaling.gradient_stats([tf.ones([2]), tf.ones([2])], at(1.0))
    with pytest.raises(ValueError, match=r"^`names`"):
        scaling.recommend(stats, names)


@pytest.mark.parametrize(
    ("gradients", "scale", "recommended", "reason"),
    [
        # Of infinite gradients, half of the scale; of zeros, a far larger one.
        ([[INF, NAN]], 2.0**15, 2.0**14, "2 elements were inf or NaN"),
        ([[2.0**-20], [INF, -INF, 1.0]], 2.0**15, 2.0**14, "2 elements were inf or NaN"),
        ([[0.0, 0.0]], 4.0, 2.0**22, "Every gradient is zero"),
        ([[0.25], [-0.5, 0.0]], 1.0, 2.0**12, "The largest gradient, 0.5 in gradient 1"),
        # Of more than five variables the others are counted.
        ([[1.0, 2.0**-60]] * 6, 1.0, 2.0**11, "50.00% of gradient 4 and 1 more. The largest"),
    ],
)
def test_the_recommendation_says_why(gradients, scale, recommended, reason):
    """The scale, and the reason in words."""
    stats = scaling.gradient_stats([tf.constant(row) for row in gradients], at(scale))
    advice = scaling.recommend(stats)

    assert advice.loss_scale == recommended
    assert reason in str(advice)


def test_a_fraction_is_printed_with_two_decimals():
    """A fraction too small for two decimals is not printed as zero."""
    words = [describe_share(share) for share in (1e-4, 0.5, 9e-5)]
    assert words == ["0.01%", "50.00%", "less than 0.01%"]
