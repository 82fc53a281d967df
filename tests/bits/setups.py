"""The set-ups whose results are held to the bit, and the program that runs them.

    python tests/bits/setups.py OUT NAME...

Each set-up trains 30 steps on one intra-op thread, so that no sum depends on how many cores there
are. `OUT/NAME.json` then holds the counts of the steps, the loss scale, and digests of what the run
has written: weights and statistics, slots, and logged numbers.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from trainer import Skips, Trainer, Updates  # isort: skip

import keras
import numpy as np
import tensorflow as tf

import scaling
import strategies

STEPS, BATCH = 30, 12
WORDS, INPUTS = 7, 4
LOGGED = ("loss", "regularization_loss", "gradient_norm", "mean")
SMOOTH, STEEP = 1.0, 3e5  # factors of a loss; gradients with the second overflow in float16


def batches(steep=(), spoilt=()):
    """Returns 30 batches.

    Args:
        steep: steps, from 0, whose last example overflows in the backward pass.
        spoilt: steps whose last example has gradients that are NaN at every scale, and no infinity.
    """
    random = np.random.default_rng(1)
    count = STEPS * BATCH
    x = random.standard_normal([count, INPUTS]).astype(np.float32)
    factor, root = np.full(count, SMOOTH, np.float32), np.ones(count, np.float32)
    factor[[(step + 1) * BATCH - 1 for step in steep]] = STEEP
    root[[(step + 1) * BATCH - 1 for step in spoilt]] = 0.0
    examples = {
        "x": x,
        "words": random.integers(WORDS, size=[count, 3]).astype(np.int32),
        "y": np.tanh(x.sum(axis=1)),
        "factor": factor,
        "root": root,
    }
    return tf.data.Dataset.from_tensor_slices(examples).batch(BATCH, drop_remainder=True)


def losses(predictions, batch):
    """Squared errors times the factors. The derivative of the root is NaN where `root` is 0."""
    errors = tf.square(predictions - batch["y"]) * batch["factor"]
    return errors + 0.1 * tf.sqrt(tf.square(predictions) * batch["root"])


class Dense(Trainer):
    """Two dense layers."""

    def build_model(self):
        """Returns the layers."""
        first = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")
        return keras.Sequential([keras.Input([INPUTS]), first, keras.layers.Dense(1)])

    def build_optimizer(self):
        """Returns Adam, which has two slots for each weight."""
        return keras.optimizers.Adam(0.01)

    def predictions(self, batch, training):
        """Returns one number for each example, in float32."""
        return tf.cast(self.model(batch["x"], training=training), tf.float32)[:, 0]

    def compute_loss(self, batch, training):
        """Returns the losses of the examples, and the predictions for the metric."""
        predictions = self.predictions(batch, training)
        return losses(predictions, batch), predictions

    def update_metrics(self, batch, aux):
        """The mean of the predictions."""
        for metric in self.metrics.values():
            metric.update_state(aux)


class Mixed(Dense):
    """An embedding, BatchNormalization and Dropout."""

    def build_model(self):
        """Returns a model of a text and a vector."""
        words = keras.Input([3], dtype="int32", name="words")
        x = keras.Input([INPUTS], name="x")
        text = keras.layers.Flatten()(keras.layers.Embedding(WORDS, 2)(words))
        hidden = keras.layers.Dense(8)(keras.layers.Concatenate()([text, x]))
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(0.3)(keras.layers.Activation("tanh")(hidden))
        return keras.Model({"words": words, "x": x}, keras.layers.Dense(1)(hidden))

    def predictions(self, batch, training):
        """The same, of both inputs."""
        inputs = {"words": batch["words"], "x": batch["x"]}
        return tf.cast(self.model(inputs, training=training), tf.float32)[:, 0]


class Players(Dense):
    """A critic and a generator that take turns."""

    def build_model(self):
        """Returns a layer that has both as attributes."""
        model = keras.layers.Layer()
        model.critic = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.generator = keras.Sequential([keras.Input([INPUTS]), keras.layers.Dense(1)])
        return model

    def build_optimizer(self):
        """Returns one for each."""
        return {"critic": keras.optimizers.Adam(0.01), "generator": keras.optimizers.SGD(0.02)}

    def compute_loss(self, batch, training):
        """The critic tells labels and predictions apart; the generator brings them together."""
        made = self.model.generator(batch["x"], training=training)
        of_made = tf.cast(self.model.critic(made, training=training), tf.float32)[:, 0]
        true = tf.cast(self.model.critic(batch["y"][:, None], training=training), tf.float32)[:, 0]
        critic = tf.nn.softplus(of_made) + tf.nn.softplus(-true)
        generator = tf.nn.softplus(-of_made) * batch["factor"]
        return {"critic": critic, "generator": generator}


class Hidden:
    """A plain object: neither Keras nor TensorFlow looks for variables in it."""

    def __init__(self):
        """A moving mean of the predictions, shape (), and the number of batches."""
        self.mean = tf.Variable(0.0, trainable=False)
        self.batches = tf.Variable(0, trainable=False)


class Module(tf.Module):
    """One weight for each input, with casts of its own."""

    def __init__(self):
        """The weights, shape (inputs, 1)."""
        super().__init__()
        self.weights = tf.Variable(tf.fill([INPUTS, 1], 0.5))

    def __call__(self, inputs, dtype):
        """Returns the product in a dtype."""
        return tf.cast(inputs, dtype) @ tf.cast(self.weights, dtype)


class WithHidden(Dense):
    """A module whose loss writes variables that no model holds."""

    def __init__(self, **settings):
        """Creates them."""
        super().__init__(**settings)
        self.hidden = Hidden()

    def build_model(self):
        """Returns the module."""
        return Module()

    def predictions(self, batch, training):
        """The same, in the compute dtype."""
        product = self.model(batch["x"], self.precision.compute_dtype)
        return tf.cast(product, tf.float32)[:, 0]

    def compute_loss(self, batch, training):
        """The losses of the predictions without their moving mean."""
        predictions = self.predictions(batch, training)
        if training:
            mean = tf.stop_gradient(tf.reduce_mean(predictions))
            self.hidden.mean.assign(0.9 * self.hidden.mean + 0.1 * mean)
            self.hidden.batches.assign_add(1)
        return losses(predictions - self.hidden.mean, batch), predictions


@dataclasses.dataclass(frozen=True)
class SetUp:
    """A class, its settings apart from the usual ones, and the steps whose batches are planted."""

    trainer: type[Trainer] = Mixed
    steep: tuple[int, ...] = (2, 3, 4, 17)
    spoilt: tuple[int, ...] = ()
    replicas: int = 1
    workers: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


SETUPS = {
    "skip": SetUp(Dense),
    "retry": SetUp(Dense, settings={"skips": Skips(on_overflow="retry")}),
    "nan_alone": SetUp(Dense, steep=(), spoilt=(5, 6, 20)),
    "critic": SetUp(
        Players,
        settings={
            "updates": Updates(
                global_clipnorm=1.0, alternate_optimizers=True, updates_per_step={"critic": 3}
            ),
            "metrics": None,
        },
    ),
    "float32_step": SetUp(
        Dense,
        steep=tuple(range(8, 13)),
        settings={"skips": Skips(on_stuck="float32", max_consecutive=3)},
    ),
    "hysteresis": SetUp(
        Dense,
        settings={"loss_scale": scaling.DynamicLossScale(2.0**8, growth_interval=4, hysteresis=2)},
    ),
    "hidden_variables": SetUp(WithHidden),
    "one_replica": SetUp(),
    "two_replicas": SetUp(replicas=2),
    "three_replicas": SetUp(replicas=3),
    "two_microbatches": SetUp(settings={"num_microbatches": 2}),
    "two_replicas_two_microbatches": SetUp(replicas=2, settings={"num_microbatches": 2}),
    "one_program": SetUp(settings={"jit_compile": "step"}),
    "two_workers": SetUp(workers=True),
    "two_workers_nan_alone": SetUp(Dense, steep=(), spoilt=(5, 6, 20), workers=True),
}
IN_ONE_PROCESS = [name for name, setup in SETUPS.items() if not setup.workers]
IN_TWO_PROCESSES = [name for name, setup in SETUPS.items() if setup.workers]


def make(setup, strategy):
    """Returns the trainer of a set-up. All settings pass through here."""
    usual = {
        "strategy": strategy,
        "precision": "mixed_float16",
        "loss_scale": scaling.DynamicLossScale(2.0**8, growth_interval=4),
        "metrics": lambda: {"mean": keras.metrics.Mean()},
        "updates": Updates(global_clipnorm=1.0, ema_momentum=0.9),
        "jit_compile": False,
        "log_interval": 10,
        "steps_per_loop": 3,
        "seed": 3,
        "verbose": False,
    }
    return setup.trainer(**usual | setup.settings)


def digest(arrays):
    """Returns a digest of the arrays' dtypes, shapes and bits."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def copies(variables):
    """Yields this process's copies of variables, on each replica."""
    for variable in variables:
        inner = variable.value if isinstance(variable, keras.Variable) else variable
        yield from (copy.numpy() for copy in getattr(inner, "values", [inner]))


