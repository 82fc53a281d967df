"""Labels of each kind, and models whose outputs suit them."""

import keras
import numpy as np
from catalogue.models import EXAMPLES

FEATURES, OUTPUTS = 4, 3


def one_hot(random, size):
    """A class per example, as a row of zeros and a one."""
    return np.eye(OUTPUTS, dtype=np.float32)[random.integers(OUTPUTS, size=size)]


def numbers(random, size):
    """Normal numbers."""
    return random.standard_normal([size, OUTPUTS]).astype(np.float32)


# kind -> (the output layer's activation, a function that makes labels)
KINDS = {
    "binary": (
        "sigmoid",
        lambda random, size: random.integers(2, size=[size, 1]).astype(np.float32),
    ),
    "one-hot": ("softmax", one_hot),
    "sparse": ("softmax", lambda random, size: random.integers(OUTPUTS, size=size)),
    "numbers": (None, numbers),
    "positive": (
        "softplus",
        lambda random, size: 0.5 + random.random([size, OUTPUTS]).astype(np.float32),
    ),
    "directions": (None, numbers),
    "signs": ("tanh", lambda random, size: np.sign(numbers(random, size))),
    "masks": (
        "sigmoid",
        lambda random, size: random.integers(2, size=[size, OUTPUTS]).astype(np.float32),
    ),
    "embedded": (None, lambda random, size: random.integers(OUTPUTS, size=size)),
    "spoken": (None, lambda random, size: random.integers(1, OUTPUTS, size=[size, 2])),
}


def model_for(kind):
    """A model of two Dense layers that starts with fixed weights."""
    activation, _ = KINDS[kind]
    layers = keras.layers
    units = 1 if kind == "binary" else OUTPUTS
    hidden = [layers.Dense(5, activation="tanh", kernel_initializer=fixed(1))]
    head = [layers.Dense(units, activation=activation, kernel_initializer=fixed(2))]
    if kind == "spoken":  # four moments
        head = [
            layers.Dense(4 * OUTPUTS, kernel_initializer=fixed(2)),
            layers.Reshape([4, OUTPUTS]),
        ]
    if kind == "embedded":
        head += [layers.UnitNormalization()]
    return keras.Sequential([keras.Input([FEATURES]), *hidden, *head])


def fixed(seed):
    """An initializer that returns the same numbers in every model."""
    return keras.initializers.RandomNormal(stddev=0.5, seed=seed)


def labelled(kind, seed, size=EXAMPLES):
    """Random inputs and labels."""
    random = np.random.default_rng(seed)
    inputs = random.standard_normal([size, FEATURES]).astype(np.float32)
    return inputs, KINDS[kind][1](random, size)
