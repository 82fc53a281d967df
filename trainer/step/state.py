"""What a run remembers beside its model and optimizer: the loss scale, and how its steps ended."""

import secrets
from typing import Any

import numpy as np
import tensorflow as tf

import scaling
from trainer.base.argument_checks import check_seed
from trainer.step.plan import StepPlan
from trainer.step.report import Outcome


class TrainState(tf.Module):
    """The run's own variables; made in the strategy's scope, kept in the checkpoint.

    Steps are counted by how they ended, so that attempted = applied + skipped holds by
    construction: `outcomes[Cause.NONE]` are the applied ones. Retries are counted apart.
    """

    def __init__(self, rule: scaling.LossScaleRule, seed: int | None = None) -> None:
        """Starts at step 0, at the rule's first scale.

        Args:
            rule: the loss-scale rule.
            seed: of all random numbers that steps draw, from 0 to 2^63 - 1; None takes one by
                chance.

        Raises:
            TypeError, ValueError: if one of them is something else.
        """
        check_seed(seed, bits=63, why="It is kept as an int64.")
        super().__init__(name="train_state")
        self.loss_scaler = scaling.LossScaler(rule)
        self.outcomes = counter("outcomes", len(scaling.Cause))
        chosen = secrets.randbits(62) if seed is None else seed
        self.random_seed = tf.Variable(chosen, trainable=False, dtype=tf.int64, name="random_seed")
        self.retries = counter("retries")
        self.float32_steps = counter("float32_steps")
        self.consecutive_skips = counter("consecutive_skips")
        # Whether a run must not go on. The inner loop asks before each step.
        self.halted = tf.Variable(initial_value=False, trainable=False, name="halted")

    @property
    def step(self) -> tf.Tensor:
        """Attempted steps: shape (), int64."""
        return tf.reduce_sum(self.outcomes)

    def due_in_float32(self, float32_after: int | None) -> tf.Tensor | None:
        """Returns whether so many steps were skipped in a row that the next is in float32."""
        return None if float32_after is None else self.consecutive_skips >= float32_after

    def count(
        self, outcome: Outcome, retries: Any, in_float32: tf.Tensor | None, plan: StepPlan
    ) -> None:
        """Counts one step, and halts the run if it was one too many. In cross-replica context."""
        self.outcomes.assign_add(tf.one_hot(outcome.cause, len(scaling.Cause), dtype=tf.int64))
        if plan.max_retries:
            self.retries.assign_add(tf.cast(retries, tf.int64))
        if in_float32 is not None:
            self.float32_steps.assign_add(tf.cast(in_float32, tf.int64))
        skips = tf.where(outcome.grads_finite, tf.constant(0, tf.int64), self.consecutive_skips + 1)
        self.consecutive_skips.assign(skips)
        fatal = tf.reduce_any([outcome.cause == int(cause) for cause in plan.halting_causes])
        self.halted.assign(fatal | (skips >= plan.max_skips))


def counter(name: str, *shape: int) -> tf.Variable:
    """Returns a variable of int64 zeros that only cross-replica context assigns."""
    return tf.Variable(np.zeros(shape, np.int64), trainable=False, name=name)
