"""The forward pass: the user's loss on one microbatch, with the model's own writes held back."""

from typing import NamedTuple

import keras
import tensorflow as tf

from trainer.base.autograph import call_user
from trainer.base.keras_private import regularizers_in_float32
from trainer.step.checks import check_not_assigned_in_half
from trainer.step.held_back import HoldBack
from trainer.step.losses import losses_and_aux
from trainer.step.microbatch import MicrobatchPlan
from trainer.step.types import Aux, Batch, Model, Values


class ForwardPass(NamedTuple):
    """The results of a forward pass."""

    losses: dict[str, tf.Tensor]  # keyed by objective name; shape=(examples,), float32, each
    aux: Aux  # what `compute_loss` returned along with the losses; () if nothing
    added: list[tf.Tensor]  # `model.losses`: regularizers, and what the layers added
    after: Values  # values of the given and the assigned variables when the pass ended; empty for a
    # `tf.Module`, which assigns its variables itself


def forward(batch: Batch, values: Values, keys: tf.Tensor, plan: MicrobatchPlan) -> ForwardPass:
    """Runs the user's `compute_loss` without letting a Keras model assign anything.

    Args:
        batch: the examples.
        values: values of variables in `plan.held_back`. The model reads every other variable
            itself, so that gradient tapes and custom gradients inside the model see variables and
            not plain tensors.
        keys: keys for `plan.seeds`: shape (generators, 2), int64. Each generator counts up
            from its key.
        plan: the constants of the pass.
    """
    keys = tf.unstack(keys, num=len(plan.seeds))
    if not isinstance(plan.model, keras.Model):
        for seed, key in zip(plan.seeds, keys, strict=True):
            seed.assign(key)
        result = call_user(plan.compute_loss, batch, training=True)
        losses, aux = losses_and_aux(result, batch, plan.objectives)
        return ForwardPass(losses, aux, [], {})
    given = [(plan.held_back[int(position)], value) for position, value in values.items()]
    given += zip(plan.seeds, keys, strict=True)
    held_back = HoldBack([*plan.held_back, *plan.seeds], given)
    with regularizers_in_float32(plan.model), held_back as scope:
        result = call_user(plan.compute_loss, batch, training=True)
        losses, aux = losses_and_aux(result, batch, plan.objectives)
        added = added_losses(plan.model)
    scope.check_no_unknown_variables()
    found = [scope.held_value(variable) for variable in plan.held_back]
    after = {str(position): value for position, value in enumerate(found) if value is not None}
    return ForwardPass(losses, aux, added, after)


def added_losses(model: keras.Model) -> list[tf.Tensor]:
    """Returns `model.losses` after a call of the model: see `added_losses.added_loss`."""
    return [tf.convert_to_tensor(loss) for loss in model.losses]


def written_by(model: Model, before: Values, after: Values) -> Values:
    """Returns the values that a forward pass would have assigned.

    Raises:
        ValueError: if a layer that computes in half precision has assigned a weight.
    """
    written = {position: new for position, new in after.items() if new is not before.get(position)}
    for position in map(int, written):
        if position < len(model.trainable_variables):
            check_not_assigned_in_half(model, model.trainable_variables[position])
    return written