def results(trainer, summary):
    """Returns what a run has come to: numbers, and digests of bits."""
    optimizers = trainer.optimizer
    optimizers = optimizers.values() if isinstance(optimizers, dict) else [optimizers]
    slots = [variable for each in optimizers for variable in each.variables]
    hidden = vars(trainer.hidden).values() if hasattr(trainer, "hidden") else ()
    logged = [summary.history[name] for name in LOGGED if name in summary.history]
    totals = dataclasses.asdict(summary.totals)
    return {
        "counts": totals | {"iterations": [int(each.iterations.numpy()) for each in optimizers]},
        "loss_scale": summary.loss_scale,
        "digests": {
            "weights": digest(copies([*trainer.model.variables, *hidden])),
            "slots": digest(copies(slots)),
            "logged": digest(logged),
        },
    }


def main():
    """Runs the set-ups that the command line names."""
    out, *names = sys.argv[1:]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    in_workers = "TF_CONFIG" in os.environ
    if not in_workers:
        strategies.split_cpu(3)
    workers = strategies.create("multi_worker_mirrored") if in_workers else None
    for name in names:
        setup = SETUPS[name]
        strategy = workers or "default"
        if setup.replicas > 1:
            devices = [f"CPU:{index}" for index in range(setup.replicas)]
            strategy = strategies.create("mirrored", devices)
        keras.utils.set_random_seed(0)
        trainer = make(setup, strategy)
        summary = trainer.train(batches(setup.steep, setup.spoilt), steps=STEPS)
        index = f"-{workers.cluster_resolver.task_id}" if in_workers else ""
        found = json.dumps(results(trainer, summary))
        pathlib.Path(out, f"{name}{index}.json").write_text(found)


if __name__ == "__main__":
    main()
