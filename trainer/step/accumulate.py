"""Sums a step's results: over a replica's microbatches, which run in a loop, then over replicas."""

from typing import NamedTuple, TypeVar

import tensorflow as tf

import scaling
import strategies
from strategies.division import count_examples, cut_rows, known_examples, shapes_in, static_shape
from trainer.step.diagnose import NonfiniteTable, own_row
from trainer.step.losses import assert_shapes
from trainer.step.types import (
    Batch,
    Contribution,
    Differentiate,
    Microbatch,
    NonfiniteFlags,
    PassInputs,
    Rows,
    Values,
)

Tree = TypeVar("Tree")


def accumulate(differentiate: Differentiate, inputs: PassInputs) -> Microbatch:
    """Differentiates a replica's share, one microbatch at a time.

    The microbatches run in a loop in the graph, so only one set of activations is in memory. All
    forward passes start from the same values. So what they would assign, such as BatchNorm's
    statistics, moves once in a step, as it would without microbatches: to the mean over them.

    Args:
        differentiate: the compiled forward and backward pass over one microbatch.
        inputs: the inputs of the whole share. Their `keys` have shape (microbatches, generators,
            2); the share is cut into that many microbatches.

    Returns:
        The sums of contributions, flags and parts of means; the integers that the first microbatch
        would assign; the maxima of the values that replace variables; and the rows of the whole
        share.
    """
    num_microbatches = inputs.keys.shape[0]
    first = microbatch_inputs(inputs, 0)
    if num_microbatches == 1:
        return differentiate(first)

    # Trace the pass beforehand, to learn which gradients are None, which variables are written,
    # and the structure of the rows.
    expected = differentiate.get_concrete_function(first).structured_outputs
    parts = tf.nest.map_structure(
        lambda spec: tf.TensorArray(
            spec.dtype, num_microbatches, infer_shape=False, element_shape=any_rows(spec)
        ),
        expected.rows,
    )

    def body(
        index: tf.Tensor,
        total: tuple[Contribution, NonfiniteFlags],
        written: Values,
        replaced: Values,
        parts: Rows,
    ) -> tuple[tf.Tensor, tuple[Contribution, NonfiniteFlags], Values, Values, Rows]:
        now = microbatch_inputs(inputs, index)
        result = differentiate(now)
        rows = real_outputs(result.rows, now.share, "compute_loss")
        return (
            index + 1,
            tf.nest.map_structure(tf.add, total, (present(result.contribution), result.nonfinite)),
            sums_and_first(written, result.written, index),
            maxima(replaced, result.replaced, now.share),
            tf.nest.map_structure(lambda array, row: array.write(index, row), parts, rows),
        )

    start = (tf.constant(0), *nothing_yet(expected), parts)
    _, (contribution, nonfinite), written, replaced, parts = tf.while_loop(
        lambda index, *_: index < num_microbatches, body, start, parallel_iterations=1
    )
    rows = tf.nest.map_structure(
        lambda array, spec: tf.ensure_shape(array.concat(), any_rows(spec)), parts, expected.rows
    )
    contribution = with_missing(contribution, expected.contribution)
    return Microbatch(contribution, nonfinite, written, replaced, rows)


def nothing_yet(
    expected: Microbatch,
) -> tuple[tuple[Contribution, NonfiniteFlags], Values, Values]:
    """Returns the sums, the written and the replacing values before the first microbatch.

    Args:
        expected: the specs of a microbatch's results.
    """
    sums = (present(expected.contribution), expected.nonfinite)
    zeros = tf.nest.map_structure(zeros_like_spec, (sums, expected.written))
    return *zeros, {position: lowest(spec) for position, spec in expected.replaced.items()}


def microbatch_inputs(inputs: PassInputs, index: int | tf.Tensor) -> PassInputs:
    """Returns the inputs of one microbatch.

    Args:
        inputs: the inputs of the share; see `accumulate`.
        index: index of the microbatch.
    """
    share = strategies.take(inputs.share, index, inputs.keys.shape[0])
    return inputs._replace(share=share, keys=inputs.keys[index])


