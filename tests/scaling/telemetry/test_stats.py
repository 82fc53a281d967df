"""Gradient statistics, compared with NumPy."""

import generators
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given

import scaling
from scaling.telemetry.stats import COUNTS

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


def test_the_largest_magnitude_ignores_inf_and_nan():
    """The largest magnitude is that of the finite elements."""
    stats = scaling.gradient_stats([tf.constant([NAN, -0.25, INF])], at(1.0))

    assert stats.max_magnitude.numpy().tolist() == [0.25]


def test_sparse_rows_with_the_same_index_are_summed_before_counting():
    """Two sparse rows with the same index are counted as their sum."""
    slices = tf.IndexedSlices(tf.constant([[3.0], [5.0], [0.0]]), tf.constant([1, 1, 2]))
    stats = scaling.gradient_stats(slices, at(1.0))

    assert stats.max_magnitude.numpy().tolist() == [8.0]
    assert (float(stats.size[0]), float(stats.zero_count[0])) == (2.0, 1.0)


def test_no_gradients_at_all():
    """An empty structure has no rows."""
    stats = scaling.gradient_stats([], at(1.0))

    assert (stats.counts.shape[0], stats.max_magnitude.shape[0]) == (0, 0)


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
