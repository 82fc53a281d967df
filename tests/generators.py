"""Hypothesis generators, kept here so that the word "strategies" has one meaning in this project."""

import hypothesis.strategies as st
import numpy as np
import tensorflow as tf

import scaling


def powers_of_two(low=-126, high=126):
    """Powers of two, by their exponents."""
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


@st.composite
def rules(draw):
    """Any `DynamicLossScale` that can be built, often one that reaches its bounds soon."""
    low = draw(st.integers(-126, 126))
    high = draw(st.integers(low, min(low + draw(st.sampled_from([0, 3, 252])), 126)))
    return scaling.DynamicLossScale(
        initial_scale=2.0 ** draw(st.integers(low, high)),
        growth_interval=draw(st.integers(1, 4)),
        growth_factor=2.0 ** draw(st.integers(1, 4)),
        backoff_factor=2.0 ** -draw(st.integers(1, 4)),
        min_scale=2.0**low,
        max_scale=2.0**high,
        hysteresis=draw(st.integers(1, 3)),
    )


def histories(max_size=40):
    """Finite and overflowing steps in any order."""
    return st.lists(st.booleans(), max_size=max_size)


def float32s():
    """Finite float32 numbers, of every size and sign."""
    return st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def float32_arrays():
    """Non-empty vectors of them."""
    return st.lists(float32s(), min_size=1, max_size=20).map(
        lambda values: np.array(values, np.float32)
    )


@st.composite
def gradients(draw):
    """Dense vectors, or sparse ones whose indices may repeat, of numbers whose squares are normal."""
    numbers = st.floats(-(2.0**10), 2.0**10, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-20)
    values = np.array(draw(st.lists(numbers, min_size=1, max_size=6)), np.float32)
    if draw(st.booleans()):
        return tf.constant(values)
    indices = draw(st.lists(st.integers(0, 2), min_size=len(values), max_size=len(values)))
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([3]))
