"""The rows of `keras.layers`."""

import functools
import tempfile

import hypothesis.strategies as st
import keras
import pytest
import tensorflow as tf
from catalogue.rows import (
    ACTIVATIONS,
    BOOLS,
    DRAWS,
    FRAMES,
    IDS,
    IMAGE,
    KERAS,
    NOT_TRAINED,
    PHOTO,
    SENTENCE,
    SEQUENCE,
    SHARES,
    VECTOR,
    VOLUME,
    WORDS,
    Inputs,
    Row,
    sizes,
)

L = keras.layers
UNITS = st.integers(1, 4)
WINDOW = st.integers(2, 3)
PADDING = st.sampled_from(["valid", "same"])
RATE = st.sampled_from([0.2, 0.5])
FACTOR = st.sampled_from([0.1, 0.3])
RANGE = {"value_range": (0.0, 1.0)}
HALF = ("mixed_float16", "mixed_bfloat16")
FLOAT16 = ("mixed_float16",)
GAMMA = "StatelessRandomGammaV3"


class Scaled(keras.layers.Layer):
    """A layer of one's own: multiplies by a weight per feature, and counts its calls."""

    def build(self, shape):
        """Creates the weight and the counter."""
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs):
        """Returns the scaled inputs."""
        self.calls.assign(self.calls + 1.0)
        return inputs * self.scale


class Wrapped(keras.layers.Wrapper):
    """A wrapper of one's own."""

    def call(self, inputs):
        """Twice what the layer returns."""
        return 2.0 * self.layer(inputs)


def in_dimensions(stem, row):
    """The rows of `stem` in one, two and three dimensions."""
    return {f"{stem}{n}D": row((SEQUENCE, IMAGE, VOLUME)[n - 1]) for n in (1, 2, 3)}


@functools.cache
def folder_of_saved_model():
    """A SavedModel of a module with one weight, in a folder that lives as long as the process."""
    folder = tempfile.TemporaryDirectory()
    module = tf.Module()
    module.weight = tf.Variable(tf.ones([3, 4]))
    module.serve = tf.function(
        lambda x: tf.tanh(x @ module.weight), input_signature=[tf.TensorSpec([None, 3])]
    )
    tf.saved_model.save(module, folder.name, signatures=module.serve)
    return folder


def saved_model(**_):
    """A layer from a SavedModel, which is trained on."""
    folder = folder_of_saved_model().name
    return L.TFSMLayer(folder, call_endpoint="serve", trainable=True, dtype="float32")


def recurrent(cell):
    """A row of a cell inside `RNN`."""
    return Row(
        [SEQUENCE],
        {"cell": st.builds(cell, UNITS), "return_sequences": BOOLS},
        make=L.RNN,
    )


def augmentation(fails_in=(), no_xla=False, xla_lacks="", **arguments):
    """A row of a random image layer, first in a model."""
    return Row(
        [PHOTO],
        arguments,
        compared_with=DRAWS,
        fails_in=fails_in,
        no_xla=no_xla,
        xla_lacks=xla_lacks,
    )


def preprocessing(inputs=PHOTO, no_xla=False, fails_in=(), **arguments):
    """A row of a layer without weights or random numbers, first in a model."""
    return Row([inputs], arguments, no_xla=no_xla, fails_in=fails_in)


def merged(**arguments):
    """A row of a layer that merges two vectors of one size."""
    pair = [Inputs(st.just((3,))), Inputs(st.just((3,)))]
    return Row(pair, arguments)


SAME_SEQUENCES = [Inputs(st.just((4, 3)))] * 2
POOLING = {"pool_size": WINDOW, "padding": PADDING}
CONVOLUTION = {"kernel_size": WINDOW, "padding": PADDING, "activation": ACTIVATIONS}
FILTERS = {"filters": UNITS, **CONVOLUTION}
RECURRENT = {"units": UNITS, "return_sequences": BOOLS, "go_backwards": BOOLS, "unroll": BOOLS}
WITH_CUDNN = (
    "on a GPU, refused in bfloat16 unless `use_cudnn=False`: TensorFlow's gradients are wrong"
)


