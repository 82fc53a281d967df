"""A custom loss-scale rule, compared with `dynamic`.

    python examples/custom_rule.py
    python examples/custom_rule.py --growth_interval=5

A rule is a frozen value: `initial_state` returns the state at the start, and `advance` is a pure
function of the state before a step and the step's verdict. `dynamic` tries a larger scale again
and again, and each attempt that is too large costs a step. `Patient` doubles its waiting time
after every overflow.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import dataclasses
from typing import ClassVar, NamedTuple

import datasets
import keras
import tensorflow as tf
from absl import app, flags
from keras import layers

import scaling
from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
INTERVAL = flags.DEFINE_integer("growth_interval", 10, "Interval of both rules at the start.", 1)


class PatientState(NamedTuple):
    """The state of the rule; the first field must be `loss_scale`."""

    loss_scale: tf.Tensor  # shape=(), float32
    finite_steps: tf.Tensor  # shape=(), int32: consecutive finite steps
    interval: tf.Tensor  # shape=(), int32: finite steps before the scale grows


@dataclasses.dataclass(frozen=True)
class Patient:
    """Doubles the scale after `interval` finite steps. An overflow halves the scale and doubles
    `interval`.
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24

    needs_magnitude: ClassVar[bool] = False  # whether advance reads verdict.max_magnitude

    def initial_state(self):
        """Returns the state before the first step."""
        return PatientState(
            tf.constant(self.initial_scale), tf.constant(0), tf.constant(self.growth_interval)
        )

    def advance(self, state, verdict):
        """Returns the state after a step. It runs in a graph, so it uses `tf.where`, not `if`."""
        verdict = scaling.as_verdict(verdict)
        # A non-finite step that no smaller scale could prevent changes nothing.
        counted = state.finite_steps + tf.cast(verdict.grads_finite, tf.int32)
        grows = verdict.grads_finite & (counted >= state.interval)
        factor = tf.where(verdict.overflowed, 0.5, tf.where(grows, 2.0, 1.0))
        longest = tf.minimum(state.interval * 2, 2**30)
        return PatientState(
            tf.clip_by_value(state.loss_scale * factor, self.min_scale, self.max_scale),
            tf.where(grows | verdict.overflowed, 0, counted),
            tf.where(verdict.overflowed, longest, state.interval),
        )


def network():
    """Returns a perceptron."""
    hidden = layers.Dense(128, activation="relu")
    shape = keras.Input(datasets.SHAPES["digits"])
    return keras.Sequential([shape, layers.Flatten(), hidden, layers.Dense(datasets.CLASSES)])


def main(_):
    """Trains on the digits with each of the two rules."""
    data = datasets.load("digits")
    for rule in (scaling.DynamicLossScale, Patient):
        trainer = make_trainer(
            Trainer,
            model=network,
            optimizer=lambda: keras.optimizers.Adam(1e-3),
            loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
            loss_scale=rule(growth_interval=INTERVAL.value),
            model_dir=FLAGS.model_dir and f"{FLAGS.model_dir}/{rule.__name__}",
            verbose=False,
        )
        if results := run_mode(trainer, *data):  # some modes have none
            skipped = f"{trainer.totals.skipped} of {trainer.totals.attempted} steps skipped"
            print(f"{rule.__name__}: {skipped}, held-out accuracy {results['accuracy']:.2%}")


if __name__ == "__main__":
    define_flags(precision="mixed_float16", steps=600)
    app.run(main)
