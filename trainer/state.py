"""What a run remembers beside its model and optimizer: how its steps ended, and the loss scale."""

import numpy as np
import tensorflow as tf

import scaling


class TrainState(tf.Module):
    """The run's own variables; made in the strategy's scope, kept in the checkpoint.

    Steps are counted by how they ended, so that attempted = applied + skipped holds by
    construction: `outcomes[Cause.NONE]` are the applied ones.
    """

    def __init__(self, rule: scaling.LossScaleRule) -> None:
        """Starts at step 0, at the rule's first scale."""
        super().__init__(name="train_state")
        self.loss_scaler = scaling.LossScaler(rule)
        self.outcomes = tf.Variable(
            np.zeros(len(scaling.Cause), np.int64), trainable=False, name="outcomes"
        )

    @property
    def step(self) -> tf.Tensor:
        """Attempted steps: shape (), int64."""
        return tf.reduce_sum(self.outcomes)

    def count(self, verdict: scaling.Verdict) -> None:
        """Counts one step. Call it in cross-replica context."""
        outcome = tf.one_hot(verdict.cause, len(scaling.Cause), dtype=tf.int64)
        self.outcomes.assign_add(outcome)
