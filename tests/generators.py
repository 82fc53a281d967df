"""Hypothesis generators. They are not called "strategies", which means tf.distribute strategies
here.
"""

import hypothesis.strategies as st
import numpy as np
import tensorflow as tf

import scaling
from scaling import Cause, Verdict

CURABLE = [Cause.BACKWARD, Cause.REDUCTION]
INCURABLE = [Cause.WEIGHTS, Cause.FORWARD, Cause.UNSCALING, Cause.MODEL]

ONE_OF_EACH = [  # a rule of each class
    scaling.DynamicLossScale(),
    scaling.TolerantLossScale(),
    scaling.HeadroomLossScale(),
    scaling.LogMaxLossScale(),
    scaling.FixedLossScale(8.0),
    scaling.NoLossScale(),
]


def powers_of_two(low=-126, high=126):
    """Powers of two, by their exponents."""
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


@st.composite
def bounds(draw):
    """An initial scale and the bounds around it, often narrow, so that a scale soon
    reaches them.
    """
    low = draw(st.integers(-126, 126))
    high = draw(st.integers(low, min(low + draw(st.sampled_from([0, 3, 252])), 126)))
    scales = {"min_scale": 2.0**low, "max_scale": 2.0**high}
    return scales | {"initial_scale": 2.0 ** draw(st.integers(low, high))}


@st.composite
def factors(draw):
    """Bounds, and the constants by which a rule counts and multiplies."""
    return draw(bounds()) | {
        "growth_interval": draw(st.integers(1, 4)),
        "growth_factor": 2.0 ** draw(st.integers(1, 4)),
        "backoff_factor": 2.0 ** -draw(st.integers(1, 4)),
    }


@st.composite
def low_scale_intervals(draw, low, high):
    """At most two (scale, interval) pairs within the bounds, in rising order of scale."""
    exponents = draw(st.lists(st.integers(low, high), max_size=2, unique=True))
    return tuple((2.0**exponent, draw(st.integers(1, 4))) for exponent in sorted(exponents))


@st.composite
def rules(draw):
    """Any valid `DynamicLossScale`, often one that reaches its bounds soon."""
    constants = draw(factors())
    low, high = (int(np.log2(constants[name])) for name in ("min_scale", "max_scale"))
    return scaling.DynamicLossScale(
        **constants,
        hysteresis=draw(st.integers(1, 3)),
        hysteresis_refill=draw(st.sampled_from(["growth", "finite_step"])),
        grace_steps=draw(st.integers(0, 2)),
        low_scale_intervals=draw(low_scale_intervals(low, high)),
    )


@st.composite
def tolerant_rules(draw):
    """Any `TolerantLossScale`. Its tolerances are fractions that short histories reach exactly."""
    return scaling.TolerantLossScale(
        **draw(factors()),
        tolerance=draw(st.sampled_from([0, 0.0, 0.05, 0.1, 0.25, 1 / 3, 0.5, 2 / 3, 0.9])),
        scale_interval=draw(st.booleans()),
    )


@st.composite
def log_max_rules(draw):
    """Any `LogMaxLossScale`, with decays that remember from one step to a thousand."""
    return scaling.LogMaxLossScale(
        **draw(bounds()),
        mean_decay=draw(st.sampled_from([0, 0.5, 0.9, 0.99])),
        deviation_decay=draw(st.sampled_from([0, 0.5, 0.9, 0.99, 0.999])),
        deviations=draw(st.sampled_from([0, 1.0, 3.09])),
    )


@st.composite
def headroom_rules(draw):
    """Any `HeadroomLossScale`."""
    return scaling.HeadroomLossScale(**draw(factors()), headroom_bits=draw(st.integers(0, 10)))


def histories(max_size=40):
    """Finite and overflowing steps in any order."""
    return st.lists(st.booleans(), max_size=max_size)


def around_half_max():
    """65504 times a power of two and its two neighbors: the limits of headroom for any number of
    bits.
    """
    directions = st.sampled_from([-np.inf, 0.0, np.inf])
    return st.builds(
        lambda exponent, towards: nudged(65504 * 2.0**exponent, towards),
        st.integers(-40, 20),
        directions,
    )


def nudged(value, towards):
    """The float32 above `value` if `towards` is inf, below it if -inf, and `value` itself if 0."""
    return float(np.nextafter(np.float32(value), np.float32(towards))) if towards else value


def magnitudes():
    """Largest gradient magnitudes that are not zero: normal float32 numbers of every size."""
    anything = st.floats(2.0**-126, 2.0**127, width=32)
    usual = st.floats(2.0**-30, 2.0**4, width=32)
    return st.one_of(usual, powers_of_two(), around_half_max(), anything)


def verdicts():
    """Finite steps with a magnitude, overflows without one, and causes that no scale can cure."""
    without = st.sampled_from([float("inf"), float("nan")])
    finite = st.builds(Verdict, st.just(True), st.just(Cause.NONE), st.just(0.0) | magnitudes())
    overflow = st.builds(Verdict, st.just(False), st.sampled_from(CURABLE), without)
    incurable = st.builds(Verdict, st.just(False), st.sampled_from(INCURABLE), without)
    return st.one_of(finite, finite, overflow, incurable)


def verdict_histories(max_size=25):
    """Verdicts in any order."""
    return st.lists(verdicts(), max_size=max_size)


@st.composite
def calm_histories(draw, max_size=25):
    """Finite steps with nearly constant magnitudes, in which a rule must not see a deviation."""
    usual = draw(st.floats(2.0**-30, 2.0**4, width=32))
    around = st.floats(0.875, 1.125, width=32).map(lambda factor: float(np.float32(factor * usual)))
    return draw(
        st.lists(st.builds(Verdict, st.just(True), st.just(Cause.NONE), around), max_size=max_size)
    )


def float32s():
    """Finite normal float32 numbers of every size and sign."""
    return st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def float32_arrays():
    """Non-empty float32 vectors."""
    return st.lists(float32s(), min_size=1, max_size=20).map(
        lambda values: np.array(values, np.float32)
    )


@st.composite
def gradients(draw):
    """Dense vectors, or sparse ones with possibly repeated indices, of numbers whose squares are
    normal.
    """
    numbers = st.floats(-(2.0**10), 2.0**10, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-20)
    values = np.array(draw(st.lists(numbers, min_size=1, max_size=6)), np.float32)
    if draw(st.booleans()):
        return tf.constant(values)
    indices = draw(st.lists(st.integers(0, 2), min_size=len(values), max_size=len(values)))
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([3]))
