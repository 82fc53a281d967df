"""`all_gather`: the rows of the whole global batch, inside a loss that couples its examples.

A replica computes on its own share of a batch. A contrastive loss compares each example with all
others, so it needs what the other replicas computed for theirs. `all_gather` returns the rows of
all replicas, in the order of the batch, and the gradient flows back to the replica that computed
each row.

What makes the gradients exact is who owns which factor. A step with `reduction="global"`
minimizes one number: the mean over replicas of the scalars that their `compute_loss` returned,
each weighted by the replica's fraction of the batch's examples. The fractions add up to 1, so the
mean of equal scalars is that scalar. The gradient of `all_gather` is its exact transpose: the sum
of what arrives on all replicas, cut to the replica's own rows. So the sum of the replicas'
gradients is the gradient of that one number, whether the scalar depends on a weight through
gathered rows (the sum of all fractions of a row's gradient reaches the replica that computed it) or
directly, as on a learned temperature (each replica adds its fraction).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

import strategies
from scaling.base.argument_checks import shown
from strategies.division import first_row
from trainer.base.argument_checks import as_returned_loss, check_choice
from trainer.keras_compat import added_losses_kept
from trainer.step.types import GlobalBatchSize, Microbatch, Model, PassInputs

Tree = TypeVar("Tree")

# The dtypes in which replicas are summed. Half precision is summed in float32, because the gradient
# of a gathered row is a sum over replicas; small integers and bool are summed as int32.
WIDER = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
}
SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)


class RowsError(ValueError):
    """What was gathered does not have one row per example."""


class Gathering:
    """What `all_gather` needs to know while one replica computes the loss of its share.

    Args:
        share: the replica's examples.
        size: the size of the global batch.
        model: the model.
        global_loss: whether the loss is a scalar of the global batch.
        num_microbatches: number of parts that each replica's share is cut into.
    """

    def __init__(
        self,
        share: strategies.Share,
        size: GlobalBatchSize,
        model: Model,
        *,
        global_loss: bool,
        num_microbatches: int,
    ) -> None:
        """Stores the arguments, and the replica and the graph that the loss is computed in."""
        self._share, self._size, self._model = share, size, model
        self._global_loss, self._num_microbatches = global_loss, num_microbatches
        context = tf.distribute.get_replica_context()
        self._replica = context.replica_id_in_sync_group if context else 0
        self._num_replicas = context.num_replicas_in_sync if context else 1
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.called = False

    def rows_of_all(self, x: Any) -> tf.Tensor:
        """Returns the rows of all replicas; see `all_gather`."""
        self.called = True
        self._check_allowed()
        x = check_numbers(as_rows(x))
        if self._num_replicas == 1:
            return x
        self._check_one_shape()
        wide = WIDER.get(x.dtype, x.dtype)
        table = self._table(tf.cast(self._rows_checked(x), wide))
        with added_losses_kept(self._model):  # other replicas' calls of the model come in between
            total = strategies.sum_gradients(table)
        rows = tf.get_static_value(self._size.examples)
        total = tf.ensure_shape(total, [None if rows is None else int(rows), *x.shape[1:]])
        return tf.cast(total, x.dtype)

    def _table(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a row for each example of the global batch: this replica's, and zeros."""
        examples, whole = self._share.examples, self._size.examples
        start = first_row(whole, self._replica, self._num_replicas)
        around = [[start, whole - start - examples]] + [[0, 0]] * (x.shape.rank - 1)
        return tf.pad(x[:examples], around)  # an empty share holds one row that does not count

    def own_rows(self, x: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of what was gathered; see `own_rows`."""
        if self._num_replicas == 1:
            return x
        whole, rows = self._size.examples, self._share.weights.shape[0]
        message = (
            "`x` must have one row per example of the global batch, as all_gather returns; got "
            f"shape {x.shape}. The rows of this replica are cut out of it. Pass what "
            "all_gather returned, or what was computed from it with the same first dimension."
        )
        known = tf.get_static_value(whole)
        if x.shape.rank == 0 or (known is not None and x.shape[0] not in (None, int(known))):
            raise RowsError(message)
        count = tf.shape(self._share.weights)[0] if rows is None else tf.constant(rows)
        # An empty share holds one row that does not count; it must lie within `x`.
        start = tf.minimum(first_row(whole, self._replica, self._num_replicas), whole - count)
        same = tf.debugging.Assert(tf.shape(x)[0] == whole, [message])
        with tf.control_dependencies([same]):
            return tf.ensure_shape(x[start : start + count], [rows, *x.shape[1:]])

    def _rows_checked(self, x: tf.Tensor) -> tf.Tensor:
        """Returns `x`; raises unless it has one row per example of this replica's share."""
        rows = self._share.weights.shape[0]
        message = (
            "`x` must have one row per example of this replica, in the order of the batch; got "
            f"shape {x.shape} for {'its' if rows is None else rows} examples. The rows of all "
            "replicas are put together in the order of the global batch. Gather each view of the "
            "examples by itself, or make the views a second dimension."
        )
        if x.shape.rank == 0 or (rows is not None and x.shape[0] not in (None, rows)):
            raise RowsError(message)
        if None not in (rows, x.shape[0]):
            return x
        same = tf.shape(x)[0] == tf.shape(self._share.weights)[0]
        with tf.control_dependencies([tf.debugging.Assert(same, [message])]):
            return tf.identity(x)

    def _check_allowed(self) -> None:
        """Raises ValueError where rows cannot be gathered."""
        if self._num_microbatches > 1:
            raise ValueError(
                "`num_microbatches` must be 1 for a loss that calls all_gather; got "
                f"{self._num_microbatches}. Microbatches are computed one after the other, and "
                "each one's rows are gone before the next ones are known. Use more replicas, or "
                "save memory by keras.RematScope."
            )
        if self._num_replicas == 1:
            return
        if not self._global_loss:
            raise ValueError(
                '`reduction` must be "global" for a loss that calls all_gather on several '
                f"replicas; got 'mean' and {self._num_replicas} replicas. Rows can be exchanged "
                'only in a step that is built for it. Pass reduction="global" and return '
                "one number, such as the mean of the losses."
            )
        now = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if now is not self._graph:
            raise ValueError(
                "`all_gather` must be called in compute_loss itself; got a call inside "
                "tf.cond, tf.while_loop, tf.map_fn or a tf.function. Replicas that take different "
                "branches would wait for each other without end. Gather before the condition or "
                "the loop."
            )

    def _check_one_shape(self) -> None:
        """Raises ValueError if batches may differ in size, and replicas exchange one shape only."""
        strategy = tf.distribute.get_strategy()
        known = tf.get_static_value(self._size.examples) is not None
        if known or not strategies.capabilities(strategy).one_shape:
            return
        raise ValueError(
            "`all_gather` must be called with batches of one size, known when the step is traced, "
            f"under {type(strategy).__name__}; got batches of any size. Replicas exchange tensors "
            "of one shape only there, so that a smaller last batch would end the run. Use "
            "Dataset.batch(..., drop_remainder=True), or arrays of a multiple of global_batch "
            "examples, for training and for evaluation."
        )


class _Active(threading.local):
    """The gathering of the replica that this thread computes; replicas run in threads."""

    gathering: Gathering | None = None


_ACTIVE = _Active()


def all_gather(x: Tree) -> Tree:
    """Returns the rows of the whole global batch, inside `compute_loss`.

    On one replica these are the rows of `x`. On several replicas, each passes the rows of its own
    examples, and all get the rows of all of them, in the order of the global batch: the rows that
    one device would have. The gradient is that of one device, too: see
    `reduction="global"` in `Trainer`. It costs an all-reduce of the gathered rows, and another
    one in the backward pass if a gradient flows through them.

    Call it with the same shapes and in the same order on every replica, and not inside `tf.cond`, a
    loop or a `tf.function`. A batch that does not divide evenly is fine, and so is a replica
    without examples.

    Args:
        x: a tensor, or a structure of tensors: shape (examples, ...), one row per example of this
            replica; numbers or bool. None stays None.

    Returns:
        The same structure and dtypes: shape (global_batch, ...).

    Raises:
        ValueError: with microbatches; on several replicas unless the loss is global; inside a
            condition, a loop or a `tf.function`; or if there is not one row per example.
        TypeError: for strings, and for ragged and sparse tensors.
        RuntimeError: on several replicas, outside of the loss of a training step or an evaluation.

    Example:
        >>> all_gather(tf.constant([[1.0], [2.0]])).shape  # one device
        TensorShape([2, 1])
    """
    gathering = _ACTIVE.gathering
    if gathering is not None:
        rows: Tree = tf.nest.map_structure(
            lambda leaf: None if leaf is None else gathering.rows_of_all(leaf), x
        )
        return rows
    context = tf.distribute.get_replica_context()
    if context is not None and context.num_replicas_in_sync > 1:
        raise RuntimeError(
            "`all_gather` was called in a replica, outside of the loss of a training step or an "
            "evaluation. How many examples the other replicas have is known only there. Call it "
            "in compute_loss, or use tf.distribute.get_replica_context().all_gather()."
        )
    same: Tree = tf.nest.map_structure(
        lambda leaf: None if leaf is None else check_numbers(as_rows(leaf)), x
    )
    return same


def own_rows(x: Tree) -> Tree:
    """Returns this replica's rows of what `all_gather` returned, inside `compute_loss`.

    It is the inverse of `all_gather`. A loss that compares a replica's own examples with all
    gathered ones finds their positions by `own_rows(tf.range(global_batch))`, and metrics that
    compare all examples get their own rows of a gathered table, as aux must have. On one replica,
    all rows are its own.

    Args:
        x: a tensor, or a structure of tensors: shape (global_batch, ...). None stays None.

    Returns:
        The same structure and dtypes: shape (examples, ...).

    Raises:
        ValueError: if there is not one row per example of the global batch.
        TypeError: for ragged and sparse tensors.
        RuntimeError: on several replicas, outside of the loss of a training step or an evaluation.

    Example:
        >>> own_rows(tf.range(3)).numpy()  # one device
        array([0, 1, 2], dtype=int32)
    """
    gathering = _ACTIVE.gathering
    context = tf.distribute.get_replica_context()
    if gathering is None and context is not None and context.num_replicas_in_sync > 1:
        raise RuntimeError(
            "`own_rows` was called in a replica, outside of the loss of a training step or an "
            "evaluation. Which rows of the batch are this replica's is known only there. Call it "
            "in compute_loss."
        )

    def cut(leaf: Any) -> Any:
        if leaf is None:
            return None
        leaf = as_rows(leaf)
        return leaf if gathering is None else gathering.own_rows(leaf)

    rows: Tree = tf.nest.map_structure(cut, x)
    return rows


def check_dense(x: Any) -> None:
    """Raises TypeError for ragged and sparse tensors."""
    if isinstance(x, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"`x` must be a dense tensor; got a {type(x).__name__}. Rows of different sizes cannot "
            "be put into one table. Gather x.to_tensor(), padded to the same shape everywhere."
        )


def as_rows(x: Any) -> tf.Tensor:
    """Returns a leaf as a tensor; raises TypeError or ValueError unless it has rows."""
    check_dense(x)
    tensor = tf.convert_to_tensor(x)
    if tensor.shape.rank == 0:
        raise ValueError(
            f"`x` must have one row per example; got {tensor.dtype.name} of shape (). The first "
            "dimension is the example. Pass x[None] for a single row."
        )
    return tensor


def check_numbers(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor of numbers or bool; raises TypeError for another one."""
    if WIDER.get(x.dtype, x.dtype) not in SUMMED:
        raise TypeError(
            f"`x` must be numbers or bool; got {x.dtype.name}. Replicas exchange rows by adding "
            "them to zeros. Gather numbers, such as ids or labels."
        )
    return x


@contextlib.contextmanager
def gathering(
    share: strategies.Share,
    size: GlobalBatchSize,
    model: Model,
    *,
    global_loss: bool,
    num_microbatches: int = 1,
) -> Iterator[None]:
    """Context manager: `all_gather` gathers, for the loss of one replica's share.

    For the arguments see `Gathering`.

    Raises:
        ValueError: if a global loss on several replicas did not call `all_gather`.
    """
    before, _ACTIVE.gathering = (
        _ACTIVE.gathering,
        Gathering(share, size, model, global_loss=global_loss, num_microbatches=num_microbatches),
    )
    mine = _ACTIVE.gathering
    try:
        yield
    finally:
        _ACTIVE.gathering = before
    context = tf.distribute.get_replica_context()
    if global_loss and not mine.called and context and context.num_replicas_in_sync > 1:
        raise ValueError(
            '`compute_loss` must call all_gather with reduction="global" on several replicas; '
            f"got none on {context.num_replicas_in_sync} replicas. Each replica sees only its "
            "share of the batch, so the result would be the mean of other losses. Compute the loss "
            'from self.all_gather(x), or pass reduction="mean" and return one loss per '
            "example."
        )


def scalar_loss(loss: Any) -> tf.Tensor:
    """Returns a global loss: shape (), float32; raises TypeError or ValueError for another one."""
    loss = as_returned_loss(loss, "one number, or (number, aux)")
    if loss.shape.rank != 0:
        raise ValueError(
            '`compute_loss` must return one number with reduction="global", shape (); got '
            f"shape {loss.shape}. The trainer does not know how the losses of a batch combine. "
            'Return for example their mean, or pass reduction="mean".'
        )
    return loss


def part_of_mean(loss: tf.Tensor, share: strategies.Share, size: GlobalBatchSize) -> tf.Tensor:
    """Returns a replica's part of a step's global loss: shape (), float32.

    Args:
        loss: what the replica's `compute_loss` returned: shape (), float32.
        share: the replica's examples; an empty share has no part, even if its loss is NaN.
        size: the size of the global batch.
    """
    fraction = tf.cast(share.examples, tf.float32) / tf.cast(size.examples, tf.float32)
    return tf.math.multiply_no_nan(loss, fraction)


LOSS_REDUCTIONS = ("mean", "global")
GLOBAL = 'with reduction="global"'


def check_loss_reduction(reduction: object, num_microbatches: int) -> None:
    """Raises ValueError for an unknown reduction, or a global loss of microbatches."""
    check_choice("reduction", reduction, LOSS_REDUCTIONS)
    if reduction == "global" and num_microbatches > 1:
        raise ValueError(
            f"`num_microbatches` must be 1 {GLOBAL}; got {num_microbatches}. Microbatches are "
            "computed one after the other, so none of them sees the whole batch that the loss "
            "compares. Use more replicas, a smaller batch, or keras.RematScope to save memory."
        )


def check_no_weights(example_weights: object) -> None:
    """Raises ValueError if weights are given that a global loss would ignore."""
    if example_weights is not None:
        raise ValueError(
            f"`example_weights` must not be given {GLOBAL}; got a function. The loss is one "
            "number, so there is nothing that the trainer could weight. Weight the examples "
            "inside compute_loss, with self.all_gather(weights)."
        )


def check_gathers(
    strategy: tf.distribute.Strategy, jit_compile: bool | str, float32_after: int | None
) -> None:
    """Raises ValueError if replicas cannot exchange rows inside the step.

    Args:
        strategy: a strategy with several replicas.
        jit_compile: the compile mode.
        float32_after: see `plan_step`.
    """
    several = f"{GLOBAL} on several replicas"
    found = strategies.capabilities(strategy)
    if found.decides_in_replica or found.asynchronous:
        raise ValueError(
            f"`strategy` must be mirrored or multi_worker_mirrored {several}; got "
            f"{type(strategy).__name__}. Replicas exchange rows in the middle of a step, which "
            "was not tried there. Use another strategy, or a single replica."
        )
    if jit_compile is not False:
        raise ValueError(
            f"`jit_compile` must be False {several}; got {shown(jit_compile)}. XLA cannot compile "
            "a pass in the middle of which replicas exchange rows. Leave out jit_compile=."
        )
    if float32_after is not None:
        raise ValueError(
            f'`on_stuck` must not be "float32" {several}; got "float32". Replicas cannot exchange '
            'rows under a condition, here that of a step in float32. Use "raise" or "hold".'
        )


class Inlined:
    """A forward and backward pass that is traced as a part of the replica's own program.

    Replicas can exchange rows there, and not inside a `tf.function` that the program calls.
    See `microbatch.Differentiate`.

    Args:
        differentiate: the pass.
    """

    def __init__(self, differentiate: Callable[[PassInputs], Microbatch]) -> None:
        """Stores the pass."""
        self.python_function = differentiate

    def __call__(self, inputs: PassInputs) -> Microbatch:
        """Runs the pass."""
        return self.python_function(inputs)

    def get_concrete_function(self, inputs: PassInputs) -> object:
        """Traces the pass by itself, on one device, to learn what it returns."""
        function = tf.function(self.python_function, autograph=False)
        return function.get_concrete_function(inputs)
