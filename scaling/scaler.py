"""`LossScaler`: a rule with its state in variables, for custom training loops."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import shown
from scaling.base.number_formats import check_power_of_two
from scaling.base.traced_graphs import outermost_graph
from scaling.base.verdict import Cause, Verdict, VerdictLike, as_verdict
from scaling.ops.gradients import Structure, scale_loss, unscale_gradients
from scaling.rules.rule import LossScaleRule, RuleState, try_rule


class Token:
    """Connects one call of `LossScaler.scale` with the matching call of `unscale`.

    Attributes:
        state: the rule's state at the time of the call, with the scale that multiplied the loss.

    Example:
        >>> import scaling
        >>> _, token = scaling.LossScaler(scaling.FixedLossScale(8.0)).scale(tf.constant(1.0))
        >>> float(token.loss_scale)
        8.0
    """

    def __init__(self, state: RuleState) -> None:
        """Stores the state."""
        self.state = state

    @property
    def loss_scale(self) -> tf.Tensor:
        """Shape (), float32: the scale that multiplied the loss."""
        return self.state.loss_scale


class LossScaler(tf.Module):
    """Keeps a rule's state in variables, for a custom training loop.

    Each step calls `scale`, `unscale` and `update`, in this order and in one function:
    `scale` and `unscale` once for each loss, `update` once per step. Several optimizers can
    share one scaler if one `update` covers them all. A loss that was scaled and not unscaled is
    an error of `update`. It is found while the function is traced, for each replica, so it costs
    nothing when the function runs. Call `update` after skipped steps, too: not in the branch
    (`tf.cond`, or an `if` on a tensor) that applies the gradients.

    Create the scaler inside the strategy's scope, so that every replica gets a copy. To save
    it, add it to the `tf.train.Checkpoint` of the model and the optimizer, or save
    `state_dict()`. Keras's own files (`save_weights`, `.keras`) do not hold it, even if it is an
    attribute of the model.

    The optimizer must not scale losses itself, as Keras's `LossScaleOptimizer` does: it would
    divide the gradients once more.

    Args:
        rule: a `DynamicLossScale`, any other rule of this package, or your own rule.

    Raises:
        ValueError: if a scale of the rule is not a power of two.

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
        """Creates one variable for each field of the rule's state."""
        try_rule(rule)
        super().__init__(name="loss_scaler")
        self.rule = rule
        # What `scale` returned and `unscale` has not had: by graph (eager: the scaler) and replica.
        self._tokens: weakref.WeakKeyDictionary[Any, dict[int | None, set[Token]]] = (
            weakref.WeakKeyDictionary()
        )
        initial: RuleState = rule.initial_state()
        self._state_type = type(initial)
        self._dtypes = {
            field: tf.convert_to_tensor(value).dtype for field, value in initial._asdict().items()
        }
        # NONE: all replicas assign the same value to their own copies. Any other aggregation
        # would add a collective to the assignment.
        self._variables = {
            field: tf.Variable(
                self._stored(field, value),
                trainable=False,
                name=field,
                aggregation=tf.VariableAggregation.NONE,
            )
            for field, value in initial._asdict().items()
        }
        self._lock = lock_beside(self._variables["loss_scale"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies the rule and the state; the copy has variables of its own.

        Load it inside the scope of the strategy that will use it.

        Example:
            >>> import copy, scaling
            >>> scaler = LossScaler(scaling.DynamicLossScale(initial_scale=4.0))
            >>> float(copy.deepcopy(scaler).loss_scale)
            4.0
        """
        return _rebuilt, (type(self), self.rule, self.state_dict())

    @property
    def state(self) -> RuleState:
        """The rule's current state: its NamedTuple of tensors. Does not wait for the device."""
        values = {field: tf.convert_to_tensor(value) for field, value in self._variables.items()}
        return self._state_type(
            **{field: tf.cast(values[field], dtype) for field, dtype in self._dtypes.items()}
        )

    @property
    def loss_scale(self) -> tf.Tensor:
        """Shape (), float32: the current loss scale."""
        return self.state.loss_scale

    def scale(self, loss: tf.Tensor | float) -> tuple[tf.Tensor, Token]:
        """Multiplies a loss by the loss scale.

        Args:
            loss: any shape, any float dtype.

        Returns:
            The scaled loss, float32 (see `scale_loss`), and the token that `unscale` needs. A
            token can be used once, in the same function and on the same replica.
        """
        token = Token(self.state)
        self._pending().setdefault(replica_id(), set()).add(token)
        return scale_loss(loss, token.state), token

    def unscale(self, gradients: Structure, token: Token) -> Structure:
        """Divides gradients by the scale of their loss, even if the scale has moved since.

        Args:
            gradients: any structure; see `unscale_gradients`.
            token: the token that `scale` returned with the scaled loss.

        Returns:
            The same structure, float32.

        Raises:
            ValueError: if the token was used before, or is from another scaler, function or
                replica.
        """
        pending = self._pending().get(replica_id(), set())
        if token not in pending:
            raise ValueError(
                "`token` must be new, from this scaler and from the function that uses it; got "
                f"{shown(token)}"
            )
        pending.remove(token)
        return unscale_gradients(gradients, token.state)

    def update(self, verdict: VerdictLike) -> tf.Tensor:
        """Moves the scale after a step, and returns whether the step may be applied.

        Inside `strategy.run`, the replicas first agree in one all-reduce: the step is finite
        only if it was finite on every replica. Call `update` once per step, whether or not the
        step is applied. With several replicas, call it outside any loop in the replica function.

        Args:
            verdict: this replica's verdict: shape (), bool, or a `Verdict`.

        Returns:
            Shape (), bool: whether every gradient was finite on every replica.

        Raises:
            RuntimeError: if a scaled loss was not unscaled; with several replicas, if the scaler
                was created outside the strategy's scope.
        """
        finite, move = self._prepare_update(verdict)
        move()
        return finite

    def reset(self) -> None:
        """Forgets losses that were not unscaled, so that a step can begin after an abandoned one.

        This is needed only after an exception in eager mode. The rule's state does not change.
        """
        self._pending().clear()

    def _prepare_update(self, verdict: VerdictLike) -> tuple[tf.Tensor, Callable[[], None]]:
        """Does what `update` does, up to the point where the scale moves.

        Args:
            verdict: as for `update`.

        Returns:
            What `update` returns, and a function that moves the scale. All that may raise an error
            is done before, so that `update_together` moves all scales or none.

        Raises:
            RuntimeError: as for `update`.
        """
        verdict = as_verdict(verdict)
        own = replica_id()  # None: called outside of the replicas, for all of them
        places = self._pending().items()
        if any(tokens for place, tokens in places if own is None or place == own):
            raise RuntimeError(
                "`unscale` must be called for each `scale` before `update`; after an abandoned "
                "step, call `reset`"
            )
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            created_in_scope = context.strategy.extended.variable_created_in_scope
            # All replicas would share such variables, and each of them would update them.
            if not all(map(created_in_scope, self._variables.values())):
                raise RuntimeError("`LossScaler` must be created inside `strategy.scope()`")
            verdict = agree_on_verdict(verdict, context)
        values = self._values(self.rule.advance(self.state, verdict))

        def move() -> None:
            self._write(values)

        return verdict.grads_finite, move

    def _pending(self) -> dict[int | None, set[Token]]:
        """Returns the tokens without an `unscale` in what is being traced, by replica."""
        return self._tokens.setdefault(outermost_graph() or self, {})

    def assign(self, state: RuleState) -> None:
        """Replaces the state with one that the caller has computed, the same on every replica."""
        self._write(self._values(state))

    def merge(
        self, before: RuleState, after: RuleState, verdict: VerdictLike | None = None
    ) -> None:
        """Merges a step into a state that other workers may have changed meanwhile.

        A step that used a scale other than the current one is ignored. Given the step's verdict,
        the rule moves the state that is in use now, which counts the step at the scale that it
        used. Without, if the step moved the scale, the whole state is replaced; otherwise a counter
        that grew by one is incremented, and any other changed field is overwritten.

        If the scaler was created in the scope of a `tf.distribute.ParameterServerStrategy`, one
        worker at a time does this: reading and writing are one transaction.

        Args:
            before: the state that the step used.
            after: the state that the rule returned after the step.
            verdict: the verdict that led from `before` to `after`: shape (), bool, or a `Verdict`.
                None if it was not a single one.

        Example:
            >>> import scaling
            >>> scaler = LossScaler(scaling.DynamicLossScale(initial_scale=8.0))
            >>> used = scaler.state
            >>> halved = scaler.rule.advance(used, False)
            >>> for worker in range(2):  # both overflowed at 8
            ...     scaler.merge(used, halved, verdict=False)
            >>> float(scaler.loss_scale)
            4.0
        """
        told = None if verdict is None else as_verdict(verdict)

        def transaction() -> tf.Tensor:
            current = self.state
            if told is None:
                moved = merged(before, after, current)
            else:
                moved = self.rule.advance(current, told)
            in_use = current.loss_scale == before.loss_scale
            return tf.cond(in_use, lambda: self._assign_and_wait(moved), lambda: False)

        done = transaction() if self._lock is None else self._lock.execute(transaction)
        tf.group(done)

    def _assign_and_wait(self, state: RuleState) -> tf.Tensor:
        """Replaces the state; returns True once that is done, which ends the transaction."""
        with tf.control_dependencies(self._write(self._values(state))):
            return tf.constant(True)

    def _values(self, state: RuleState) -> dict[str, tf.Tensor]:
        """Returns the fields of a state as the variables hold them."""
        return {field: self._stored(field, value) for field, value in state._asdict().items()}

    def _write(self, values: Mapping[str, tf.Tensor]) -> list[Any]:
        """Assigns every field; returns the assignments."""
        return [self._variables[field].assign(value) for field, value in values.items()]

    def _stored(self, field: str, value: Any) -> tf.Tensor:
        """Returns the value of a field as its variable holds it: int32 as int64.

        TensorFlow keeps an int32 variable in the host's memory also where there is a GPU, and XLA's
        programs cannot reach it there.
        """
        tensor = tf.convert_to_tensor(value, self._dtypes[field])
        return tf.cast(tensor, tf.int64) if tensor.dtype == tf.int32 else tensor

    def state_dict(self) -> dict[str, Any]:
        """Returns every field of the state as a Python number, or a list. Waits for the device.

        Example:
            >>> import scaling
            >>> scaler = LossScaler(scaling.DynamicLossScale())
            >>> scaler.state_dict()
            {'loss_scale': 32768.0, 'finite_steps': 0, 'overflows_left': 1}
        """
        return {field: value.numpy().tolist() for field, value in self.state._asdict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state that `state_dict` returned, from a rule with the same fields.

        The rule's constants may differ. A scale outside the new bounds is clipped to them at
        the next step.

        Raises:
            ValueError: if the fields are not those of the rule's state, or the scale is not a power
                of two. Nothing is changed in this case.
        """
        if set(state) != set(self._variables):
            raise ValueError(
                f"`state` must have the fields {', '.join(self._variables)}; got {', '.join(state)}"
            )
        check_power_of_two("loss_scale", state["loss_scale"])
        values = {field: tf.constant(state[field], dtype) for field, dtype in self._dtypes.items()}
        self.assign(self._state_type(**values))


def _rebuilt(kind: type[LossScaler], rule: LossScaleRule, state: dict[str, Any]) -> LossScaler:
    """Returns a scaler that was pickled or copied."""
    scaler = kind(rule)
    scaler.load_state_dict(state)
    return scaler


def merged(before: RuleState, after: RuleState, current: RuleState) -> RuleState:
    """Returns the current state with the changes of a step that led from `before` to `after`."""
    moved = after.loss_scale != before.loss_scale

    def field(old: tf.Tensor, new: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        counted = tf.where(new == old + 1, now + 1, new) if new.dtype.is_integer else new
        return tf.where(moved, new, tf.where(new == old, now, counted))

    found: RuleState = tf.nest.map_structure(field, before, after, current)
    return found


def lock_beside(variable: tf.Variable) -> tf.CriticalSection | None:
    """Returns a lock on a variable's server, if several workers change it; otherwise None."""
    if not isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
        return None
    with tf.device(variable.device):
        return tf.CriticalSection(name="loss_scale")


def update_together(scalers: Sequence[LossScaler], verdicts: Sequence[VerdictLike]) -> tf.Tensor:
    """Updates the scalers of several losses, as in a GAN, and returns their joint verdict.

    Each scale follows its own loss. The step should be applied for all losses or for none.

    Args:
        scalers: one scaler per loss.
        verdicts: one verdict per loss, in the same order; with several replicas, this
            replica's verdicts.

    Returns:
        Shape (), bool: whether all gradients of all losses were finite on every replica.

    Raises:
        ValueError: if the numbers of scalers and verdicts differ, or a scaler occurs twice.
        RuntimeError: if the loss of a scaler was not unscaled.

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
    if len({id(scaler) for scaler in scalers}) < len(scalers):
        raise ValueError(
            "`scalers` must be different; for several losses of one, call its `update`"
        )
    verdicts = [as_verdict(verdict) for verdict in verdicts]
    pairs = zip(scalers, verdicts, strict=True)
    prepared = [each._prepare_update(verdict) for each, verdict in pairs]  # noqa: SLF001 - its own
    for _, move in prepared:
        move()
    return tf.reduce_all([finite for finite, _ in prepared])


def agree_on_verdict(verdict: Verdict, context: tf.distribute.ReplicaContext) -> Verdict:
    """Returns the joint verdict of all replicas, using one all-reduce.

    The joint verdict is finite only if every replica's is. Its cause is the earliest of the
    replicas' causes, and its magnitude the largest. Each replica fills its own row of a table
    that is zero elsewhere, so that the sum over replicas is the complete table.
    """
    replicas = context.num_replicas_in_sync
    magnitude = 0.0 if verdict.max_magnitude is None else verdict.max_magnitude
    values = [
        tf.cast(~verdict.grads_finite, tf.float32),
        tf.cast(verdict.cause, tf.float32),
        tf.cast(magnitude, tf.float32),
    ]
    own_row = tf.range(replicas)[:, None] == tf.cast(context.replica_id_in_sync_group, tf.int32)
    # Use `tf.where` and not a product: 0 times NaN would turn the other rows into NaN.
    table = tf.where(own_row, tf.stack(values)[None], 0.0)
    table = context.all_reduce(tf.distribute.ReduceOp.SUM, table)
    bad, causes, magnitudes = tf.unstack(table, axis=1)
    first = tf.reduce_min(tf.where(bad > 0, causes, float(max(Cause))))
    return Verdict(
        grads_finite=tf.reduce_all(bad == 0.0),
        cause=tf.cast(first, tf.int32),
        max_magnitude=None if verdict.max_magnitude is None else tf.reduce_max(magnitudes),
    )


def replica_id() -> int | None:
    """Returns the number of the calling replica.

    The result is None in cross-replica context, and on TPUs, where all replicas run one program.
    """
    context = tf.distribute.get_replica_context()
    number = context and tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)
