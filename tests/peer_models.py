"""Models whose gradients a test chooses, for the cases of other libraries' test suites."""

import functools

import keras
import numpy as np
import tensorflow as tf

import scaling
from trainer.step import TrainState, attempt_step, plan_step


def constant(value, shape, dtype):
    """An initializer that returns a given value."""
    del shape
    return tf.constant(value, dtype)


class Given(keras.Model):
    """Weights with given initial values. The output is their inner product with the inputs, so that
    the inputs are the gradients.
    """

    def __init__(self, *values, constraint=None):
        """Creates one variable for each value."""
        super().__init__()
        self.given = [
            self.add_weight(
                shape=np.shape(value),
                initializer=functools.partial(constant, value),
                constraint=constraint,
                name=f"given_{index}",
            )
            for index, value in enumerate(values)
        ]
        self.built = True

    def call(self, inputs):
        """Takes one tensor for each variable, with a leading axis; returns one number per row."""
        return sum(
            zero_with_gradient(weight, each)
            if getattr(weight, "overwrite_with_gradient", False)
            else tf.reduce_sum(tf.reshape(weight * each, [tf.shape(each)[0], -1]), axis=1)
            for weight, each in zip(self.given, inputs, strict=True)
        )


def zero_with_gradient(weight, values):
    """Returns 0 for each row. The weight's gradient is the largest row, whatever the loss: a new value
    and no derivative, as layers in float8 have them.
    """

    @tf.custom_gradient
    def zero(weight):
        del weight
        rows = tf.shape(values)[0]
        return tf.zeros([rows]), lambda upstream: tf.reduce_max(values, axis=0)  # noqa: ARG005

    return zero(tf.convert_to_tensor(weight))


@tf.custom_gradient
def multiply_gradient(values, factor):
    """Returns the values; their gradients are multiplied by the factor."""
    return tf.identity(values), lambda upstream: (upstream * factor, None)


class Stepper:
    """Takes steps whose gradients a test chooses.

    Args:
        *values: the initial values of the weights.
        optimizer: the Keras optimizer, or a function that returns one.
        strategy: where the step runs.
        rule: the loss-scale rule.
        constraint: of all weights.
        overwritten: the positions of weights with `overwrite_with_gradient`.
        **arguments: more arguments of `plan_step`.
    """

    def __init__(
        self,
        *values,
        optimizer,
        strategy=None,
        rule=None,
        constraint=None,
        overwritten=(),
        **arguments,
    ):
        """Builds the model and the plan."""
        rule = rule or scaling.NoLossScale()
        self.strategy = strategy or tf.distribute.get_strategy()
        self.replicas = self.strategy.num_replicas_in_sync
        with self.strategy.scope():
            self.model = Given(*values, constraint=constraint)
            for position in overwritten:
                self.model.given[position].overwrite_with_gradient = True
            self.run = TrainState(rule)
            self.optimizer = optimizer() if callable(optimizer) else optimizer
            self.plan = plan_step(
                strategy=self.strategy,
                model=self.model,
                optimizer=self.optimizer,
                rule=rule,
                compute_loss=self.compute_loss,
                **arguments,
            )
        # Eager steps cost less than a trace in most cases; replicas need a graph.
        self._step = tf.function(self._attempt) if self.replicas > 1 else self._attempt

    def compute_loss(self, batch, training):
        """The model's output. Its gradient is multiplied by `backward`."""
        del training
        gradients, backward = batch
        return multiply_gradient(self.model(gradients), backward)

    def _attempt(self, batch):
        return attempt_step(batch, self.plan, self.run)

    def step(self, *gradients, backward=1.0):
        """Attempts one step in which every replica has one example.

        Args:
            *gradients: of the mean loss, one for each weight.
            backward: a factor in the backward pass, or one for each replica.

        Returns:
            The report.
        """
        rows = [np.stack([np.float32(each)] * self.replicas) for each in gradients]
        factors = np.broadcast_to(np.float32(backward), [self.replicas])
        return self._step((tuple(map(tf.constant, rows)), tf.constant(factors)))

    @property
    def weights(self):
        """The values of all weights, in a list."""
        return [weight.numpy() for weight in self.model.given]

    @property
    def weight(self):
        """The value of the only weight."""
        [value] = self.weights
        return value

    @property
    def loss_scale(self):
        """The current loss scale."""
        return float(self.run.loss_scaler.loss_scale)
