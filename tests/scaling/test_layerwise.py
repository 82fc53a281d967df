"""A scale for every layer: the rule against plain Python, and the gradients of whole chains."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

import scaling
from scaling.base.number_formats import is_power_of_two
from scaling.layerwise import LayerwiseLossScale, layerwise_gradients

HALF_EPS = 2.0**-11  # what one rounding to float16 moves a normal number by, at most, relatively


WIDE = LayerwiseLossScale(max_layer_scale=2.0**15, max_total_scale=2.0**100)


def dense_chain(kernels, policy="mixed_float16", activation=None):
    """A Sequential of dense layers with these kernels, without biases."""
    layers = [
        keras.layers.Dense(kernel.shape[1], activation, use_bias=False, dtype=policy)
        for kernel in kernels
    ]
    model = keras.Sequential([keras.Input(kernels[0].shape[:1]), *layers])
    model.set_weights(kernels)
    return model


def exact_chain(bits):
    """Kernels that permute, negate and multiply by 2^bits, which half precision does exactly."""
    rng = np.random.default_rng(0)
    signs = [rng.choice([-1.0, 1.0], 4) for _ in bits]
    return [
        np.float32(np.eye(4)[rng.permutation(4)] * sign * 2.0**bit)
        for sign, bit in zip(signs, bits, strict=True)
    ]


INTEGERS = np.float32([[1, -2, 3, 4], [5, 6, -7, 8], [2, 2, 1, -3]])


def weighted(outputs):
    """A loss whose gradient consists of small integers."""
    return tf.reduce_sum(tf.cast(outputs, tf.float32) * INTEGERS)


def plain_gradients(model, inputs, loss_fn, scale=1.0):
    """The gradients from one tape, with one loss scale."""
    with tf.GradientTape() as tape:
        loss = loss_fn(model(inputs)) * scale
    return [gradient / scale for gradient in tape.gradient(loss, model.trainable_variables)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "wrap",
    [None, False, pytest.param(True, marks=pytest.mark.thorough)],
    ids=["eager", "graph", "xla"],
)
def test_gradients_without_rounding_equal_float32_bit_for_bit(wrap):
    """L1: gradients that shrink by 2^-3 per layer equal those in float32 bit for bit, eagerly, in a
    graph and under XLA. Those of the last five layers, at least 4.7e-5, need no scaling. Each
    layer below multiplies the scale by 8.
    """
    kernels = exact_chain([-3] * 8)
    model, inputs = dense_chain(kernels), INTEGERS * 2.0**10
    differentiate = lambda: layerwise_gradients(model, inputs, weighted, WIDE)  # noqa: E731
    result = (differentiate if wrap is None else tf.function(differentiate, jit_compile=wrap))()
    expected = plain_gradients(dense_chain(kernels, "float32"), inputs, weighted)

    for reference, [actual] in zip(expected, result.gradients, strict=True):
        assert actual.dtype == tf.float32
        assert reference.numpy().tobytes() == actual.numpy().tobytes()
    assert result.total_scales.numpy().tolist() == [256.0, 32.0, 4.0, *[1.0] * 5]
    assert float(weighted(model(inputs))) == float(result.loss)


@pytest.mark.sampled
def test_scales_shrink_again_where_gradients_grow():
    """Gradients shrink by 2^-24 and then grow by 2^32. The scale of 2^10 that is needed first would
    overflow later.
    """
    kernels = exact_chain([4] * 8 + [-4] * 6)
    model, inputs = dense_chain(kernels), INTEGERS * 2.0**-20
    result = layerwise_gradients(model, inputs, weighted, WIDE)
    expected = plain_gradients(dense_chain(kernels, "float32"), inputs, weighted)
    totals = result.total_scales.numpy()

    for reference, [actual] in zip(expected, result.gradients, strict=True):
        assert reference.numpy().tobytes() == actual.numpy().tobytes()
    assert totals.max() * np.abs(INTEGERS).max() * 2.0**8 > 65504
    assert totals[0] < totals.max()


def positive_chain(depth=20, width=4):
    """Positive kernels, so that nothing cancels; gradients shrink by 2^-2.5 per layer."""
    rng = np.random.default_rng(0)
    uniform = [rng.uniform(0.5, 1.5, [width, width]) for _ in range(depth)]
    return [np.float32(np.float16(kernel * 2.0**-2.5 / width)) for kernel in uniform]


def deep_chain():
    """Layers whose activations stay near 1, due to biases, while gradients vanish."""
    kernels = positive_chain()
    model = keras.Sequential([keras.layers.Dense(4, dtype="mixed_float16") for _ in kernels])
    model.build([None, 4])
    for layer, kernel in zip(model.layers, kernels, strict=True):
        layer.set_weights([kernel, np.ones(4, np.float32)])
    return model, kernels


def true_gradients(kernels, inputs):
    """The gradients of the mean of the outputs for every kernel of `deep_chain`, in float64."""
    activations = [inputs.astype(np.float64)]
    for kernel in kernels:
        activations.append(activations[-1] @ kernel + 1)
    gradient, gradients = np.full_like(activations[-1], 1 / activations[-1].size), []
    for kernel, below in zip(kernels[::-1], activations[-2::-1], strict=True):
        gradients.append(below.T @ gradient)
        gradient = gradient @ kernel.T
    return gradients[::-1]


def mean(outputs):
    """The mean in float32."""
    return tf.reduce_mean(tf.cast(outputs, tf.float32))


@pytest.mark.sampled
def test_no_single_scale_reaches_the_lowest_layers():
    """At every power of two, the first layer's gradient is exactly 0 or another one overflows."""
    model, _ = deep_chain()
    differentiate = tf.function(
        lambda scale: plain_gradients(model, tf.ones([4, 4]), mean, scale), autograph=False
    )
    for exponent in range(60):
        kernel, *others = differentiate(tf.constant(2.0**exponent))

        assert not np.any(kernel) or not scaling.all_finite(others), f"2^{exponent} does"


