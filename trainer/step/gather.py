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
from strategies.division import first_row
from trainer.base.argument_checks import as_returned_loss
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
        """Stores the arguments, and the replica that the loss is computed on."""
        self._share, self._size, self._model = share, size, model
        self._num_microbatches = num_microbatches
        context = tf.distribute.get_replica_context()
        self._replica = context.replica_id_in_sync_group if context else 0
        self._num_replicas = context.num_replicas_in_sync if context else 1
        self.missing = global_loss and self._num_replicas > 1  # until `all_gather` is called

    def rows_of_all(self, x: Any) -> tf.Tensor:
        """Returns the rows of all replicas; see `all_gather`."""
        self.missing = False
        if self._num_microbatches > 1:
            raise ValueError(
                "`num_microbatches` must be 1 for a loss that calls all_gather; got "
                f"{self._num_microbatches}"
            )
        if self._num_replicas == 1:
            return x
        x = with_rows(x, tf.shape(self._share.weights)[0], "replica")
        wide = WIDER.get(x.dtype, x.dtype)
        table = self._table(tf.cast(x, wide))
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
        x = with_rows(x, whole, "global batch")
        count = tf.shape(self._share.weights)[0] if rows is None else tf.constant(rows)
        # An empty share holds one row that does not count; it must lie within `x`.
        start = tf.minimum(first_row(whole, self._replica, self._num_replicas), whole - count)
        return tf.ensure_shape(x[start : start + count], [rows, *x.shape[1:]])


def with_rows(x: tf.Tensor, rows: tf.Tensor, of: str) -> tf.Tensor:
    """Returns a tensor; its number of rows is compared, when it is traced if it is known then.

    Args:
        x: the tensor. Two views of each example in one tensor would be put in another order.
        rows: the number that it must have: shape (), int32.
        of: what has as many examples, for the error.
    """
    message = f"`x` must have one row per example of this {of}; got shape {x.shape}"
    same = tf.debugging.assert_equal(tf.shape(x)[:1], rows[None], message)
    with tf.control_dependencies([same]):
        return tf.identity(x)


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
        ValueError: with microbatches, or for ragged and sparse tensors.
        tf.errors.InvalidArgumentError: if there is not one row per example.
        RuntimeError: on several replicas, outside of the loss of a training step or an evaluation,
            unless the loss is global, or inside a condition, a loop or a `tf.function`.

    Example:
        >>> all_gather(tf.constant([[1.0], [2.0]])).shape  # one device
        TensorShape([2, 1])
    """
    active = active_gathering("all_gather")
    return map_tensors(active.rows_of_all if active else None, x)


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
        tf.errors.InvalidArgumentError: if there is not one row per example of the global batch.
        RuntimeError: on several replicas, outside of the loss of a training step or an evaluation.

    Example:
        >>> own_rows(tf.range(3)).numpy()  # one device
        array([0, 1, 2], dtype=int32)
    """
    active = active_gathering("own_rows")
    return map_tensors(active.own_rows if active else None, x)


def active_gathering(name: str) -> Gathering | None:
    """Returns this thread's gathering; None on one device outside of a loss, which has all rows.

    Raises:
        RuntimeError: on several replicas, outside of the loss of a training step or an evaluation:
            the rows would be those of one replica.
    """
    context = tf.distribute.get_replica_context()
    if _ACTIVE.gathering is None and context is not None and context.num_replicas_in_sync > 1:
        raise RuntimeError(f"`{name}` must be called in compute_loss; got a call outside of it")
    return _ACTIVE.gathering


def map_tensors(function: Callable[[tf.Tensor], tf.Tensor] | None, structure: Tree) -> Tree:
    """Returns a structure of tensors, or of what a function returns for each; None stays None."""

    def mapped(leaf: Any) -> Any:
        tensor = None if leaf is None else tf.convert_to_tensor(leaf)
        return tensor if tensor is None or function is None else function(tensor)

    found: Tree = tf.nest.map_structure(mapped, structure)
    return found


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
    before = _ACTIVE.gathering
    mine = Gathering(share, size, model, global_loss=global_loss, num_microbatches=num_microbatches)
    _ACTIVE.gathering = mine
    try:
        yield
    finally:
        _ACTIVE.gathering = before
    if mine.missing:  # the result would be the mean of other losses
        raise ValueError(
            '`compute_loss` must call all_gather with reduction="global" on several replicas; got '
            "no call"
        )


def scalar_loss(loss: Any) -> tf.Tensor:
    """Returns a global loss: shape (), float32; raises TypeError or ValueError for another one."""
    loss = as_returned_loss(loss, "one number, or (number, aux)")
    if loss.shape.rank != 0:
        raise ValueError(
            f'`compute_loss` must return one number with reduction="global"; got shape {loss.shape}'
        )
    return loss


def part_of_mean(loss: tf.Tensor, share: strategies.Share, size: GlobalBatchSize) -> tf.Tensor:
    """Returns a replica's part of a step's global loss: shape (), float32.

    Args:
        loss: what the replica's `compute_loss` returned: shape (), float32.
        share: the replica's examples; an empty share has no part, even if its loss is NaN.
        size: the size of the global batch.
    """
    return tf.math.multiply_no_nan(loss, size.fraction(share))


LOSS_REDUCTIONS = ("mean", "global")


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
