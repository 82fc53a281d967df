"""The forward pass: the user's loss on one microbatch, with the model's own writes held back."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaling.base.argument_checks import shown
from trainer.base.autograph import call_user
from trainer.keras_compat import means_of_compute_loss, regularizers_in_float32
from trainer.step.added_losses import (
    added_entries,
    check_on_tape,
    recorded_losses,
    warn_of_forgotten_losses,
)
from trainer.step.checks import check_not_assigned_in_half
from trainer.step.held_back import HoldBack, frozen_or_unfrozen, is_seed_state
from trainer.step.ids import ids_unrounded
from trainer.step.losses import losses_and_aux, shared_with
from trainer.step.microbatch import MicrobatchPlan
from trainer.step.trace import any_depends, functions_of_one_precision
from trainer.step.types import Aux, Batch, Values


class ForwardPass(NamedTuple):
    """The results of a forward pass."""

    # Keyed by objective name; each float32, in the shape of the weights; shape=() if it is global.
    losses: dict[str, tf.Tensor]
    aux: Aux  # what `compute_loss` returned along with the losses; () if nothing
    added: list[tf.Tensor]  # `model.losses`: regularizers, and what the layers added
    after: Values  # values of the given and the assigned variables when the pass ended; empty for a
    # `tf.Module`, which assigns its variables itself
    # What each variable in `plan.held_back`, and each generator in `plan.seeds`, was assigned in
    # turn; [] for a `tf.Module`.
    assigned: Sequence[Sequence[tf.Tensor]]
    reported: set[str]  # names of objectives whose loss an earlier update group has reported


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
    if not isinstance(plan.model, keras.Layer):
        for seed, key in zip(plan.seeds, keys, strict=True):
            seed.assign(key)
        result = call_loss(batch, plan)
        losses, aux = losses_and_aux(result, batch, plan.objectives, global_loss=plan.global_loss)
        reported = shared_with(result, plan.earlier, plan.objectives)
        return ForwardPass(losses, aux, [], {}, [], reported)
    with (
        functions_of_one_precision(plan.model),
        ids_unrounded(plan.model),
        regularizers_in_float32(plan.model),
        recorded_losses(plan.model) as recorded,
        scope_of(values, keys, plan) as scope,
    ):
        result = call_loss(batch, plan)
        losses, aux = losses_and_aux(result, batch, plan.objectives, global_loss=plan.global_loss)
        listed = plan.model.losses
        added = added_entries(plan.model, listed, scope.losses)
        warn_of_forgotten_losses(recorded, listed)
    check_on_tape(recorded)
    for variable in filter(scope.is_cast, plan.weights):
        check_not_assigned_in_half(plan.model, variable)
    found = [scope.held_value(variable) for variable in plan.held_back]
    after = {str(position): value for position, value in enumerate(found) if value is not None}
    assigned = [scope.assigned(each) for each in (*plan.held_back, *plan.seeds)]
    reported = shared_with(result, plan.earlier, plan.objectives)
    return ForwardPass(losses, aux, added, after, assigned, reported)


def call_loss(batch: Batch, plan: MicrobatchPlan) -> Any:
    """Returns what `compute_loss` returns.

    Raises:
        ValueError: if it freezes or unfreezes layers.
        RuntimeError: if replicas would have to meet in the middle of a compiled pass.
    """
    try:
        result = call_user(plan.compute_loss, batch, training=True)
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "`compute_loss` must not call all_reduce or another collective of TensorFlow: use "
            'self.all_gather, with reduction="global".'
        ) from error
    if (names := frozen_or_unfrozen(plan.weights, plan.model)) is not None:
        raise ValueError(
            "`compute_loss` must leave `trainable` of the layers as it is; got another value for "
            f"{shown(names)}. A step updates the variables that were trainable before it. Freeze "
            "or unfreeze layers between two calls of train. To train parts of a model by losses of "
            "their own, as in a GAN, return a dict of losses, and build a dict of optimizers."
        )
    return result


def scope_of(values: Values, keys: Sequence[tf.Tensor], plan: MicrobatchPlan) -> HoldBack:
    """Returns a scope that holds back assignments, with given values and keys; see `forward`."""
    given = [(plan.held_back[int(position)], value) for position, value in values.items()]
    given += zip(plan.seeds, keys, strict=True)
    means = functools.partial(means_of_compute_loss, plan.model)  # some are made in the call
    return HoldBack([*plan.held_back, *plan.seeds], given, dropped=means)


@contextlib.contextmanager
def recomputing(
    passed: ForwardPass, values: Values, keys: tf.Tensor, plan: MicrobatchPlan
) -> Iterator[None]:
    """Context manager for a backward pass, in which rematerialized layers run forward again.

    What they assign is dropped, since the forward pass has already assigned it, and their
    generators start again from the same keys, so Dropout has the same mask in both passes. In a
    loop without this scope it has another one, and the gradients are wrong.

    Args:
        passed: the results of the forward pass.
        values: as for `forward`.
        keys: as for `forward`.
        plan: the constants of the pass.

    Raises:
        ValueError: if a layer would not see, or draw, the numbers of the forward pass again.
    """
    if not isinstance(plan.model, keras.Layer):
        yield
        return
    with scope_of(values, tf.unstack(keys, num=len(plan.seeds)), plan) as scope:
        yield
    for variable, before in zip((*plan.held_back, *plan.seeds), passed.assigned, strict=True):
        again = scope.assigned(variable)
        if (len(before), len(again)) == (1, 1) or not scope.uses(variable):
            continue
        if is_seed_state(variable) and again:
            raise ValueError(
                "`model` must draw only once from a random generator that a rematerialized layer "
                f"uses; got {len(before)} draws from {variable.path!r}. When the layer is computed "
                "again in the backward pass, it would draw other numbers than in the forward pass. "
                "Give each random layer a generator of its own, call it once, or do not "
                "rematerialize it."
            )
        if any_depends([*passed.losses.values(), *passed.added], before):
            raise ValueError(
                "`model` must assign a variable at most once in a forward pass, and in the layer "
                f"itself, if a rematerialized layer reads it; got {len(before)} assignments of "
                f"{variable.path!r}. When the layer is computed again in the backward pass, it "
                "would read another value than in the forward pass. Call it once, with all inputs "
                "in one batch, or do not rematerialize it."
            )


def written_by(before: Values, after: Values) -> Values:
    """Returns the values that a forward pass would have assigned."""
    return {position: new for position, new in after.items() if new is not before.get(position)}