def sums_and_first(total: Values, new: Values, index: tf.Tensor) -> Values:
    """Returns the sums of parts of means, and the integers of the first microbatch."""
    return {
        position: total[position] + value
        if value.dtype.is_floating
        else tf.where(index == 0, value, total[position])
        for position, value in new.items()
    }


def maxima(highest: Values, new: Values, share: strategies.Share) -> Values:
    """Returns the element-wise maxima; the values of an empty share do not count."""
    return {
        position: tf.where(share.examples > 0, tf.maximum(before, new[position]), before)
        for position, before in highest.items()
    }


def lowest(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns the lowest finite number in the shape and dtype of a traced output."""
    return tf.fill(spec.shape, tf.constant(spec.dtype.min, spec.dtype))


def real_examples(share: strategies.Share, aux: Tree) -> tuple[Batch, Tree]:
    """Returns a replica's examples and their aux, without the placeholder row of an empty share."""
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1:  # nothing was divided
        return share.batch, aux
    return real_rows(share.batch, share), real_outputs(aux, share, "compute_loss")


def real_rows(tree: Tree, share: strategies.Share) -> Tree:
    """Cuts a share's tensors to its real examples: an empty share holds one placeholder row."""
    if tf.get_static_value(share.examples):  # known to be above 0: every row is real
        return tree
    return cut_rows(tree, 0, share.examples)


def real_outputs(outputs: Tree, share: strategies.Share, method: str) -> Tree:
    """Cuts what a method returned for a share to the real examples, as `real_rows` does.

    Args:
        outputs: tensors, in any structure.
        share: the share.
        method: name of the method, for errors.

    Raises:
        ValueError: if there is not a row per example.
        tf.errors.InvalidArgumentError: the same, when the graph runs.
    """
    examples, checks = known_examples(share.weights), []
    message = (
        f"`{method}` must return one row per example where batches are divided; got shapes "
        f"{shapes_in(outputs)} for {'the' if examples is None else examples} examples"
    )
    # The placeholder row may be there, or may have been cut from the parts already.
    held, real = tf.shape(share.weights)[0], share.examples
    for leaf in tf.nest.flatten(outputs):
        rows = known_examples(leaf)
        if static_shape(leaf).rank == 0 or (None not in (rows, examples) and rows != examples):
            raise ValueError(message)
        if None in (rows, examples):
            count = count_examples(leaf)
            checks += assert_shapes((count == held) | (count == real), [message])
    with tf.control_dependencies(checks):
        return real_rows(outputs, share)


def present(contribution: Contribution) -> Contribution:
    """Returns a contribution without gradients that are None, which graph loops cannot hold."""
    gradients = [gradient for gradient in contribution.gradients if gradient is not None]
    return contribution._replace(gradients=gradients)


def with_missing(contribution: Contribution, expected: Contribution) -> Contribution:
    """Puts None back where `present` left a gradient out.

    Args:
        contribution: what `present` returned.
        expected: a contribution whose gradients are None in the same places.
    """
    left = iter(contribution.gradients)
    gradients = [None if spec is None else next(left) for spec in expected.gradients]
    return contribution._replace(gradients=gradients)


def any_rows(spec: tf.TensorSpec) -> tf.TensorShape:
    """Returns a spec's shape with an unknown first dimension: microbatches may differ in size."""
    return tf.TensorShape([None, *spec.shape[1:]])


def zeros_like_spec(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns zeros with the shape and dtype of a traced output."""
    return tf.zeros(spec.shape, spec.dtype)


class Reduced(NamedTuple):
    """The sums over replicas, the same on every replica."""

    total: Contribution  # the sums; gradients are still scaled, and sparse ones are coalesced
    table: NonfiniteTable  # what was not finite on each replica
    written: Values  # what to assign if the step is applied


def sum_over_replicas(
    local: Microbatch,
    share: strategies.Share,
    reduce_dtype: str | None = None,
    bucket_bytes: int | None = None,
) -> Reduced:
    """Sums the contributions, and combines what the replicas' forward passes wrote.

    One all-reduce sums the contributions, the flags and the replicas' parts of means. With a
    `reduce_dtype` or buckets, the gradients have all-reduces of their own: the flags must stay in
    float32, and they depend on the whole backward pass, for which no bucket should wait. Whether a
    replica's gradients are finite is determined before the cast, so an overflow in the cast or in
    the sum counts as one of the reduction.

    Integers, such as counters, have no mean: every replica takes the value of the first replica,
    whose share is never empty. Of values that replace variables, such as a float8 layer's amax
    history, every replica takes the element-wise maximum.

    Args:
        local: results of this replica's whole share.
        share: the examples that these results were computed from.
        reduce_dtype: the dtype in which gradients are summed; None for their own.
        bucket_bytes: the size of a bucket of gradients; see `strategies.sum_gradients`.
    """
    context = tf.distribute.get_replica_context()
    parts = {
        position: value for position, value in local.written.items() if value.dtype.is_floating
    }
    row = own_row(local.nonfinite, context)
    own_values = {
        position: row_of_replica(tf.where(share.examples > 0, value, value.dtype.min), context)
        for position, value in local.replaced.items()
    }
    apart = reduce_dtype is not None or bucket_bytes is not None
    together = local.contribution._replace(gradients=[]) if apart else local.contribution
    total, table, means, tables = strategies.sum_gradients((together, row, parts, own_values))
    if apart:
        own = local.contribution.gradients
        gradients = strategies.sum_gradients(own, reduce_dtype, bucket_bytes)
        total = total._replace(gradients=gradients)
    # Coalesce again: rows from several replicas may share an index, and adding them may overflow.
    total = total._replace(gradients=[scaling.coalesce(gradient) for gradient in total.gradients])
    maxima = {position: tf.reduce_max(rows, axis=0) for position, rows in tables.items()}
    written = local.written | means | maxima
    found = strategies.capabilities(context.strategy)
    # Other strategies assign outside the replicas, so all copies get the first replica's value.
    if found.multi_worker or found.decides_in_replica:
        written |= integers_of_first(local.written, context)
    return Reduced(total, table, written)


def row_of_replica(value: tf.Tensor, context: tf.distribute.ReplicaContext) -> tf.Tensor:
    """Returns a table with a row for each replica: the value in this replica's row, else zeros."""
    replicas = tf.range(context.num_replicas_in_sync)
    mine = tf.reshape(replicas == context.replica_id_in_sync_group, [-1] + [1] * value.shape.rank)
    return tf.where(mine, value[None], tf.zeros_like(value)[None])


def integers_of_first(written: Values, context: tf.distribute.ReplicaContext) -> Values:
    """Returns the integers among the written values, as they are on the job's first replica.

    Integers are summed separately because they are kept on the host, while the other sums may be on
    accelerators. They are summed as int32 halves, which a TPU can add: an int64 travels as its
    upper and its lower 32 bits.
    """
    mine = {
        position: as_int32(value)
        for position, value in written.items()
        if not value.dtype.is_floating
    }
    if not mine:
        return {}
    # All in one tensor: `MirroredStrategy` refuses to sum several int32 tensors at once.
    flat = tf.concat([tf.reshape(number, [-1]) for number in mine.values()], axis=0)
    is_first = context.replica_id_in_sync_group == 0
    total = strategies.sum_gradients(tf.where(is_first, flat, 0))
    parts = tf.split(total, [number.shape.num_elements() for number in mine.values()])
    return {
        position: from_int32(tf.reshape(part, number.shape), written[position])
        for part, (position, number) in zip(parts, mine.items(), strict=True)
    }


def as_int32(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits of an integer or bool tensor as int32; 64 bits become two numbers.

    All replicas but one add 0, so the bits of the sum are those of that replica.
    """
    if value.dtype.size == 8:  # shape (..., 2)
        return tf.bitcast(value, tf.int32)
    return tf.cast(value, tf.int32)


def from_int32(number: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Reverses `as_int32`; `like` has the dtype to return."""
    if like.dtype.size == 8:
        return tf.bitcast(number, like.dtype)
    return tf.cast(number, like.dtype)
