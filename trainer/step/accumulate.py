"""One replica's share of a step: its microbatches in turn, what they contribute summed."""

from typing import Any

import tensorflow as tf

import strategies
from trainer.step.differentiate import Contribution, Microbatch, Trouble, Whole


def accumulate(
    differentiate: Any,
    share: strategies.Share,
    whole: Whole,
    state: Any,
    values: list[tf.Tensor],
    keys: tf.Tensor,
) -> Microbatch:
    """Differentiates a replica's share, one microbatch at a time.

    The microbatches run in a loop in the graph, so that memory holds the activations of one
    only. What the forward pass would write goes from each to the next; an empty microbatch
    writes nothing.

    Args:
        differentiate: a `tf.function` of (share, whole, state, values, keys), returning a
            `Microbatch`.
        share: this replica's part of the global batch.
        whole: the global batch's weight and size.
        state: the loss-scale rule's state.
        values: of the variables held back, before the step.
        keys: of seed generators, for each microbatch: shape (microbatches, generators, 2). Into
            so many parts the share is cut.

    Returns:
        The summed contribution and trouble, what the last microbatch wrote, and aux of the whole
        share.
    """
    num_microbatches = keys.shape[0]
    first = strategies.take(share, 0, num_microbatches)
    if num_microbatches == 1:
        return differentiate(first, whole, state, values, keys[0])

    # Tracing once beforehand says which gradients are None, what is written, what aux is like.
    traced = differentiate.get_concrete_function(first, whole, state, values, keys[0])
    expected = traced.structured_outputs
    aux_parts = tf.nest.map_structure(
        lambda spec: tf.TensorArray(
            spec.dtype, num_microbatches, infer_shape=False, element_shape=spec.shape
        ),
        expected.aux,
    )

    def body(
        index: tf.Tensor, total: tuple[Contribution, Trouble], written: Any, aux: Any
    ) -> tuple:
        part = strategies.take(share, index, num_microbatches)
        now = with_written(values, written)
        result = differentiate(part, whole, state, now, keys[index])
        rows = real_rows(result.aux, part)
        return (
            index + 1,
            tf.nest.map_structure(plus, total, (result.contribution, result.trouble)),
            unless_empty(part, result.written, now),
            tf.nest.map_structure(lambda array, row: array.write(index, row), aux, rows),
        )

    start = (
        tf.constant(0),
        tf.nest.map_structure(zeros_like_spec, (expected.contribution, expected.trouble)),
        {position: values[int(position)] for position in expected.written},
        aux_parts,
    )
    _, (contribution, trouble), written, aux_parts = tf.while_loop(
        lambda index, *_: index < num_microbatches, body, start, parallel_iterations=1
    )
    aux = tf.nest.map_structure(
        lambda array, spec: tf.ensure_shape(array.concat(), spec.shape), aux_parts, expected.aux
    )
    return Microbatch(contribution, trouble, written, aux)


def with_written(values: list[tf.Tensor], written: dict[str, tf.Tensor]) -> list[tf.Tensor]:
    """Returns the values a forward pass sees after an earlier one has written."""
    return [written.get(str(position), value) for position, value in enumerate(values)]


def unless_empty(
    share: strategies.Share, written: dict[str, tf.Tensor], before: list[tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Returns what a forward pass wrote, or what was there before if it saw no real example."""
    return {
        position: tf.where(share.examples > 0, value, before[int(position)])
        for position, value in written.items()
    }


def real_rows(tree: Any, share: strategies.Share) -> Any:
    """Cuts a share's rows down to its real examples: to none where one stands in for none."""
    if tf.get_static_value(share.examples):  # known before it runs, and so all are real
        return tree
    return tf.nest.map_structure(lambda tensor: tensor[: share.examples], tree)


def plus(total: Any, part: Any) -> Any:
    """Returns the sum; None, for a variable without a gradient, stays None."""
    return None if part is None else total + part


def zeros_like_spec(spec: Any) -> Any:
    """Returns zeros of a traced output's shape and dtype; None stays None."""
    return None if spec is None else tf.zeros(spec.shape, spec.dtype)
