"""`LossScaler`: a state in variables. The one file in this room in which anything changes."""

from typing import Any

import tensorflow as tf

from scaling.gradients import scale_loss, unscale_gradients
from scaling.rule import LossScaleRule
from scaling.verdict import Cause, Verdict, VerdictLike, as_verdict


class LossScaler(tf.Module):
    """Keeps a rule's state in variables, for a loop of one's own.

    Make it inside the strategy's scope, so that every replica has a copy, and put it into
    the `tf.train.Checkpoint` beside model and optimizer.

    Args:
        rule: a `DynamicLossScale`, `FixedLossScale`, `NoLossScale` or a rule of your own.

    Example:
        >>> import scaling
        >>> scaler = scaling.LossScaler(scaling.DynamicLossScale(initial_scale=4.0))
        >>> weight = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     scaled, token = scaler.scale(weight * weight)
        >>> [gradient] = scaler.unscale(tape.gradient(scaled, [weight]), token)
        >>> float(gradient)
        6.0
        >>> scaler.update(scaling.all_finite(gradient))
        >>> float(scaler.loss_scale)
        4.0
    """

    def __init__(self, rule: LossScaleRule) -> None:
        """Makes one variable for each field of the rule's state."""
        super().__init__(name="loss_scaler")
        self.rule = rule
        initial = rule.initial_state()
        self._state_type = type(initial)
        # NONE: each replica assigns its own copy, and all assign the same value. Any other
        # aggregation would put a collective into the assignment.
        self._variables = {
            field: tf.Variable(
                value, trainable=False, name=field, aggregation=tf.VariableAggregation.NONE
            )
            for field, value in initial._asdict().items()
        }

    @property
    def state(self) -> Any:
        """The rule's state now: its NamedTuple, of tensors. Does not wait for the device."""
        return self._state_type(
            **{field: tf.convert_to_tensor(value) for field, value in self._variables.items()}
        )

    @property
    def loss_scale(self) -> tf.Tensor:
        """The loss scale now: shape (), float32."""
        return self.state.loss_scale

    def scale(self, loss: Any) -> tuple[tf.Tensor, Any]:
        """Multiplies a loss by the loss scale.

        Returns:
            The scaled loss, and the token that `unscale` needs: this step's state.
        """
        token = self.state
        return scale_loss(loss, token), token

    def unscale(self, gradients: Any, token: Any) -> Any:
        """Divides gradients by the scale of their loss; see `unscale_gradients`."""
        return unscale_gradients(gradients, token)

    def update(self, verdict: VerdictLike) -> None:
        """Moves the scale after a step.

        Inside `strategy.run` the replicas agree first: the step counts as finite only if it
        was on every replica. Call it once per step, whether the update was applied or not,
        and outside any branch that a replica could take alone.

        Args:
            verdict: this replica's: a bool tensor, shape (), or a `Verdict`.
        """
        verdict = as_verdict(verdict)
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            verdict = _agreed(verdict, context)
        self.assign(self.rule.advance(self.state, verdict))

    def assign(self, state: Any) -> None:
        """Replaces the state, as the caller has computed it; the same on every replica."""
        for field, value in state._asdict().items():
            self._variables[field].assign(value)


def _agreed(verdict: Verdict, context: tf.distribute.ReplicaContext) -> Verdict:
    """Returns the verdict of all replicas together: one veto is enough, the worst cause counts."""
    bad = tf.cast(~verdict.grads_finite, tf.float32)
    incurable = tf.cast(~verdict.moves_scale, tf.float32)
    bad, incurable = context.all_reduce(tf.distribute.ReduceOp.SUM, [bad, incurable])
    return verdict._replace(
        grads_finite=tf.equal(bad, 0.0),
        cause=tf.where(incurable > 0, int(Cause.FORWARD), int(Cause.BACKWARD)),
    )
