"""Small models with a class of Keras in them, drawn by Hypothesis, and batches for them."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import keras
import numpy as np
import tensorflow as tf
from catalogue.rows import Row
from hypothesis import assume

EXAMPLES = 12  # on 3 replicas with 2 microbatches, each sees 2 examples
WORDS = np.array(["a", "b", "c d", "e"])
VALUES = {
    "normal": lambda random, shape: random.standard_normal(shape).astype(np.float32),
    "unit": lambda random, shape: random.random(shape).astype(np.float32),
    "ids": lambda random, shape: random.integers(1, 8, shape).astype(np.int32),
    "words": lambda random, shape: WORDS[random.integers(len(WORDS), size=shape)],
}
DTYPES = {"normal": "float32", "unit": "float32", "ids": "int32", "words": "string"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A drawn model and a batch."""

    row: Row
    cls: type
    shapes: tuple[tuple[int, ...], ...]
    arguments: dict[str, Any]
    dense_first: bool  # whether a Dense layer stands before the class
    known_size: bool  # whether the batch size is known when the step is traced
    seed: int  # of weights and data

    def __repr__(self) -> str:
        """What one needs to build it again."""
        return f"{getattr(self.cls, '__name__', 'a feature')}({self.arguments}), {self.shapes}, {self.dense_first=}"


@st.composite
def cases(draw, cls, row):
    """Models with a class, by its row."""
    seed = draw(st.integers(0, 2**32 - 1))
    assume(seed)  # rules out the simplest model, which Hypothesis tries first
    values = {
        name: draw(value) if isinstance(value, st.SearchStrategy) else value
        for name, value in row.arguments.items()
    }
    shapes = tuple(draw(each.shape) for each in row.inputs)
    real = bool(row.inputs) and all(each.real for each in row.inputs)
    return Case(row, cls, shapes, values, real and draw(st.booleans()), draw(st.booleans()), seed)


def build(case):
    """The model: inputs, perhaps a Dense layer, the class, a Dense layer."""
    inputs, joined = branch(case)
    return keras.Model(inputs, keras.layers.Dense(2)(joined))


def branch(case, index=0):
    """Inputs, perhaps a Dense layer, and the class: (the inputs, one row of numbers per example).

    The inputs of a model's branch are called "x<index>_0" and so on.
    """
    inputs = [
        keras.Input(shape, dtype=DTYPES[each.kind], name=f"x{index}_{place}")
        for place, (shape, each) in enumerate(zip(case.shapes, case.row.inputs, strict=True))
    ]
    hidden = [keras.layers.Dense(x.shape[-1])(x) if case.dense_first else x for x in inputs]
    made = made_by(case)
    if case.row.call:
        outputs = case.row.call(made, *hidden)
    else:
        outputs = made(hidden if len(hidden) > 1 else hidden[0])
    flat = [flattened(each) for each in tf.nest.flatten(outputs)]
    return inputs, flat[0] if len(flat) == 1 else keras.layers.Concatenate()(flat)


def made_by(case):
    """An object of the class. Its arguments may be layers, so each model gets its own."""
    return (case.row.make or case.cls)(**rebuilt(case.arguments))


def rebuilt(arguments):
    """The arguments, with new layers of the same configuration."""
    return {
        name: type(value).from_config(value.get_config())
        if isinstance(value, keras.Layer)
        else value
        for name, value in arguments.items()
    }


def flattened(tensor):
    """A tensor with one row of floating-point numbers per example."""
    if not tf.as_dtype(tensor.dtype).is_floating:
        tensor = keras.layers.Rescaling(0.25)(tensor)
    return tensor if len(tensor.shape) == 2 else keras.layers.Flatten()(tensor)


def batch_of(case):
    """Random inputs and targets."""
    random = np.random.default_rng(case.seed)
    inputs = [tf.constant(each) for each in inputs_of(case, random, EXAMPLES)]
    return inputs, tf.constant(random.standard_normal([EXAMPLES, 2]), tf.float32)


def inputs_of(case, random, size):
    """Random inputs of `size` examples, as arrays."""
    return [
        VALUES[each.kind](random, (size, *shape))
        for each, shape in zip(case.row.inputs, case.shapes, strict=True)
    ]


def weights_of(model, case):
    """Weights around the initial ones, so that none is zero; the others as they are."""
    random = np.random.default_rng(case.seed + 1)
    return [
        variable.numpy() + 0.25 * random.standard_normal(variable.shape).astype(np.float32)
        if variable.trainable and tf.as_dtype(variable.dtype).is_floating
        else variable.numpy()
        for variable in model.weights
    ]


def losses(model, batch, training):
    """The mean square of each example's errors."""
    inputs, targets = batch
    outputs = model(inputs if len(inputs) > 1 else inputs[0], training=training)
    return tf.reduce_mean((tf.cast(outputs, tf.float32) - targets) ** 2, -1)
