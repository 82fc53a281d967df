"""The eight models that the benchmarks train, with random batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
WINDOW, WORDS, WIDTH = 128, 256, 256  # the transformer's sizes
ROWS, FEATURES = 50_000, 20  # the embedding's rows, and how many of them an example uses


class Work(NamedTuple):
    """A model and its batch."""

    build: Callable[[], keras.Model]  # returns a model of logits, under the current dtype policy
    batch: tuple[Any, Any]  # inputs and labels, NumPy arrays


def loss_of(labels, logits):
    """Returns one loss per example, in float32."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
    return losses if losses.shape.rank == 1 else tf.reduce_mean(losses, axis=1)


def work_of(model):
    """Returns the model and batch with this name."""
    generator = np.random.default_rng(0)
    if model == "transformer":
        text = generator.integers(WORDS, size=[16, WINDOW + 1]).astype(np.int32)
        return Work(build_transformer, (text[:, :-1], text[:, 1:]))
    if model == "embedding":
        features = generator.integers(ROWS, size=[128, FEATURES]).astype(np.int32)
        return Work(build_embedding, (features, generator.integers(10, size=128)))
    build, shape = {
        "mlp": (build_perceptron, [128, 784]),
        "cnn": (build_cnn, [64, 32, 32, 3]),
        "resnet": (build_resnet, [32, 32, 32, 3]),
        "small_mlp": (build_small_perceptron, [128, 784]),
        "lstm": (build_lstm, [32, 28, 28]),
        "separable": (build_separable, [32, 32, 32, 3]),
    }[model]
    return Work(build, (generator.random(shape, np.float32), generator.integers(10, size=shape[0])))


def build_perceptron():
    """Returns a perceptron of sizes 784-512-512-10."""
    hidden = [layers.Dense(512, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input([784]), *hidden, layers.Dense(10)])


def build_small_perceptron():
    """Returns a perceptron of sizes 784-512-10."""
    hidden = layers.Dense(512, activation="relu")
    return keras.Sequential([keras.Input([784]), hidden, layers.Dense(10)])


def build_lstm():
    """Returns an LSTM that reads an image of 28 x 28 row by row."""
    return keras.Sequential([keras.Input([28, 28]), layers.LSTM(128), layers.Dense(10)])


def build_separable():
    """Returns three separable convolutions with layer normalization."""
    inputs = hidden = keras.Input([32, 32, 3])
    for width, stride in ((32, 1), (64, 2), (128, 2)):
        hidden = layers.SeparableConv2D(width, 3, stride, padding="same")(hidden)
        hidden = layers.ReLU()(layers.LayerNormalization()(hidden))
    return classifier(inputs, hidden)


def build_embedding():
    """Returns a classifier of sets of features, nearly all of whose weights are an embedding."""
    features = keras.Input([FEATURES], dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(ROWS, 64)(features))
    return keras.Model(features, layers.Dense(10)(layers.Dense(64, activation="relu")(hidden)))


def build_cnn():
    """Returns four convolutions with batch normalization and pooling, for CIFAR's image size."""
    inputs = keras.Input([32, 32, 3])
    hidden = convolution(inputs, 32)
    for width in (32, 64, 128):
        hidden = layers.MaxPooling2D()(convolution(hidden, width))
    return classifier(inputs, hidden)


def build_resnet():
    """Returns nine residual blocks of two convolutions each."""
    inputs = keras.Input([32, 32, 3])
    hidden = convolution(inputs, 32)
    for width in (32, 64, 128):
        for block in range(3):
            hidden = residual(hidden, width, 2 if block == 0 and width > 32 else 1)
    return classifier(inputs, hidden)


def classifier(inputs, hidden):
    """Returns a model that classifies by the average of `hidden` over positions."""
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden)))


def convolution(hidden, width, stride=1, *, last=True):
    """Applies a convolution, batch normalization, and ReLU unless `last` is False."""
    hidden = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(hidden)
    hidden = layers.BatchNormalization()(hidden)
    return layers.ReLU()(hidden) if last else hidden


def residual(hidden, width, stride):
    """Applies a residual block of two convolutions."""
    more = convolution(convolution(hidden, width, stride), width, last=False)
    if hidden.shape[-1] != width or stride > 1:
        hidden = layers.Conv2D(width, 1, stride, use_bias=False)(hidden)
    return layers.ReLU()(hidden + more)


def build_transformer():
    """Returns a causal language model of bytes with four transformer blocks."""
    text = keras.Input([WINDOW], dtype="int32")
    places = layers.Embedding(WINDOW, WIDTH)(keras.ops.arange(WINDOW))
    hidden = layers.Embedding(WORDS, WIDTH)(text) + places
    for _ in range(4):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(4, WIDTH // 4)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        wide = layers.Dense(4 * WIDTH, activation="relu")(layers.LayerNormalization()(hidden))
        hidden = hidden + layers.Dense(WIDTH)(wide)
    return keras.Model(text, layers.Dense(WORDS)(layers.LayerNormalization()(hidden)))