PYTHON_RANDOM = (
    "chooses its operations with Python's `random` when a graph is traced, then never again"
)
SAME_CHAIN = """
import random
import keras, numpy as np, tensorflow as tf

images = tf.constant(np.random.default_rng(0).random([2, 8, 8, 3]), tf.float32)
def first_call(python_seed):
    layer = keras.layers.AugMix(value_range=(0.0, 1.0), seed=1)
    random.seed(python_seed)
    return tf.function(lambda x: layer(x, training=True))(images).numpy()
results = [first_call(seed).tobytes() for seed in range(6)]
assert len(set(results)) == 1, "one seed of the layer, several results"
"""
FIRST_IMAGE = "gives every example the first image if the batch's size is not known in a graph"
ONE_IMAGE = """
import keras, numpy as np, tensorflow as tf

images = tf.constant(np.random.default_rng(0).random([2, 8, 8, 3]), tf.float32)
layer = keras.layers.RandomElasticTransform(factor=1.0, value_range=(0.0, 1.0), seed=1)
some = tf.TensorSpec([None, 8, 8, 3])
first, second = tf.function(lambda x: layer(x, training=True), input_signature=[some])(images)
assert not np.array_equal(first, second), "one image twice"
"""


def lambda_layer(**_):
    """A Lambda."""
    return L.Lambda(lambda x: x * x)


def of_jax(**_):
    """A function of JAX, with a weight."""
    jax = pytest.importorskip("jax")

    def initial(rng, inputs):
        return {"kernel": jax.random.normal(rng, [inputs.shape[-1], 3])}

    def call(params, inputs):
        return jax.numpy.tanh(inputs @ params["kernel"])

    return L.JaxLayer(call, initial, seed=0)


def of_flax(**_):
    """A module of Flax."""
    linen = pytest.importorskip("flax.linen")
    return L.FlaxLayer(linen.Dense(3))


