"""Warns of probabilities in half precision, of which a loss takes the logarithm."""

from collections.abc import Mapping
from typing import Any

import keras

from trainer.base.warn_once import warn_once
from trainer.keras_compat import arguments_of_loss
from trainer.losses.loss_shapes import LABELS_OF_LOSS, name_of

# The smallest distance of a number below 1 from 1, which is all that is left of a logit.
STEP_BELOW_ONE = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def warn_of_half_probabilities(model: Any, loss_fn: Any) -> None:
    """Warns if a model's last layer computes a sigmoid or a softmax in half precision.

    A probability near 1 is rounded to 1 there. The loss is then as large as Keras's clipping
    allows, its gradient is 0, and an evaluation in float32 does not show it. Casting the
    probabilities afterwards does not bring the logits back.

    Args:
        model: the model. Only a Sequential or functional model tells its last layer.
        loss_fn: the loss, or an `OutputLosses`.
    """
    losses = getattr(loss_fn, "losses", None)
    all_losses = losses.values() if isinstance(losses, Mapping) else [loss_fn]
    if not any(takes_probabilities(each) for each in all_losses):
        return
    for layer in last_layers(model):
        step = STEP_BELOW_ONE.get(layer.compute_dtype)
        if step is None or not makes_probabilities(layer):
            continue
        warn_once(
            f"The layer {layer.name!r} computes probabilities in {layer.compute_dtype}. Those "
            f"within {step:.2g} of 1 are rounded, and at 1 the loss has no gradient. Create the "
            'layer with dtype="float32", or leave out its activation and use a loss with '
            "from_logits=True."
        )


def takes_probabilities(loss: Any) -> bool:
    """Returns whether a loss is one of Keras's cross-entropies, and expects probabilities."""
    if name_of(loss) not in LABELS_OF_LOSS:
        return False
    known = getattr(keras.losses, name_of(loss))
    from_logits = arguments_of_loss(loss).get("from_logits", False)
    return loss is known or (type(loss) is known and not from_logits)


def last_layers(model: Any) -> list[keras.Layer]:
    """Returns the layers whose outputs are the outputs of a Sequential or functional model."""
    if isinstance(model, keras.Sequential):
        return list(model.layers[-1:])
    try:
        outputs = {id(output) for output in model.outputs}
        return [layer for layer in model.layers if id(layer.output) in outputs]
    except AttributeError:  # not a functional model, or a layer with several outputs
        return []


def makes_probabilities(layer: keras.Layer) -> bool:
    """Returns whether a layer ends in a sigmoid or a softmax."""
    if isinstance(layer, keras.layers.Softmax):
        return True
    activation = getattr(layer, "activation", None)
    return activation in (keras.activations.sigmoid, keras.activations.softmax)
