"""The models of `gpu_cost.py` in JAX, written by hand, with Adam: functions of Keras's own weights.

Each model takes its weights in the order of Keras's `trainable_variables`, so that both can start
from the same numbers. Casts are where Keras's mixed precision has them: products and convolutions
in half precision, normalization and the loss in float32. Without loss scale, verdict or report.
"""

import functools

import jax
import jax.numpy as jnp

RATE, BETA_1, BETA_2, EPSILON = 1e-4, 0.9, 0.999, 1e-7
MOMENTUM, SMALL = 0.99, 1e-3  # of Keras's normalization layers
HEADS, BLOCKS = 4, 4
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


class Weights:
    """Hands out weights in the order in which the layers were created, and collects statistics."""

    def __init__(self, trained, statistics, dtype):
        """Takes trained weights, moving means and variances, and the dtype to compute in."""
        self.trained, self.statistics = iter(trained), iter(statistics)
        self.dtype, self.written = dtype, []

    def half(self, count):
        """Returns the next weights, in the dtype to compute in."""
        return [next(self.trained).astype(self.dtype) for _ in range(count)]

    def whole(self, count):
        """Returns the next weights, in float32."""
        return [next(self.trained) for _ in range(count)]


def dense(weights, inputs):
    """A dense layer."""
    kernel, bias = weights.half(2)
    return inputs @ kernel + bias


def convolution(weights, inputs, stride=1, *, normed=True, last=True):
    """A convolution without bias; batch normalization; ReLU unless `last` is False."""
    [kernel] = weights.half(1)
    strides = (stride, stride)
    outputs = jax.lax.conv_general_dilated(
        inputs, kernel, strides, "SAME", dimension_numbers=DIMENSIONS
    )
    return batch_norm(weights, outputs, last=last) if normed else outputs


def batch_norm(weights, inputs, *, last):
    """Batch normalization in float32; ReLU unless `last` is False."""
    gamma, beta = weights.whole(2)
    values = inputs.astype(jnp.float32)
    mean, variance = values.mean((0, 1, 2)), values.var((0, 1, 2))
    for new in (mean, variance):
        weights.written.append(MOMENTUM * next(weights.statistics) + (1 - MOMENTUM) * new)
    values = (values - mean) * (jax.lax.rsqrt(variance + SMALL) * gamma) + beta
    outputs = values.astype(weights.dtype)
    return jax.nn.relu(outputs) if last else outputs


def layer_norm(weights, inputs):
    """Layer normalization in float32."""
    gamma, beta = weights.whole(2)
    values = inputs.astype(jnp.float32)
    mean, variance = values.mean(-1, keepdims=True), values.var(-1, keepdims=True)
    return ((values - mean) * (jax.lax.rsqrt(variance + SMALL) * gamma) + beta).astype(
        weights.dtype
    )


def perceptron(weights, inputs):
    """A perceptron of three layers."""
    hidden = inputs.astype(weights.dtype)
    for _ in range(2):
        hidden = jax.nn.relu(dense(weights, hidden))
    return dense(weights, hidden)


def cnn(weights, inputs):
    """Four convolutions, with pooling after the last three."""
    hidden = convolution(weights, inputs.astype(weights.dtype))
    for _ in range(3):
        hidden = convolution(weights, hidden)
        count, height, width, channels = hidden.shape
        hidden = hidden.reshape(count, height // 2, 2, width // 2, 2, channels).max((2, 4))
    return dense(weights, hidden.mean((1, 2), dtype=weights.dtype))


def resnet(weights, inputs):
    """Nine residual blocks; Keras lists a block's shortcut after its second convolution."""
    hidden = convolution(weights, inputs.astype(weights.dtype))
    for width in (32, 64, 128):
        for block in range(3):
            stride = 2 if block == 0 and width > hidden.shape[-1] else 1
            more = convolution(weights, hidden, stride)
            [kernel] = weights.half(1)
            more = jax.lax.conv_general_dilated(
                more, kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS
            )
            if stride > 1:
                hidden = convolution(weights, hidden, stride, normed=False)
            hidden = jax.nn.relu(hidden + batch_norm(weights, more, last=False))
    return dense(weights, hidden.mean((1, 2), dtype=weights.dtype))


def attention(weights, inputs):
    """Causal self-attention."""
    query, key, value = (
        jnp.einsum("btw,whd->bthd", inputs, kernel) + bias
        for kernel, bias in (weights.half(2) for _ in range(3))
    )
    size = inputs.shape[1]
    scores = jnp.einsum("bshd,bthd->bhst", query * query.shape[-1] ** -0.5, key)
    allowed = jnp.tril(jnp.ones([size, size], bool))
    chances = jax.nn.softmax(jnp.where(allowed, scores, -3e4))
    kernel, bias = weights.half(2)
    found = jnp.einsum("bhst,bthd->bshd", chances, value)
    return jnp.einsum("bshd,hdw->bsw", found, kernel) + bias


def transformer(weights, text):
    """A causal language model of bytes."""
    [words] = weights.half(1)
    places = next(weights.statistics)  # Keras takes what is embedded of a constant for a constant
    weights.written.append(places)
    hidden = words[text] + places.astype(weights.dtype)
    for _ in range(BLOCKS):
        hidden = hidden + attention(weights, layer_norm(weights, hidden))
        wide = jax.nn.relu(dense(weights, layer_norm(weights, hidden)))
        hidden = hidden + dense(weights, wide)
    return dense(weights, layer_norm(weights, hidden))


MODELS = {"mlp": perceptron, "cnn": cnn, "resnet": resnet, "transformer": transformer}
MODELS["small_mlp"] = lambda weights, inputs: dense(
    weights, jax.nn.relu(dense(weights, inputs.astype(weights.dtype)))
)


def loss_of(trained, statistics, batch, *, model, dtype):
    """Returns the mean cross entropy in float32, and the new statistics."""
    weights = Weights(trained, statistics, jnp.dtype(dtype))
    inputs, labels = batch
    logits = MODELS[model](weights, inputs).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -chosen.mean(), weights.written


def step_of(model, dtype):
    """Returns a step: (state, batch) -> (state, loss). A state comes from `state_of`."""
    differentiate = jax.value_and_grad(
        functools.partial(loss_of, model=model, dtype=dtype), has_aux=True
    )

    def step(state, batch):
        count = state["count"] + 1
        (loss, written), gradients = differentiate(state["trained"], state["statistics"], batch)
        powers = [beta ** count.astype(jnp.float32) for beta in (BETA_1, BETA_2)]
        rate = RATE * jnp.sqrt(1 - powers[1]) / (1 - powers[0])
        moved = {"trained": [], "first": [], "second": []}
        for gradient, weight, first, second in zip(
            gradients, state["trained"], state["first"], state["second"], strict=True
        ):
            new_first = first + (gradient - first) * (1 - BETA_1)
            new_second = second + (jnp.square(gradient) - second) * (1 - BETA_2)
            moved["first"].append(new_first)
            moved["second"].append(new_second)
            moved["trained"].append(weight - rate * new_first / (jnp.sqrt(new_second) + EPSILON))
        return {**moved, "statistics": written, "count": count}, loss

    return step


def state_of(trained, statistics):
    """Returns the state of a step before the first update, from Keras's weights."""
    trained = [jnp.asarray(each, jnp.float32) for each in trained]
    return {
        "trained": trained,
        "statistics": [jnp.asarray(each, jnp.float32) for each in statistics],
        "first": [jnp.zeros_like(each) for each in trained],
        "second": [jnp.zeros_like(each) for each in trained],
        "count": jnp.zeros([], jnp.int32),
    }
