"""`LossScaler`: a state in variables, for a loop of one's own."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import check_state
from scaling.base.number_formats import check_power_of_two
from scaling.base.verdict import Cause, Verdict, VerdictLike, as_verdict
from scaling.call_order import CallOrder, Token
from scaling.ops.gradients import scale_loss, unscale_gradients
from scaling.rules.rule import LossScaleRule, check_rule


class LossScaler(tf.Module):
    """Keeps a rule's state in variables, for a loop of one's own.

    Each step calls `scale`, `unscale` and `update`, in this order and in one function: the
    first two once for each loss, `update` once. Several optimizers share one scaler by
    sharing that one `update`. Calls out of order are errors that say which comes first;
    they are found while the function is traced, separately for each replica. A loop may
    hold the calls, or the first two of them; a branch may not.

    Make it inside the strategy's scope, where every replica gets a copy, and put it into the
    `tf.train.Checkpoint` beside model and optimizer; or keep `state_dict()`.

    Args:
        rule: a `DynamicLossScale`, any other rule of this room, or one of your own.

    Raises:
        TypeError: if it is no rule.

    Example:
        >>> import scaling
        >>> scaler = scaling.LossScaler(scaling.DynamicLossScale(initial_scale=4.0))
        >>> weight = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     scaled, token = scaler.scale(weight * weight)
        >>> [gradient] = scaler.unscale(tape.gradient(scaled, [weight]), token)
        >>> float(gradient)
        6.0
        >>> if scaler.update(scaling.all_finite(gradient)):
        ...     print(weight.assign_sub(gradient / 6).numpy(), float(scaler.loss_scale))
        2.0 4.0
    """

    def __init__(self, rule: LossScaleRule) -> None:
        """Makes one variable for each field of the rule's state."""
        check_rule(rule)
        super().__init__(name="loss_scaler")
        self.rule = rule
        self._order = CallOrder()
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

    def scale(self, loss: Any) -> tuple[tf.Tensor, Token]:
        """Multiplies a loss by the loss scale.

        Args:
            loss: any shape, any float dtype.

        Returns:
            The scaled loss, float32 (see `scale_loss`); and the token that `unscale` needs. It
            is good once, in the function and on the replica that made it.
        """
        token = self._order.opened(self.state)
        return scale_loss(loss, token.state), token

    def unscale(self, gradients: Any, token: Token) -> Any:
        """Divides gradients by the scale of their loss, which may have moved since.

        Args:
            gradients: any structure; see `unscale_gradients`.
            token: what `scale` returned with their loss.

        Returns:
            The same structure, float32.

        Raises:
            TypeError, ValueError: if it is no token, or used before, or not this scaler's, or
                from another graph or replica.
        """
        return unscale_gradients(gradients, self._order.closed(token))

    def update(self, verdict: VerdictLike) -> tf.Tensor:
        """Moves the scale after a step, and returns whether the step may be applied.

        Inside `strategy.run` the replicas agree first, in one all-reduce: the step counts as
        finite only if it was on every replica. Call it once per step, whether the update is
        applied or not; on several replicas outside any loop in the replica function, too.

        Args:
            verdict: this replica's: shape (), bool, or a `Verdict`.

        Returns:
            Shape (), bool: whether every gradient was finite on every replica.

        Raises:
            RuntimeError: if a scaled loss was not unscaled, or there was none; on several
                replicas, if the scaler was made outside the strategy's scope.
        """
        verdict = as_verdict(verdict)
        self._order.check_complete()
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            self._check_scope(context.strategy)
            verdict = agreed(verdict, context)
        self.assign(self.rule.advance(self.state, verdict))
        self._order.finished()
        return verdict.grads_finite

    def reset(self) -> None:
        """Forgets losses that were scaled and never unscaled, after a step that was given up.

        Only an exception caught in eager mode leaves any. The state stays as it is.
        """
        self._order.reset()

    def check_complete(self) -> None:
        """Raises RuntimeError if `update` would come too early; see there. Changes nothing."""
        self._order.check_complete()

    def _check_scope(self, strategy: tf.distribute.Strategy) -> None:
        """Refuses variables that all replicas share: each would move them once more."""
        for variable in self._variables.values():
            if not strategy.extended.variable_created_in_scope(variable):
                raise RuntimeError(
                    "`LossScaler` must be made inside the strategy's scope; got one made outside. "
                    "Its replicas would share one scale, and each move it. Make it within "
                    "`with strategy.scope():`."
                )

    def assign(self, state: Any) -> None:
        """Replaces the state, as the caller has computed it; the same on every replica.

        Raises:
            TypeError: if it is no state of the scaler's rule.
        """
        check_state(state, self._state_type)
        for field, value in state._asdict().items():
            self._variables[field].assign(value)

    def merge(self, before: Any, after: Any) -> None:
        """Takes over what a step has changed, where other workers change it, too, without waiting.

        A scale that has moved brings its whole state. Else what has grown by one is added, which
        no other's addition can undo, and what has changed otherwise is written. A step that used
        another scale than the one now in use has nothing to say of this one.

        Args:
            before: the state that the step used.
            after: what the rule has made of it.

        Raises:
            TypeError: if one is no state of the scaler's rule.

        Example:
            >>> import scaling
            >>> scaler = LossScaler(scaling.DynamicLossScale(initial_scale=8.0))
            >>> used = scaler.state
            >>> halved = scaler.rule.advance(used, False)
            >>> for worker in range(2):  # both have overflowed at 8
            ...     scaler.merge(used, halved)
            >>> float(scaler.loss_scale)
            4.0
        """
        check_state(before, self._state_type)
        check_state(after, self._state_type)
        in_use = self._variables["loss_scale"].read_value() == before.loss_scale
        moved = after.loss_scale != before.loss_scale
        for field, variable in self._variables.items():
            old, new = getattr(before, field), getattr(after, field)
            by_one = ~moved & (new == old + 1) & variable.dtype.is_integer
            changed = functools.partial(_add_or_write, variable, new, by_one)
            tf.cond(in_use & (moved | (new != old)), changed, lambda: False)

    def state_dict(self) -> dict[str, Any]:
        """Returns every field of the state as a Python number. Waits for the device.

        Example:
            >>> import scaling
            >>> scaler = LossScaler(scaling.DynamicLossScale())
            >>> scaler.state_dict()
            {'loss_scale': 32768.0, 'finite_steps': 0, 'overflows_left': 1}
        """
        return {field: value.numpy().item() for field, value in self.state._asdict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a state that `state_dict` returned, of a rule with the same fields.

        The constants may differ: what lies outside the new ones finds into them with the
        next step.

        Raises:
            ValueError: if a field is missing or one too many, or the scale is no power of two;
                nothing is changed then.
        """
        if set(state) != set(self._variables):
            raise ValueError(
                f"`state` must hold {', '.join(self._variables)}; got "
                f"{', '.join(state) or 'nothing'}. These are the fields that "
                f"{type(self.rule).__name__} remembers. Load it into a scaler of the rule that it "
                "was saved from."
            )
        check_power_of_two("loss_scale", state["loss_scale"])
        for field, variable in self._variables.items():
            variable.assign(tf.cast(state[field], variable.dtype))


def _add_or_write(variable: tf.Variable, new: tf.Tensor, by_one: tf.Tensor) -> tf.Tensor:
    """Adds 1 to a variable, or gives it a new value; returns True."""

    def add() -> bool:
        variable.assign_add(tf.ones_like(new))
        return True

    def write() -> bool:
        variable.assign(new)
        return True

    return tf.cond(by_one, add, write)


def update_together(scalers: Sequence[LossScaler], verdicts: Sequence[VerdictLike]) -> tf.Tensor:
    """Moves one scaler for each of several losses, under one joint verdict: the GAN case.

    Each scale follows its own loss; the step is applied for all of them or for none.

    Args:
        scalers: one for each loss.
        verdicts: each loss's own, in the same order; on several replicas, this replica's.

    Returns:
        Shape (), bool: whether all gradients of all losses were finite on every replica.

    Raises:
        TypeError: if `scalers` are none.
        ValueError: if there are not as many verdicts as scalers.
        RuntimeError: if a scaler's loss was not unscaled.

    Example:
        >>> import scaling
        >>> scalers = [LossScaler(scaling.DynamicLossScale(initial_scale=8.0)) for _ in "dg"]
        >>> for scaler in scalers:
        ...     scaled, token = scaler.scale(tf.constant(1.0))
        ...     _ = scaler.unscale(scaled, token)
        >>> bool(update_together(scalers, [False, True]))
        False
        >>> [float(scaler.loss_scale) for scaler in scalers]
        [4.0, 8.0]
    """
    is_list = isinstance(scalers, tuple | list) and scalers
    if not is_list or not all(isinstance(scaler, LossScaler) for scaler in scalers):
        raise TypeError(
            f"`scalers` must be a list of LossScalers; got {type(scalers).__name__}. Each loss has "
            "its own. Pass for instance [generator_scaler, discriminator_scaler]."
        )
    if len(scalers) != len(verdicts):
        raise ValueError(
            f"`verdicts` must hold one for each scaler; got {len(verdicts)} for {len(scalers)}. "
            "Each scale follows its own loss. Pass them in the order of the scalers."
        )
    for scaler in scalers:  # before the first moves
        scaler.check_complete()
    pairs = zip(scalers, verdicts, strict=True)
    return tf.reduce_all([scaler.update(verdict) for scaler, verdict in pairs])


def agreed(verdict: Verdict, context: tf.distribute.ReplicaContext) -> Verdict:
    """Returns the verdict of all replicas together, in one all-reduce.

    One veto is enough; of several causes the earliest place counts; magnitudes have their
    maximum. Each replica fills its own row of a table that is zero elsewhere, and the sum
    over replicas is everybody's table.
    """
    replicas = context.num_replicas_in_sync
    magnitude = 0.0 if verdict.max_magnitude is None else verdict.max_magnitude
    values = [
        tf.cast(~verdict.grads_finite, tf.float32),
        tf.cast(verdict.cause, tf.float32),
        tf.cast(magnitude, tf.float32),
    ]
    mine = tf.range(replicas)[:, None] == tf.cast(context.replica_id_in_sync_group, tf.int32)
    # `where` and not a product: 0 times the NaN of a bad replica would spoil every row.
    table = tf.where(mine, tf.stack(values)[None], 0.0)
    try:
        table = context.all_reduce(tf.distribute.ReduceOp.SUM, table)
    except RuntimeError as error:
        raise RuntimeError(
            "`update` must be called straight in the function that `strategy.run` runs, if there "
            "are several replicas; got called in a loop or an inner tf.function of it. There "
            "replicas cannot agree. Loop around `strategy.run` instead."
        ) from error
    bad, causes, magnitudes = tf.unstack(table, axis=1)
    first = tf.reduce_min(tf.where(bad > 0, causes, float(max(Cause))))
    return Verdict(
        grads_finite=tf.reduce_all(bad == 0.0),
        cause=tf.cast(first, tf.int32),
        max_magnitude=None if verdict.max_magnitude is None else tf.reduce_max(magnitudes),
    )
