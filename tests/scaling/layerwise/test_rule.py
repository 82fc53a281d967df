"""`LayerwiseLossScale` against plain Python, and its errors."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from scaling.base.number_formats import is_power_of_two
from scaling.layerwise import LayerwiseLossScale

WIDE = LayerwiseLossScale(max_layer_scale=2.0**15, max_total_scale=2.0**100)


def plain_total(gradient, inputs, kernel, above, rule):
    """The paper's rule in plain Python and float64, for one dense kernel."""
    low, high = 0.0, 1.0  # erfinv by bisection: erf is all that `math` has
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < rule.underflow_share else (low, middle)
    gradient, kernel, inputs = (np.float64(array) for array in (gradient, kernel, inputs))
    deviation = np.sqrt(np.mean(gradient**2)) * np.sqrt(np.mean(kernel**2))
    wanted = 2.0**-24 / (low * math.sqrt(2) * deviation) if deviation else 1.0
    rows, fan_in = len(gradient), kernel.shape[1]
    worst = abs(gradient).max() * max(rows, rows * abs(inputs).max(), fan_in * abs(kernel).max())
    wanted = min(max(wanted, 1.0), rule.max_layer_scale)
    scale = 2.0 ** math.floor(math.log2(min(wanted, 65504 / worst) if worst else wanted))
    return min(max(above * scale, 1.0), rule.max_total_scale)


RULES = st.builds(
    LayerwiseLossScale,
    max_layer_scale=st.sampled_from([1.0, 16.0, 2.0**20]),
    max_total_scale=st.sampled_from([1.0, 1024.0, 2.0**100]),
    underflow_share=st.sampled_from([1e-3, 1e-2, 0.5]),
)


# The gradient or the kernel is zero: the scale of the layer above is kept.
@example(LayerwiseLossScale(), -200, 0, 2.0**5)
@example(LayerwiseLossScale(), 0, -200, 2.0**5)
# The layer undoes a part of the scale above, or all of it.
@example(WIDE, 14, 4, 2.0**30)
@example(WIDE, 15, 4, 4.0)
@given(RULES, st.integers(-26, 15), st.integers(-20, 4), st.sampled_from([1.0, 4.0, 2.0**30]))
def test_the_scale_agrees_with_plain_python(rule, gradient_bits, kernel_bits, above):
    """The scale equals that of plain Python, is a power of two, and keeps its bounds."""
    rng = np.random.default_rng(gradient_bits + 1000)
    above = min(above, rule.max_total_scale)
    gradient = np.float16(rng.uniform(-1, 1, [6, 5]) * 2.0**gradient_bits)
    kernel = np.float32(rng.uniform(-1, 1, [4, 5]) * 2.0**kernel_bits)
    inputs = np.float16(rng.uniform(-3, 3, [6, 4]))
    actual = rule.total_scale(tf.constant(gradient), tf.constant(inputs), [kernel], above)

    assert plain_total(gradient, inputs, kernel, above, rule) == float(actual)
    assert is_power_of_two(float(actual))
    assert 1 <= float(actual) <= rule.max_total_scale
    assert float(actual) <= above * rule.max_layer_scale


@pytest.mark.parametrize("share", [1e-3, 1e-2])
def test_the_lost_fraction_of_products_is_the_requested_one(share):
    """Of a million normal products, the requested fraction underflows, or up to twice as many. The
    factor is due to rounding the scale down to a power of two: near 0 the density is flat.
    """
    rule = LayerwiseLossScale(2.0**30, 2.0**30, underflow_share=share)
    size = tf.fill([8, 8], 2.0**-15)  # a deviation of 2^-15 to the last bit
    scale = float(rule.total_scale(size, size, [size], 1.0))
    products = np.random.default_rng(0).standard_normal(1_000_000) * 2.0**-30 * scale
    lost = np.mean(np.abs(products) < 2.0**-24)
    noise = 3 * math.sqrt(share / 1_000_000)  # three binomial deviations

    assert share - noise < lost < 2 * share + 2 * noise


def test_integer_inputs_do_not_limit_the_scale():
    """The inputs of an Embedding are indices, whose size does not matter."""
    gradient, kernel = tf.fill([2, 3], 2.0**-10), tf.fill([9, 3], 2.0**-10)
    totals = [
        float(WIDE.total_scale(gradient, inputs, [kernel], 1.0))
        for inputs in (tf.ones([2, 1]), tf.constant([[0], [2**30]]))
    ]

    assert totals == [32.0, 32.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_layer_scale", 10.0),
        ("max_total_scale", 0.5),
        ("underflow_share", 0.0),
        ("underflow_share", 1.0),
    ],
)
def test_errors(field, value):
    """Bounds that are not powers of two or are below 1, and fractions outside (0, 1), are errors."""
    with pytest.raises(ValueError, match=f"^`{field}`"):
        LayerwiseLossScale(**{field: value})


@pytest.mark.parametrize("exponent", [-120, -70, -64, 63, 90])
def test_the_deviation_of_tiny_and_huge_gradients(exponent):
    """Squares below 2^-126 are 0, and above 2^128 inf, though the numbers are neither."""
    gradient = tf.fill([2, 2], tf.constant(2.0**exponent))
    small = WIDE.total_scale(gradient, tf.ones([2, 2]), [tf.ones([2, 2])], 1.0)
    assert float(small) == (2.0**15 if exponent < 0 else 1.0)