@pytest.mark.sampled
def test_layerwise_scales_reach_every_layer():
    """With layerwise scales all gradients are accurate up to rounding. Each layer rounds a sum of
    four products and a bias, forward and backward. All numbers are positive, so errors only add.
    """
    model, kernels = deep_chain()
    inputs = np.ones([4, 4], np.float32)
    result = layerwise_gradients(model, inputs, mean, WIDE)
    spread = result.total_scales[0] / result.total_scales[-1]
    bound = (1 + HALF_EPS) ** (20 * (4 + 4 + 1)) - 1

    assert float(spread) > 2.0**30
    for expected, [actual, _] in zip(
        true_gradients(kernels, inputs), result.gradients, strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=bound)


@pytest.mark.sampled
def test_the_default_bounds_are_those_of_the_paper():
    """By default one layer scales by at most 16, and all layers together by at most 1024."""
    model, _ = deep_chain()
    totals = layerwise_gradients(model, tf.ones([4, 4]), mean).total_scales.numpy()

    assert totals.max() == 1024
    assert (totals[:-1] / totals[1:]).max() <= 16


@pytest.mark.sampled
def test_an_ordinary_loss_scale_can_be_used_in_addition():
    """L2: gradients with an additional loss scale equal those without it bit for bit."""
    model, inputs = dense_chain(exact_chain([-3] * 8)), INTEGERS * 2.0**10
    scaler = scaling.LossScaler(scaling.FixedLossScale(2.0**6))
    token = scaler.state
    scaled = layerwise_gradients(
        model, inputs, lambda outputs: scaling.scale_loss(weighted(outputs), token), WIDE
    )
    unscaled_loss = layerwise_gradients(model, inputs, weighted, WIDE)

    actual = scaling.unscale_gradients(scaled.gradients, token)
    for [expected], [unscaled] in zip(unscaled_loss.gradients, actual, strict=True):
        assert expected.numpy().tobytes() == unscaled.numpy().tobytes()
    assert float(scaled.total_scales[0]) < float(unscaled_loss.total_scales[0])


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [2.0**20, float("nan")])
def test_an_overflow_appears_in_the_gradients(scale):
    """L5: inf and NaN reach the gradients of every layer, and the scales stay finite."""
    model = dense_chain(exact_chain([-3] * 3))
    result = layerwise_gradients(model, INTEGERS, lambda outputs: weighted(outputs) * scale)

    assert not scaling.all_finite(result.gradients)
    assert not any(scaling.all_finite(layer) for layer in result.gradients)
    assert result.total_scales.numpy().tolist() == [1.0] * 3


@pytest.mark.sampled
def test_layers_of_every_kind():
    """Embeddings, convolutions, functions, dropout and frozen layers: the gradients equal those of
    one tape.
    """
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(3, trainable=False)
    layers = [
        keras.layers.Embedding(7, 4),
        keras.layers.Conv1D(3, 2, padding="same"),
        tf.nn.relu,
        frozen,
        keras.layers.Dropout(0.5),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]
    ids = tf.constant([[1, 1, 3], [1, 0, 6]])
    result = layerwise_gradients(layers, ids, tf.reduce_sum, training=False)
    trained = [layers[0], layers[1], layers[-1]]
    with tf.GradientTape() as tape:
        outputs = ids
        for layer in layers:
            outputs = layer(outputs)
    expected = tape.gradient(outputs, [v for layer in trained for v in layer.trainable_variables])

    actual = tf.nest.flatten(result.gradients)
    assert [len(layer) for layer in result.gradients] == [1, 2, 0, 0, 0, 0, 2]
    assert isinstance(actual[0], tf.IndexedSlices)
    for reference, gradient in zip(expected, actual, strict=True):
        # Float32 and scales that are powers of two: only the order of sums may differ.
        np.testing.assert_allclose(
            tf.convert_to_tensor(gradient), tf.convert_to_tensor(reference), rtol=1e-6
        )


@pytest.mark.sampled
def test_a_layer_that_is_trained_twice_is_an_error():
    """Its two gradients would have different scales. A layer without weights may occur twice."""
    layer, relu = keras.layers.Dense(2), keras.layers.ReLU()
    layer.build([None, 2])

    assert layerwise_gradients([relu, relu], tf.ones([2, 2]), tf.reduce_sum).loss == 4
    with pytest.raises(ValueError, match=r"^`layers`"):
        layerwise_gradients([layer, layer], tf.ones([2, 2]), tf.reduce_sum)


@pytest.mark.sampled
def test_a_layer_that_the_loss_does_not_depend_on_has_no_gradients():
    """Behind a function without a gradient they are None, as on a tape."""
    layer = keras.layers.Dense(2)
    layers = [layer, tf.nn.relu, tf.stop_gradient]
    found = layerwise_gradients(layers, tf.ones([2, 2]), tf.reduce_sum)

    assert found.gradients == [[None, None], [], []]


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