LAYERS = {
    # What trains.
    "Dense": Row([VECTOR], {"units": UNITS, "activation": ACTIVATIONS, "use_bias": BOOLS}),
    "EinsumDense": Row(
        [Inputs(st.just((4, 3)))],
        {"equation": "abc,cd->abd", "output_shape": (4, 3), "bias_axes": "d"},
    ),
    "Embedding": Row([IDS], {"input_dim": 8, "output_dim": UNITS, "mask_zero": BOOLS}),
    "ReversibleEmbedding": Row(
        [IDS],
        {"input_dim": 8, "output_dim": UNITS, "tie_weights": BOOLS},
        call=lambda layer, ids: layer(layer(ids), reverse=True),
    ),
    "PReLU": Row([SEQUENCE]),
    **in_dimensions("Conv", lambda x: Row([x], FILTERS)),
    **{
        f"Conv{n}DTranspose": Row([x], FILTERS) for n, x in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))
    },
    **{f"DepthwiseConv{n}D": Row([x], CONVOLUTION) for n, x in ((1, SEQUENCE), (2, IMAGE))},
    **{f"SeparableConv{n}D": Row([x], FILTERS) for n, x in ((1, SEQUENCE), (2, IMAGE))},
    # Normalization.
    "BatchNormalization": Row([SEQUENCE], {"scale": BOOLS, "center": BOOLS}, compared_with=SHARES),
    "LayerNormalization": Row([SEQUENCE], {"scale": BOOLS, "center": BOOLS}),
    "RMSNormalization": Row([SEQUENCE]),
    "UnitNormalization": Row([SEQUENCE]),
    "GroupNormalization": Row([Inputs(st.just((5, 4)))], {"groups": st.sampled_from([1, 2, -1])}),
    "SpectralNormalization": Row(
        [VECTOR],
        {"power_iterations": WINDOW},
        make=lambda **arguments: L.SpectralNormalization(L.Dense(3), **arguments),
        refused_in=HALF,
        because="in half precision it would assign its kernel rounded, which is refused",
    ),
    "Normalization": Row(
        [SEQUENCE],
        {},
        make=lambda **_: L.Normalization(mean=0.5, variance=2.0),
    ),
    # Recurrence.
    "LSTM": Row([SEQUENCE], RECURRENT, because=WITH_CUDNN),
    "GRU": Row([SEQUENCE], RECURRENT | {"reset_after": BOOLS}, because=WITH_CUDNN),
    "SimpleRNN": Row([SEQUENCE], RECURRENT),
    "LSTMCell": recurrent(L.LSTMCell),
    "GRUCell": recurrent(L.GRUCell),
    "SimpleRNNCell": recurrent(L.SimpleRNNCell),
    "RNN": recurrent(L.GRUCell),
    "StackedRNNCells": Row(
        [SEQUENCE], {}, make=lambda **_: L.RNN(L.StackedRNNCells([L.LSTMCell(2), L.GRUCell(3)]))
    ),
    **{
        f"ConvLSTM{n}D": Row([x], {"filters": st.integers(1, 2), "kernel_size": 2})
        for n, x in (
            (1, Inputs(sizes((2, 3), (4, 5), (1, 2)))),
            (2, FRAMES),
            (3, Inputs(st.just((2, 3, 3, 3, 1)))),
        )
    },
    "Bidirectional": Row(
        [SEQUENCE],
        {"merge_mode": st.sampled_from(["sum", "mul", "concat", "ave"])},
        make=lambda **arguments: L.Bidirectional(L.LSTM(2, return_sequences=True), **arguments),
        because=f"around `LSTM`: {WITH_CUDNN}",
    ),
    "TimeDistributed": Row([SEQUENCE], make=lambda **_: L.TimeDistributed(L.Dense(3))),
    # Attention.
    "Attention": Row(SAME_SEQUENCES, {"use_scale": BOOLS}),
    "AdditiveAttention": Row(SAME_SEQUENCES, {"use_scale": BOOLS}),
    "MultiHeadAttention": Row(
        SAME_SEQUENCES,
        {"num_heads": WINDOW, "key_dim": UNITS},
        call=lambda layer, *inputs: layer(*inputs),
    ),
    "GroupQueryAttention": Row(
        SAME_SEQUENCES,
        {
            "head_dim": UNITS,
            "num_query_heads": 4,
            "num_key_value_heads": WINDOW.map(lambda n: 2 * n - 2),
        },
        call=lambda layer, *inputs: layer(*inputs),
    ),
    # Without weights.
    "Activation": Row([SEQUENCE], {"activation": ACTIVATIONS}),
    "ELU": Row([SEQUENCE]),
    "LeakyReLU": Row([SEQUENCE]),
    "ReLU": Row([SEQUENCE], {"negative_slope": RATE}),
    "Softmax": Row([SEQUENCE]),
    "Identity": Row([SEQUENCE]),
    "ActivityRegularization": Row([SEQUENCE], {"l1": RATE, "l2": RATE}),
    "Masking": Row([SEQUENCE]),
    "Flatten": Row([SEQUENCE]),
    "Reshape": Row([SEQUENCE], {"target_shape": (-1, 1)}),
    "Permute": Row([SEQUENCE], {"dims": (2, 1)}),
    "RepeatVector": Row([VECTOR], {"n": WINDOW}),
    "Lambda": Row([VECTOR], make=lambda_layer),
    "Rescaling": Row([SEQUENCE], {"scale": 0.5, "offset": 0.25}),
    "InputLayer": Row([VECTOR], make=lambda **_: L.Identity()),
    "Layer": Row([VECTOR], make=lambda **_: Scaled()),
    "Wrapper": Row([VECTOR], make=lambda **_: Wrapped(L.Dense(3))),
    **{name: merged() for name in ("Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract")},
    "Concatenate": merged(),
    "Dot": merged(axes=1),
    **{
        f"{kind}Pooling{n}D": Row([x], POOLING, fails_in=FLOAT16 * (n == 3))
        for kind in ("Average", "Max")
        for n, x in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))
    },
    **{
        f"Global{kind}Pooling{n}D": Row([x], {"keepdims": BOOLS})
        for kind in ("Average", "Max")
        for n, x in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))
    },
    **{
        f"Adaptive{kind}Pooling{n}D": Row([x], {"output_size": WINDOW}, fails_in=FLOAT16 * (n == 3))
        for kind in ("Average", "Max")
        for n, x in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))
    },
    **in_dimensions("Cropping", lambda x: Row([x], {"cropping": 1})),
    **in_dimensions("UpSampling", lambda x: Row([x], {"size": 2})),
    **in_dimensions("ZeroPadding", lambda x: Row([x], {"padding": 1})),
    # Random numbers.
    "Dropout": Row([SEQUENCE], {"rate": RATE}, compared_with=DRAWS),
    "AlphaDropout": Row([SEQUENCE], {"rate": RATE}, compared_with=DRAWS),
    "GaussianDropout": Row([SEQUENCE], {"rate": RATE}, compared_with=DRAWS),
    "GaussianNoise": Row([SEQUENCE], {"stddev": RATE}, compared_with=DRAWS),
    **in_dimensions("SpatialDropout", lambda x: Row([x], {"rate": RATE}, compared_with=DRAWS)),
    # Image augmentation.
    "AugMix": Row(verdict=KERAS, because=PYTHON_RANDOM, program=SAME_CHAIN),
    "AutoContrast": augmentation(**RANGE),
    "CenterCrop": preprocessing(height=4, width=5),
    "ContrastLimitedAdaptiveHistogramEqualization": preprocessing(**RANGE, tile_grid_size=(2, 2)),
    "CutMix": augmentation(fails_in=HALF, xla_lacks=GAMMA),
    "Equalization": augmentation(**RANGE),
    "MixUp": augmentation(xla_lacks=GAMMA),
    "RandAugment": augmentation(no_xla=True, **RANGE),
    "RandomBrightness": augmentation(factor=FACTOR, **RANGE),
    "RandomColorDegeneration": augmentation(factor=FACTOR, **RANGE),
    "RandomColorJitter": augmentation(**RANGE, brightness_factor=FACTOR, hue_factor=FACTOR),
    "RandomContrast": augmentation(factor=FACTOR, **RANGE),
    "RandomCrop": augmentation(no_xla=True, height=4, width=4),
    "RandomElasticTransform": Row(verdict=KERAS, because=FIRST_IMAGE, program=ONE_IMAGE),
    "RandomErasing": augmentation(fails_in=FLOAT16, **RANGE),
    "RandomFlip": augmentation(),
    "RandomGaussianBlur": augmentation(fails_in=FLOAT16, **RANGE),
    "RandomGrayscale": augmentation(factor=FACTOR),
    "RandomHue": augmentation(factor=FACTOR, **RANGE),
    "RandomInvert": augmentation(factor=FACTOR, **RANGE),
    "RandomPerspective": augmentation(no_xla=True),
    "RandomPosterization": augmentation(factor=st.integers(2, 6), **RANGE),
    "RandomRotation": augmentation(no_xla=True, factor=FACTOR),
    "RandomSaturation": augmentation(factor=FACTOR, **RANGE),
    "RandomSharpness": augmentation(factor=FACTOR, **RANGE),
    "RandomShear": augmentation(no_xla=True, x_factor=FACTOR),
    "RandomTranslation": augmentation(no_xla=True, height_factor=FACTOR, width_factor=FACTOR),
    "RandomZoom": augmentation(no_xla=True, height_factor=FACTOR),
    "Solarization": augmentation(**RANGE),
    "Resizing": preprocessing(height=4, width=5),
    "Pipeline": Row(
        [PHOTO],
        make=lambda **_: L.Pipeline([L.RandomFlip(), L.Rescaling(2.0)]),
        compared_with=DRAWS,
    ),
    # Preprocessing.
    "CategoryEncoding": preprocessing(IDS, num_tokens=8, output_mode="multi_hot"),
    "Discretization": preprocessing(SEQUENCE, bin_boundaries=(-0.5, 0.0, 0.7)),
    "Hashing": preprocessing(IDS, no_xla=True, num_bins=4),
    "HashedCrossing": Row([Inputs(st.just((1,)), "ids")] * 2, {"num_bins": 5}, no_xla=True),
    "IntegerLookup": preprocessing(IDS, no_xla=True, vocabulary=(1, 3, 5, 6)),
    "StringLookup": preprocessing(WORDS, no_xla=True, vocabulary=("a", "b", "c")),
    "TextVectorization": preprocessing(
        SENTENCE, no_xla=True, vocabulary=["a", "b", "c"], output_sequence_length=3
    ),
    "MelSpectrogram": preprocessing(
        Inputs(st.just((64,))),
        fft_length=16,
        sequence_stride=8,
        sampling_rate=100,
        num_mel_bins=4,
        max_freq=50.0,
        min_freq=1.0,
    ),
    "STFTSpectrogram": preprocessing(
        Inputs(st.just((64, 1))),
        fails_in=("mixed_bfloat16",),
        frame_length=16,
        frame_step=8,
        fft_length=16,
    ),
    # What is no part of a model, or of another framework.
    "InputSpec": Row(verdict=NOT_TRAINED, because="describes a layer's inputs"),
    "MaxNumBoundingBoxes": Row(
        verdict=NOT_TRAINED, because="pads the boxes of a dict of labels; belongs into the data"
    ),
    "TFSMLayer": Row([Inputs(st.just((3,)))], make=saved_model),
    "FlaxLayer": Row([VECTOR], make=of_flax),
    "JaxLayer": Row([VECTOR], make=of_jax),
    "TorchModuleWrapper": Row(
        verdict=NOT_TRAINED, because="only for Keras's PyTorch backend; Keras raises"
    ),
}
