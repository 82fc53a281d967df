"""Forward and backward through one microbatch, as a pure function of values.

Nothing is assigned here. A Keras model runs inside `keras.StatelessScope`: it computes with the
values it is given, and what it would have assigned (BatchNorm's statistics, counters) is returned
as a result, to be kept or dropped once the verdict is known.
"""

import tensorflow as tf

import scaling
from trainer.step.batch_norm import fused_batch_norm
from trainer.step.forward import forward, written_by
from trainer.step.gradients import count_nonfinite
from trainer.step.losses import mask_weightless, weighted_mean
from trainer.step.microbatch import (
    Contribution,
    Microbatch,
    MicrobatchPlan,
    NonfiniteFlags,
    PassInputs,
)
from trainer.step.types import Gradient


def differentiate(inputs: PassInputs, plan: MicrobatchPlan) -> Microbatch:
    """Runs the model forward and backward on one share of the global batch.

    Args:
        inputs: the inputs of the pass.
        plan: the constants of the pass.
    """
    share, size = inputs.share, inputs.global_batch
    weights = inputs.values[: len(plan.model.trainable_variables)]
    with tf.GradientTape(persistent=len(plan.objectives) > 1) as tape:
        tape.watch(weights)
        with fused_batch_norm(plan.model, wanted=plan.fuse_batch_norm):
            passed = forward(share.batch, inputs.values, inputs.keys, plan)
        losses = {
            objective.name: weighted_mean(passed.losses[objective.name], share, size.weight)
            for objective in plan.objectives
        }
        # Multiply by the share's fraction of the examples, not of the weights: the model's own
        # losses are means over the examples that it was called with.
        regularization_loss = passed.added * tf.cast(share.examples / size.examples, tf.float32)
        scaled = {
            name: scaling.scale_loss(loss + regularization_loss, inputs.scale_state)
            for name, loss in losses.items()
        }
    # A weight that the forward pass assigned is differentiated at its new value, as Keras does.
    sources = passed.after[: len(weights)] or plan.model.trainable_variables
    gradients: list[Gradient] = []
    for objective in plan.objectives:
        wanted = [sources[position] for position in objective.positions]
        found = tape.gradient(scaled[objective.name], wanted)
        check_some_gradient(found)
        gradients += [as_dense(each) if plan.dense else scaling.coalesce(each) for each in found]

    contribution = Contribution(gradients, tf.add_n(list(losses.values())), regularization_loss)
    examples = [passed.losses[objective.name] for objective in plan.objectives]
    seen = [mask_weightless(losses, share) for losses in examples]
    nonfinite = find_nonfinite(contribution, seen, single_pass=plan.single_pass)
    written = written_by(plan.model, inputs.values, passed.after)
    return Microbatch(contribution, nonfinite, written, passed.aux)


def find_nonfinite(
    contribution: Contribution, losses: list[tf.Tensor], *, single_pass: bool
) -> NonfiniteFlags:
    """Returns flags that say what is not finite in a contribution.

    Args:
        contribution: the contribution of one microbatch.
        losses: one tensor of example losses per objective, 0 where an example's weight is 0.
        single_pass: see `MicrobatchPlan`.
    """
    finite = scaling.all_finite([contribution.loss, contribution.regularization_loss])
    gradients = contribution.gradients
    bad = tf.zeros([len(gradients)], tf.bool)
    if not single_pass:
        bad = finite & ~tf.stack([scaling.all_finite(gradient) for gradient in gradients])
    return NonfiniteFlags(
        loss=tf.cast(~finite, tf.float32),
        losses=tf.cast(count_nonfinite(tf.stack(losses)), tf.float32),
        gradients=tf.cast(bad, tf.float32),
    )


def check_some_gradient(gradients: list[Gradient]) -> None:
    """Raises ValueError if the loss does not depend on any trainable variable."""
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "`compute_loss` must depend on a trainable variable; got None for every gradient. "
            "There is nothing to update. Compute the losses from the model's output, without "
            "tf.stop_gradient or NumPy in between."
        )


def as_dense(gradient: Gradient) -> tf.Tensor | None:
    """Returns a gradient as a dense tensor, with repeated rows summed; None stays None."""
    return None if gradient is None else tf.convert_to_tensor(gradient)
