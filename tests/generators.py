"""Hypothesis generators, kept here so that the word "strategies" has one meaning in this project."""

import hypothesis.strategies as st
import numpy as np

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
