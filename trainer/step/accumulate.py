"""Runs a replica's microbatches one after the other, and sums their results."""

from typing import TypeVar

import tensorflow as tf

import strategies
from strategies.division import count_examples, cut_rows, known_examples, shapes_in, static_shape
from trainer.step.losses import assert_shapes
from trainer.step.microbatch import (
    Contribution,
    Differentiate,
    Microbatch,
    NonfiniteFlags,
    PassInputs,
    Rows,
)
from trainer.step.types import Batch, Values

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
        rows = real_aux(result.rows, now.share)
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
    return real_rows(share.batch, share), real_aux(aux, share)


def real_rows(tree: Tree, share: strategies.Share) -> Tree:
    """Cuts a share's tensors to its real examples: an empty share holds one placeholder row."""
    if tf.get_static_value(share.examples):  # known to be above 0: every row is real
        return tree
    return cut_rows(tree, 0, share.examples)


def real_aux(aux: Tree, share: strategies.Share) -> Tree:
    """Cuts aux, and losses, to the real examples, as `real_rows` does.

    Raises:
        ValueError: if there is not a row per example.
        tf.errors.InvalidArgumentError: the same, when the graph runs.
    """
    examples = known_examples(share.weights)
    message = (
        "`compute_loss` must return aux with one row per example where batches are divided; got "
        f"shapes {shapes_in(aux)} for {'the' if examples is None else examples} examples"
    )
    for leaf in tf.nest.flatten(aux):
        rows = known_examples(leaf)
        if static_shape(leaf).rank == 0 or (None not in (rows, examples) and rows != examples):
            raise ValueError(message)
    if tf.get_static_value(share.examples):
        return aux
    # The placeholder row may be there, or may have been cut from the parts already.
    held, real = tf.shape(share.weights)[0], share.examples
    counts = map(count_examples, tf.nest.flatten(aux))
    checks = [assert_shapes((count == held) | (count == real), [message]) for count in counts]
    with tf.control_dependencies([check for pair in checks for check in pair]):
        return real_rows(aux, share)


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
