"""The state of a run besides its model and optimizer: loss scale, seed, and counts of steps."""

import secrets

import numpy as np
import tensorflow as tf

import scaling
from trainer.step.plan import StepPlan
from trainer.step.report import Outcome


class TrainState(tf.Module):
    """The variables that belong to the run itself. Create it in the strategy's scope.

    Checkpoints include these variables. Steps are counted by cause, so that attempted = applied +
    skipped holds by construction: `outcomes[Cause.NONE]` is the number of applied steps. Retries
    are counted separately.
    """

    def __init__(self, rule: scaling.LossScaleRule, seed: int | None = None) -> None:
        """Creates the variables, at step 0 and with the rule's initial scale.

        Args:
            rule: the loss-scale rule.
            seed: the seed of all random numbers that steps draw, from 0 to 2^63 - 1; None chooses
                one at random.

        Raises:
            TypeError: if `rule` is not a loss-scale rule.
        """
        super().__init__(name="train_state")
        self.loss_scaler = scaling.LossScaler(rule)
        self.outcomes = counter("outcomes", len(scaling.Cause))
        chosen = secrets.randbits(62) if seed is None else seed
        self.random_seed = tf.Variable(chosen, trainable=False, dtype=tf.int64, name="random_seed")
        self.retries = counter("retries")
        self.float32_steps = counter("float32_steps")
        self.consecutive_skips = counter("consecutive_skips")
        # Whether the run must stop. The inner loop reads it before each step.
        self.halted = tf.Variable(initial_value=False, trainable=False, name="halted")
        self.predictions = 0  # calls of `predict`, which draw other numbers each; not saved

    @property
    def step(self) -> tf.Tensor:
        """Number of attempted steps: shape (), int64."""
        return tf.reduce_sum(self.outcomes)

    def due_in_float32(self, float32_after: int | None) -> tf.Tensor | None:
        """Returns whether the next step is computed in float32: shape (), bool.

        Args:
            float32_after: the number of consecutive skips after which steps are computed in
                float32; None for never.

        Returns:
            The flag, or None if `float32_after` is None.
        """
        return None if float32_after is None else self.consecutive_skips >= float32_after

    def count(
        self, outcome: Outcome, retries: tf.Tensor, in_float32: tf.Tensor | None, plan: StepPlan
    ) -> None:
        """Counts one step. Halts the run if the step's cause or the number of skips requires it.

        Call it in cross-replica context.

        Args:
            outcome: the outcome of the step's last attempt.
            retries: number of further attempts: shape (), int32.
            in_float32: whether the step was computed in float32: shape (), bool; None if
                float32 is never used.
            plan: the run's constants.
        """
        self.outcomes.assign_add(tf.one_hot(outcome.cause, len(scaling.Cause), dtype=tf.int64))
        if plan.skips.retries:
            self.retries.assign_add(tf.cast(retries, tf.int64))
        if in_float32 is not None:
            self.float32_steps.assign_add(tf.cast(in_float32, tf.int64))
        skips = tf.where(outcome.grads_finite, tf.constant(0, tf.int64), self.consecutive_skips + 1)
        self.consecutive_skips.assign(skips)
        fatal = tf.reduce_any([outcome.cause == int(cause) for cause in plan.skips.halting_causes])
        self.halted.assign(fatal | (skips >= plan.skips.max_skips))


def counter(name: str, *shape: int) -> tf.Variable:
    """Returns an int64 variable of zeros. Assign to it only in cross-replica context."""
    return tf.Variable(np.zeros(shape, np.int64), trainable=False, name=name)
