"""Small trainers for tests, and functions to inspect what they did."""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned

import scaling
import strategies
from trainer import Trainer

needs_multi_optimizer = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has MultiOptimizer since 3.15"
)


def linear_model(units=1, inputs=1):
    """One dense layer without a bias, all weights 1."""
    layer = keras.layers.Dense(units, use_bias=False, kernel_initializer="ones")
    return keras.Sequential([keras.Input([inputs]), layer])


class Linear(Trainer):
    """Predicts with one weight; an example's loss is its prediction times its slope. For inputs of
    1, the gradient is the weighted mean of the slopes.
    """

    def build_model(self):
        """One weight, initially 1."""
        return linear_model()

    def build_optimizer(self):
        """Plain SGD, so that a factor in the gradient is a factor in the update."""
        return keras.optimizers.SGD(1.0)

    def compute_loss(self, batch, training):
        """The prediction times the slope."""
        predictions = tf.cast(self.model(batch["x"], training=training), tf.float32)
        return predictions[:, 0] * batch["slope"]

    @property
    def weight(self):
        """The weight, on the first replica."""
        return float(self.model.trainable_variables[0].numpy()[0, 0])


def slopes(*values):
    """A batch for `Linear`."""
    return {"x": np.ones([len(values), 1], np.float32), "slope": np.array(values, np.float32)}


def attempt(trainer, batches):
    """Runs one step per batch; yields the step's report as plain numbers."""
    structure = tf.nest.map_structure(lambda leaf: tf.constant(leaf).dtype, batches[0])
    specs = tf.nest.map_structure(
        lambda leaf, dtype: tf.TensorSpec([None, *np.shape(leaf)[1:]], dtype), batches[0], structure
    )
    dataset = untuned(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs))
    access.start(trainer, next(iter(dataset)))
    iterator = iter(dataset)
    for _ in batches:
        access.state(trainer).halted.assign(False)
        report, _ = access.steps(trainer)(iterator, tf.constant(1))
        values = report.__class__(*(field.numpy()[0].tolist() for field in report))
        yield values._replace(data_wait_secs=0.0)  # differs from run to run


def reset_step_count(state):
    """Resets the step count of a `TrainState`, so that random numbers repeat from the
    first step.
    """
    state.outcomes.assign(tf.zeros_like(state.outcomes))


def copies(variable):
    """Every replica's copy of a variable, as NumPy arrays."""
    inner = variable.value if isinstance(variable, keras.Variable) else variable
    return [copy.numpy() for copy in getattr(inner, "values", [inner])]


def all_copies(trainer, *, metrics=True):
    """Every copy of every variable of model, optimizer and metrics, by position and short name."""
    groups = access.metrics(trainer) if metrics else ()
    kept = [metric for group in groups for metric in group.values()]
    variables = [
        *trainer.model.variables,
        *trainer.optimizer.variables,
        *(variable for metric in kept for variable in metric.variables),
    ]
    return {
        f"{place} {variable.path.split('/')[-1]}": copies(variable)
        for place, variable in enumerate(variables)
    }


def digest(array):
    """Returns the SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def digests_of_run(trainer, batches):
    """Digests of every copy of the run's variables, and of so many next batches of (x, y)."""
    arrays = {
        f"{place} {variable.name} copy {copy}": value
        for place, variable in enumerate(access.variables(trainer))
        for copy, value in enumerate(copies(variable))
    }
    for place in range(batches):
        leaves = next(access.position(trainer).iterator)
        arrays[f"batch {place}"] = np.concatenate([leaf.numpy() for leaf in leaves], axis=1)
    return {name: digest(array) for name, array in arrays.items()}


def assert_same_bits(before, after):
    """Raises unless two results of `all_copies` have the same bits."""
    assert before.keys() == after.keys()
    for name, expected in before.items():
        for copy, (old, new) in enumerate(zip(expected, after[name], strict=True)):
            assert old.tobytes() == new.tobytes(), f"{name} moved on replica {copy}"


# A batch for `overflowing`: each update lowers the weight by 3.
STEEP = {"x": np.ones([4, 1], np.float32), "slope": np.full(4, 3.0, np.float32)}


def overflowing(**arguments):
    """A trainer whose first three steps overflow in float16, with a log line after every four
    steps.
    """
    settings = {"steps_per_loop": 2, "log_interval": 4, "jit_compile": False}
    rule = scaling.DynamicLossScale(initial_scale=2.0**17, max_scale=2.0**17)
    return Linear(precision="mixed_float16", loss_scale=rule, **settings | arguments)


def printed(arguments, folder, seconds):
    """Runs a Python program with the packages in a folder; returns what it prints."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    return result.stdout


GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.standard_normal([8, 8, 8, 1]).astype(np.float32)
LABELS = GENERATOR.integers(3, size=8)


def adam():
    """The optimizer of `SmallImages` runs."""
    return keras.optimizers.Adam(0.01)


class SmallImages(Trainer):
    """Classifies small images with a convolution, BatchNorm, GELU and a dense layer."""

    def build_model(self):
        """Takes images of 8 x 8 pixels, returns three logits."""
        layers = keras.layers
        hidden = [
            layers.Conv2D(4, 3, use_bias=False, name="conv"),
            layers.BatchNormalization(name="norm"),
        ]
        head = [layers.Activation("gelu"), layers.Flatten(), layers.Dense(3, name="logits")]
        return keras.Sequential([keras.Input([8, 8, 1]), *hidden, *head], name="small")

    def compute_loss(self, batch, training):
        """The cross entropy with the labels."""
        logits = tf.cast(self.model(batch[0], training=training), tf.float32)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)


def trained_small(steps=5, make=adam, **arguments):
    """A `SmallImages` trainer after a few steps."""
    settings = {"optimizer": make, "seed": 1, "verbose": False, "jit_compile": False}
    trainer = SmallImages(**settings | arguments)
    trainer.train((IMAGES, LABELS), steps=steps, global_batch=8)
    return trainer


def assert_close(one, other):
    """Compares all copies of all variables of two trainers with a small tolerance."""
    for name, expected in all_copies(one).items():
        for copy, found in zip(expected, all_copies(other)[name], strict=True):
            np.testing.assert_allclose(found, copy, rtol=2e-4, atol=2e-6, err_msg=name)


@functools.cache
def example(name):
    """Returns the module `examples/NAME.py`, so that what it shows is what is tested."""
    path = pathlib.Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imitate_servers(monkeypatch):
    """Lets every strategy pass for one whose workers take steps without waiting for each other."""
    capabilities = strategies.capabilities
    monkeypatch.setattr(
        strategies,
        "capabilities",
        lambda strategy: dataclasses.replace(capabilities(strategy), asynchronous=True),
    )
