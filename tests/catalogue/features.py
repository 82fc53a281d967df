"""The rows of what Keras does beside its classes: how layers are put together and changed."""

import hypothesis.strategies as st
import keras
import tensorflow as tf
from catalogue.entries import Entry
from catalogue.layers import SAME_SEQUENCES
from catalogue.rows import IDS, KERAS, SEQUENCE, SHARES, VECTOR, Inputs, Row

L = keras.layers
FEATURES_GROUP = "features"


class Penalized(keras.layers.Layer):
    """Adds the mean square of its inputs to the losses."""

    def call(self, inputs):
        """Returns its inputs."""
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(keras.ops.cast(inputs, "float32"))))
        return inputs


class Recomputed(keras.layers.Wrapper):
    """Runs a layer inside `tf.recompute_grad`."""

    def call(self, inputs):
        """The layer's outputs."""
        return tf.recompute_grad(self.layer)(inputs)


class Remat(keras.layers.Wrapper):
    """Runs a layer inside `keras.remat`."""

    def call(self, inputs):
        """The layer's outputs."""
        return keras.remat(self.layer)(inputs)


class CustomGradient(keras.layers.Wrapper):
    """Runs a layer inside `tf.custom_gradient`, which halves all gradients."""

    def call(self, inputs):
        """The layer's outputs."""

        @tf.custom_gradient
        def run(inputs):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = self.layer(inputs)

            def backward(upstream, variables=None):
                found = tape.gradient(outputs, [inputs, *variables], upstream)
                return found[0] / 2, [each / 2 for each in found[1:]]

            return outputs, backward

        return run(inputs)


class Subclassed(keras.Model):
    """A model that is not functional."""

    def __init__(self, **arguments):
        """Creates two layers."""
        super().__init__(**arguments)
        self.first, self.second = L.Dense(3, activation="tanh"), L.Dense(2)

    def call(self, inputs):
        """One after the other."""
        return self.second(self.first(inputs))


def rematerialized(**_):
    """A Dense layer that is computed again in the backward pass."""
    with keras.RematScope(mode="activations"):
        return L.Dense(3, activation="tanh")


def with_lora(layer, inputs):
    """A layer to which LoRA is added after it was built."""
    outputs = layer(inputs)
    layer.enable_lora(2)
    return outputs


def quantized(mode):
    """Returns what calls a layer and quantizes it."""

    def call(layer, inputs):
        outputs = layer(inputs)
        layer.quantize(mode)
        return outputs

    return call


def after_dense(call):
    """Returns what puts a Dense layer in front, so that gradients flow through the layer."""
    return lambda layer, inputs: call(layer, L.Dense(3)(inputs))


def nested(**_):
    """A functional model in a Sequential."""
    inputs = keras.Input([4])
    inner = keras.Model(inputs, L.Dense(3)(L.Dense(2, activation="tanh")(inputs)))
    return keras.Sequential([inner, L.Dense(2)])


def two_outputs(layer, first, second):
    """Two outputs of a shared layer and their sum."""
    one, other = layer(first), layer(second)
    return [one, L.Add()([one, other])]


def frozen(**_):
    """A layer that is not trained."""
    layer = L.Dense(3, activation="tanh")
    layer.trainable = False
    return layer


FOUR = Inputs(st.just((4,)))
DENSE = {"units": 3, "activation": "tanh"}


def dense(rounds_to="", **arguments):
    """A Dense layer with other arguments."""
    return Row([VECTOR], make=lambda **_: L.Dense(**(DENSE | arguments)), rounds_to=rounds_to)


REMAT_WITH_TRAINING = """
import keras, numpy as np

with keras.RematScope(mode="full"):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
model.compile("sgd", "mse")
try:
    model.fit(np.ones([4, 3]), np.ones([4, 2]), verbose=0)
except ValueError as error:
    assert "keywords arguments only when eager" not in str(error)
"""


FEATURES = {
    "`keras.remat`": Row([VECTOR], make=lambda **_: Remat(L.Dense(3))),
    '`RematScope("activations")`': Row([VECTOR], make=rematerialized),
    '`RematScope("full")`': Row(
        verdict=KERAS,
        because="passes `training` on as a keyword, which `tf.recompute_grad` refuses in a graph",
        program=REMAT_WITH_TRAINING,
    ),
    "`tf.recompute_grad`": Row([VECTOR], make=lambda **_: Recomputed(L.Dense(3))),
    "`tf.custom_gradient`": Row([VECTOR], make=lambda **_: CustomGradient(L.Dense(3))),
    "`enable_lora`": Row([VECTOR], make=lambda **_: L.Dense(3), call=with_lora),
    '`quantize("int8")`': Row(
        [VECTOR],
        make=lambda **_: L.Dense(3),
        call=after_dense(quantized("int8")),
        fails_in=("mixed_float16",),
        in_graph=True,
    ),
    '`quantize("float8")`': Row(
        [FOUR], make=lambda **_: L.Dense(4), call=quantized("float8"), compared_with=SHARES
    ),
    "shared layer": Row(
        [FOUR], make=lambda **_: L.Dense(4, activation="tanh"), call=lambda f, x: f(f(x))
    ),
    "nested models": Row([FOUR], make=nested),
    "subclassed model": Row([VECTOR], make=lambda **_: Subclassed()),
    "several inputs and outputs": Row([FOUR, FOUR], make=lambda **_: L.Dense(3), call=two_outputs),
    "`add_loss`": Row([VECTOR], make=lambda **_: Penalized()),
    "activity regularizer": dense(activity_regularizer=keras.regularizers.L2(0.1)),
    "bias regularizer": dense(bias_regularizer=keras.regularizers.L1(0.1)),
    "mask from `Masking`": Row(
        [SEQUENCE], make=lambda **_: L.LSTM(2), call=lambda f, x: f(L.Masking()(x))
    ),
    "mask from `Embedding`": Row(
        [IDS],
        make=lambda **_: L.GRU(2),
        call=lambda f, x: f(L.Embedding(8, 3, mask_zero=True)(L.Rescaling(0.5, dtype="int32")(x))),
    ),
    "`return_state`": Row([SEQUENCE], make=lambda **_: L.LSTM(2, return_state=True)),
    "`initial_state`": Row(
        [SEQUENCE, Inputs(st.just((2,)))],
        make=lambda **_: L.GRU(2),
        call=lambda f, x, state: f(x, initial_state=[state]),
    ),
    "causal attention": Row(
        SAME_SEQUENCES,
        make=lambda **_: L.MultiHeadAttention(2, 3),
        call=lambda f, q, v: f(q, v, use_causal_mask=True),
    ),
    "a float32 layer in a half model": dense(dtype="float32"),
    "a bfloat16 layer": dense(dtype="mixed_bfloat16", rounds_to="mixed_bfloat16"),
    "frozen layer": Row([VECTOR], make=frozen),
    "kernel that is not trained": Row(
        [SEQUENCE], make=lambda **_: L.BatchNormalization(trainable=False)
    ),
}


def features():
    """All features, as entries of the catalogue."""
    return [Entry(FEATURES_GROUP, name, None, row) for name, row in FEATURES.items()]
