"""Random small Keras models with a batch each, for tests of relations that hold for every model."""

import dataclasses

import hypothesis.strategies as st
import keras
import numpy as np

UNITS = 4
SHAPES = {
    "vector": [6],
    "image": [5, 5, 2],
    "signal": [4, 3],
    "ids": [4],
    "padded signal": [4, 3],
    "padded ids": [4],
}


class MeanSquareLoss(keras.layers.Layer):
    """Adds a tenth of its inputs' mean square to the losses, as one number."""

    supports_masking = True

    def call(self, inputs):
        """Returns its inputs."""
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        apply: takes a Keras tensor of the rank for which the kind is listed, and returns another of
            that rank.
        couples: whether examples of a batch see each other, as in BatchNormalization.
        random: whether it draws random numbers.
        adds_loss: whether it adds to `model.losses`.
    """

    apply: object
    couples: bool = False
    random: bool = False
    adds_loss: bool = False


def dense(x):
    """A dense layer."""
    return keras.layers.Dense(UNITS, activation="tanh")(x)


def shared(x):
    """One dense layer, used twice."""
    layer = keras.layers.Dense(x.shape[-1], activation="tanh")
    return layer(layer(x))


def residual(x):
    """A dense layer beside its input."""
    return keras.layers.Add()([x, keras.layers.Dense(x.shape[-1], activation="gelu")(x)])


def regularized(x):
    """A dense layer with an L2 penalty."""
    return keras.layers.Dense(UNITS, kernel_regularizer=keras.regularizers.L2(0.01))(x)


def active(x):
    """A dense layer with an activity penalty."""
    penalty = keras.regularizers.L2(0.01)
    return keras.layers.Dense(UNITS, activity_regularizer=penalty)(x)


def attention(x):
    """Attention of a sequence to itself, beside its input."""
    layer = keras.layers.MultiHeadAttention(2, 2)
    return keras.layers.Add()([x, layer(x, x)])


def convolution(x):
    """A convolution of images, with padding."""
    return keras.layers.Conv2D(UNITS, 3, padding="same", activation="relu")(x)


def pooled(x):
    """Halves an image."""
    return keras.layers.AveragePooling2D(2, padding="same")(x)


def depthwise(x):
    """A convolution of each channel."""
    return keras.layers.DepthwiseConv2D(3, padding="same", activation="relu")(x)


def convolution_1d(x):
    """A convolution of sequences."""
    return keras.layers.Conv1D(UNITS, 2, padding="causal", activation="tanh")(x)


def lstm(x):
    """An LSTM that returns its outputs."""
    return keras.layers.LSTM(UNITS, return_sequences=True)(x)


def gru(x):
    """A GRU in both directions."""
    return keras.layers.Bidirectional(keras.layers.GRU(2, return_sequences=True))(x)


def adding_loss(x):
    """Adds a loss of the whole batch."""
    return MeanSquareLoss()(x)


def layer_norm(x):
    """Layer normalization."""
    return keras.layers.LayerNormalization()(x)


def group_norm(x):
    """Group normalization with one group."""
    return keras.layers.GroupNormalization(1)(x)


def dropout(x):
    """Dropout."""
    return keras.layers.Dropout(0.3)(x)


def noise(x):
    """Noise."""
    return keras.layers.GaussianNoise(0.1)(x)


def batch_norm(x):
    """Batch normalization."""
    return keras.layers.BatchNormalization()(x)


ANY = {
    "dense": Kind(dense),
    "shared": Kind(shared),
    "residual": Kind(residual),
    "regularized": Kind(regularized, adds_loss=True),
    "activity": Kind(active, adds_loss=True),
    "add_loss": Kind(adding_loss, adds_loss=True),
    "layer_norm": Kind(layer_norm),
    "batch_norm": Kind(batch_norm, couples=True),
    "dropout": Kind(dropout, random=True),
    "noise": Kind(noise, random=True),
}
OF_IMAGES = {
    "convolution": Kind(convolution),
    "depthwise": Kind(depthwise),
    "pooling": Kind(pooled),
    "group_norm": Kind(group_norm),
}
OF_SEQUENCES = {
    "attention": Kind(attention),
    "convolution_1d": Kind(convolution_1d),
    "lstm": Kind(lstm),
    "gru": Kind(gru),
}
KINDS = {
    "vector": ANY,
    "image": ANY | OF_IMAGES,
    "signal": ANY | OF_SEQUENCES,
    "ids": ANY | OF_SEQUENCES,
    "padded signal": ANY | OF_SEQUENCES,
    "padded ids": ANY | OF_SEQUENCES,
}
ALL_KINDS = ANY | OF_IMAGES | OF_SEQUENCES


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A random model and its batches.

    Attributes:
        inputs: the kinds of the inputs, one or two; each has a branch of its own.
        layers: the kinds of layers in each branch.
        seed: of the weights and the data.
        size: number of examples in a batch.
    """

    inputs: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    seed: int
    size: int

    in_graph = False  # it runs eagerly
    xla = True

    def has(self, flag):
        """Whether any layer has a flag of `Kind`."""
        return any(getattr(ALL_KINDS[name], flag) for branch in self.layers for name in branch)

    def build(self):
        """A new model with the same initial weights every time."""
        keras.utils.set_random_seed(self.seed)
        inputs, branches = {}, []
        for index, (kind, names) in enumerate(zip(self.inputs, self.layers, strict=True)):
            dtype = "int32" if kind.endswith("ids") else "float32"
            x = inputs[f"x{index}"] = keras.Input(SHAPES[kind], dtype=dtype, name=f"x{index}")
            if kind.endswith("ids"):
                x = keras.layers.Embedding(7, UNITS, mask_zero=kind == "padded ids")(x)
            if kind == "padded signal":
                x = keras.layers.Masking()(x)
            for name in names:
                x = KINDS[kind][name].apply(x)
            branches.append(keras.layers.Flatten()(x))
        joined = branches[0] if len(branches) == 1 else keras.layers.Concatenate()(branches)
        return keras.Model(inputs, keras.layers.Dense(2)(joined))

    def batches(self, count):
        """Batches of inputs, targets and positive weights, some of them 0."""
        random = np.random.default_rng(self.seed)
        found = []
        for _ in range(count):
            batch = {
                f"x{index}": inputs_of(kind, self.size, random)
                for index, kind in enumerate(self.inputs)
            }
            weights = random.choice([0.5, 1.0, 2.0, 3.0], self.size).astype(np.float32)
            weights[random.integers(self.size)] = 0.0
            target = random.standard_normal([self.size, 2]).astype(np.float32)
            found.append(batch | {"target": target, "weight": weights})
        return found


def inputs_of(kind, size, random):
    """A batch of inputs of a kind. Sequences that may be padded are of any length from 1."""
    if kind.endswith("ids"):
        return random.integers(0, 7, [size, 4]).astype(np.int32)
    numbers = random.standard_normal([size, *SHAPES[kind]]).astype(np.float32)
    if kind == "padded signal":
        numbers[np.arange(4) >= random.integers(1, 5, [size, 1])] = 0.0
    return numbers


@st.composite
def recipes(draw, *, plain=None):
    """Models of one or two branches with one to three layers each.

    Args:
        draw: Hypothesis's.
        plain: whether to leave out layers that couple examples or draw random numbers; None leaves
            them out of every second model.
    """
    inputs = tuple(draw(st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, max_size=2)))
    plain = draw(st.booleans()) if plain is None else plain

    def names_for(kind):
        kinds = KINDS[kind].items()
        return sorted(n for n, each in kinds if not (plain and (each.couples or each.random)))

    layers = tuple(
        tuple(draw(st.lists(st.sampled_from(names_for(kind)), min_size=1, max_size=3)))
        for kind in inputs
    )
    return Recipe(inputs, layers, draw(st.integers(0, 2**16)), draw(st.integers(5, 9)))
