"""Runs a replica's microbatches one after the other, and sums their results."""

from typing import TypeVar

import tensorflow as tf

import strategies
from trainer.step.microbatch import (
    Contribution,
    Differentiate,
    Microbatch,
    NonfiniteFlags,
    PassInputs,
)
from trainer.step.types import Aux, Written

Tree = TypeVar("Tree")


def accumulate(differentiate: Differentiate, inputs: PassInputs) -> Microbatch:
    """Differentiates a replica's share, one microbatch at a time.

    The microbatches run in a loop in the graph, so only one set of activations is in memory. Each
    forward pass starts from the values that the previous one would have assigned. An empty
    microbatch leaves them unchanged.

    Args:
        differentiate: the compiled forward and backward pass over one microbatch.
        inputs: the inputs of the whole share. Their `keys` have shape (microbatches, generators,
            2); the share is cut into that many microbatches.

    Returns:
        The sums of contributions and flags, the values that the last microbatch would assign, and
        the aux of the whole share.
    """
    num_microbatches = inputs.keys.shape[0]
    first = microbatch_inputs(inputs, 0, inputs.values)
    if num_microbatches == 1:
        return differentiate(first)

    # Trace the pass beforehand, to learn which gradients are None, which variables are written,
    # and the structure of aux.
    expected = differentiate.get_concrete_function(first).structured_outputs
    aux_parts = tf.nest.map_structure(
        lambda spec: tf.TensorArray(
            spec.dtype, num_microbatches, infer_shape=False, element_shape=any_rows(spec)
        ),
        expected.aux,
    )

    def body(
        index: tf.Tensor, total: tuple[Contribution, NonfiniteFlags], written: Written, aux: Aux
    ) -> tuple[tf.Tensor, tuple[Contribution, NonfiniteFlags], Written, Aux]:
        values = with_written(inputs.values, written)
        now = microbatch_inputs(inputs, index, values)
        result = differentiate(now)
        rows = real_rows(result.aux, now.share)
        return (
            index + 1,
            tf.nest.map_structure(tf.add, total, (present(result.contribution), result.nonfinite)),
            unless_empty(now.share, result.written, values),
            tf.nest.map_structure(lambda array, row: array.write(index, row), aux, rows),
        )

    start = (
        tf.constant(0),
        tf.nest.map_structure(
            zeros_like_spec, (present(expected.contribution), expected.nonfinite)
        ),
        {position: inputs.values[int(position)] for position in expected.written},
        aux_parts,
    )
    _, (contribution, nonfinite), written, aux_parts = tf.while_loop(
        lambda index, *_: index < num_microbatches, body, start, parallel_iterations=1
    )
    aux = tf.nest.map_structure(
        lambda array, spec: tf.ensure_shape(array.concat(), any_rows(spec)), aux_parts, expected.aux
    )
    contribution = with_missing(contribution, expected.contribution)
    return Microbatch(contribution, nonfinite, written, aux)


def microbatch_inputs(
    inputs: PassInputs, index: int | tf.Tensor, values: list[tf.Tensor]
) -> PassInputs:
    """Returns the inputs of one microbatch.

    Args:
        inputs: the inputs of the share; see `accumulate`.
        index: index of the microbatch.
        values: values of the held-back variables after the previous microbatch.
    """
    return inputs._replace(
        share=strategies.take(inputs.share, index, inputs.keys.shape[0]),
        values=values,
        keys=inputs.keys[index],
    )


def with_written(values: list[tf.Tensor], written: Written) -> list[tf.Tensor]:
    """Returns the held-back values, updated with those that a forward pass wrote."""
    return [written.get(str(position), value) for position, value in enumerate(values)]


def unless_empty(share: strategies.Share, written: Written, before: list[tf.Tensor]) -> Written:
    """Returns the values that a forward pass wrote, or the previous ones if the share was empty."""
    return {
        position: tf.where(share.examples > 0, value, before[int(position)])
        for position, value in written.items()
    }


def real_rows(tree: Tree, share: strategies.Share) -> Tree:
    """Cuts a share's tensors to its real examples: an empty share holds one placeholder row."""
    if tf.get_static_value(share.examples):  # known to be above 0: every row is real
        return tree
    rows: Tree = tf.nest.map_structure(lambda tensor: tensor[: share.examples], tree)
    return rows


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
