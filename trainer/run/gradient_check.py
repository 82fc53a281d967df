"""Compares a step's gradients with those of a plain TensorFlow loop, once, before the first step.

The step runs a Keras model inside a scope that holds back assignments, with layers that were made
faster or more accurate. None of that may change which variables are trained, or how. So before a
run begins, a few examples of its first batch go through both the step's forward and backward pass
and an ordinary `tf.GradientTape`. Nothing of this remains in the step itself.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import keras
import tensorflow as tf
from absl import logging

import scaling
import strategies
from strategies.division import cut_rows
from trainer.base.autograph import call_user
from trainer.base.keras_private import all_layers, differentiable_moments
from trainer.data.errors import reason_of
from trainer.step.added_losses import added_entries, added_loss
from trainer.step.checks import SIGNIFICANT_BITS
from trainer.step.gradients import gradient_values
from trainer.step.held_back import HoldBack, name_of_variable, read_values, tensorflow_variable
from trainer.step.losses import losses_and_aux, weighted_mean
from trainer.step.microbatch import GlobalBatchSize, Microbatch, PassInputs
from trainer.step.plan import StepPlan, UpdateGroup, compiled_as
from trainer.step.randomness import make_keys
from trainer.step.replica import given_positions
from trainer.step.rollback import read_copies, write_copies
from trainer.step.types import Batch, Gradient, Model, ScaleState, Variable

Result = TypeVar("Result")

# Number of examples to compare on, where the data allows batches of any size. Which gradients exist
# does not depend on the number of examples.
EXAMPLES = 8


class Tolerance(NamedTuple):
    """The largest accepted difference between two gradients of a variable."""

    relative: float  # as a fraction of the larger norm of the two
    floor: float  # norms below this fraction of the global norm count as this: they may be noise


# Both gradients are computed in the same precision, and differ by the rounding of operations in
# another order.
IN_FLOAT32, IN_HALF = Tolerance(1e-3, 0.01), Tolerance(0.1, 0.1)

# To see how far rounding moves a gradient, all weights are changed by a fraction LAST_BITS of
# themselves, TRIALS times. A difference of up to ROUNDING times the largest move is accepted.
ROUNDING, TRIALS = 10.0, 3
LAST_BITS = {True: 2.0**-22, False: 2.0**-10}  # keyed by whether the model computes in float32


class Compared(NamedTuple):
    """The two gradients of a variable."""

    name: str
    step: Gradient  # as the training step computes it
    plain: Gradient  # as a plain `tf.GradientTape` computes it


class Untrained(NamedTuple):
    """What a comparison of gradients found: trainable variables that training does not change."""

    without_gradient: tuple[str, ...] = ()  # in the model, but the loss does not depend on them
    without_optimizer: tuple[
        str, ...
    ] = ()  # the loss depends on them, but they are not the model's
    not_compared: str = ""  # why gradients were not compared; "" if they were

    def warnings(self) -> list[str]:
        """Returns a sentence for each kind that was found."""
        texts = []
        if self.without_gradient:
            texts.append(
                f"No gradient reaches {listed(self.without_gradient)}, so training does not change "
                f"{it_or_them(self.without_gradient)}. Set trainable=False on the layer if that is "
                "intended; otherwise make the loss depend on its output."
            )
        if self.without_optimizer:
            texts.append(
                f"The loss depends on {listed(self.without_optimizer)}, but no optimizer updates "
                f"{it_or_them(self.without_optimizer)}: only variables of the model are trained. "
                "Make the layer or variable an attribute of the model to train it; otherwise set "
                "trainable=False on the layer, or create the variable with trainable=False."
            )
        return texts


def check_gradients(plan: StepPlan, batch: Batch, scale_state: ScaleState) -> Untrained:
    """Checks that every variable gets the gradient that a plain loop would compute.

    All variables are restored afterwards. Under parameter servers, and on a TPU, nothing is
    compared: a pass outside of the strategy would have to copy all variables to the chief or host.

    Args:
        plan: the run's constants.
        batch: the first global batch.
        scale_state: the loss-scale rule's state.

    Returns:
        The trainable variables that get no gradient in either way, and those of layers outside of
        the model that get one.

    Raises:
        ValueError: if a gradient is missing or different in the step.
    """
    found = strategies.capabilities(plan.strategy)
    if found.asynchronous or found.decides_in_replica:
        return Untrained(not_compared="not on the devices of this strategy")
    inputs = pass_inputs(first_examples(batch, plan), plan, scale_state)
    without: list[str] = []
    others: dict[str, None] = {}  # as an ordered set
    for group in compiled_as(plan, jit_compile=False).groups:
        try:
            pairs, outside = compared(group, inputs, plan)
        except Exception as error:  # noqa: BLE001  # a check must not end a run
            # Whatever is wrong, the step itself will raise it, if it is not this small batch.
            logging.warning("The step's gradients were not compared: %s", error)
            return Untrained(not_compared=reason_of(str(error)))
        tolerance = IN_FLOAT32 if computes_in_float32(plan.model) else IN_HALF
        rounding = functools.partial(moved_by_rounding, pairs, tolerance, group, inputs, plan)
        check_same(pairs, tolerance, rounding)
        without += [pair.name for pair in pairs if pair.step is None]
        others |= dict.fromkeys(outside)
    return Untrained(tuple(without), tuple(others))


def first_examples(batch: Batch, plan: StepPlan) -> strategies.Share:
    """Returns a few examples of a batch; all of a replica's share if the model's inputs need them.

    Args:
        batch: the first global batch.
        plan: the run's constants.
    """
    weights = tf.cast(call_user(plan.example_weights, batch), tf.float32)
    parts = plan.strategy.num_replicas_in_sync * plan.num_microbatches
    share = strategies.take(strategies.whole(batch, weights), 0, parts)
    sizes = [tensor.shape[0] for tensor in getattr(plan.model, "inputs", None) or []]
    # The model may accept a single batch size, and a global loss may read rows together.
    if not sizes or any(sizes) or plan.global_loss:
        return share
    few = min(EXAMPLES, int(share.examples))
    return strategies.Share(cut_rows(share.batch, 0, few), share.weights[:few], tf.constant(few))


def pass_inputs(share: strategies.Share, plan: StepPlan, scale_state: ScaleState) -> PassInputs:
    """Returns the inputs of a forward and backward pass over a share, as if it were the batch."""
    weight = tf.maximum(tf.reduce_sum(share.weights), 1.0)
    return PassInputs(
        share=share,
        global_batch=GlobalBatchSize(weight, share.examples),
        scale_state=scale_state,
        values=read_values(plan.held_back, given_positions(plan)),
        keys=make_keys(tf.constant([0, 0], tf.int64), 0, 1, 1, len(plan.seeds))[0],
    )


def compared(
    group: UpdateGroup, inputs: PassInputs, plan: StepPlan
) -> tuple[list[Compared], list[str]]:
    """Returns the gradients of a group's variables, computed in both ways.

    Also returns the names of trainable variables outside of the model that get a gradient.
    """
    assigned: list[Variable] = [*plan.undo, *plan.seeds]
    step = functools.partial(group.differentiate.python_function, inputs)
    result: Microbatch = restoring(assigned, plan.strategy, step)
    assigned += plan.held_back
    outside = trainable_outside(plan)
    read = [tensorflow_variable(variable) for variable in outside]
    plain, others = restoring(
        assigned, plan.strategy, lambda: plain_gradients(group, inputs, plan, read)
    )
    pairs = zip(group.positions, result.contribution.gradients, plain, strict=True)
    found = [
        Compared(plan.variable_names[position], *gradients)
        for position, *gradients in pairs
        if str(position) not in result.replaced
    ]
    reached = [v for v, gradient in zip(outside, others, strict=True) if gradient is not None]
    return found, [name_of_variable(variable) for variable in reached]


def trainable_outside(plan: StepPlan) -> list[Variable]:
    """Returns the trainable variables in reach of the loss that are not the model's."""
    own = {id(tensorflow_variable(variable)) for variable in plan.model.variables}
    return [
        variable
        for variable in (*plan.held_back, *plan.undo)
        if variable.trainable
        and tf.as_dtype(variable.dtype).is_floating
        and id(tensorflow_variable(variable)) not in own
    ]


def restoring(
    variables: list[Variable], strategy: tf.distribute.Strategy, function: Callable[[], Result]
) -> Result:
    """Returns a function's result, and restores the variables that it assigns.

    The function is called eagerly, which takes far less time than tracing it. It is traced if that
    fails: Keras's float8 layers, for one, have gradients in graphs only.
    """
    before = read_copies(variables, strategy)
    try:
        return function()
    except Exception:  # noqa: BLE001  # layers raise all kinds of errors
        write_copies(variables, before, strategy)
        result: Result = tf.function(function, autograph=False).get_concrete_function()()
        return result
    finally:
        write_copies(variables, before, strategy)


@differentiable_moments()  # Keras's own second derivatives are wrong: see docs/keras_faults.md
def plain_gradients(
    group: UpdateGroup, inputs: PassInputs, plan: StepPlan, outside: list[tf.Variable]
) -> tuple[list[Gradient], list[Gradient]]:
    """Returns the gradients of a plain loop, in which the model reads and assigns its variables.

    Args:
        group: the update group.
        inputs: the inputs of the pass.
        plan: the run's constants.
        outside: variables that are not the model's.

    Returns:
        The gradients in the order of `group.positions`; and those of `outside`.
    """
    for seed, key in zip(plan.seeds, tf.unstack(inputs.keys, num=len(plan.seeds)), strict=True):
        seed.assign(key)
    share, size = inputs.share, inputs.global_batch
    with tf.GradientTape(persistent=True) as tape:
        result = call_user(plan.compute_loss, share.batch, training=True)
        losses, _ = losses_and_aux(
            result, share.batch, group.objectives, global_loss=plan.global_loss
        )
        model = plan.model
        entries = added_entries(model, model.losses) if isinstance(model, keras.Model) else []
        added = added_loss(entries, share, size)
        scaled = {
            name: scaling.scale_loss(
                (each if plan.global_loss else weighted_mean(each, share, size.weight)) + added,
                inputs.scale_state,
            )
            for name, each in losses.items()
        }
    gradients: list[Gradient] = []
    for objective in group.objectives:
        # Not `keras.Variable`: its value is what the scope below holds.
        variables = [tensorflow_variable(plan.weights[at]) for at in objective.positions]
        # Rematerialized layers read and draw the same numbers again, as in the step.
        given = [(plan.held_back[int(at)], value) for at, value in inputs.values.items()]
        given += zip(plan.seeds, tf.unstack(inputs.keys, num=len(plan.seeds)), strict=True)
        with HoldBack([*plan.held_back, *plan.seeds], given):
            gradients += tape.gradient(scaled[objective.name], variables)
            others = tape.gradient(list(scaled.values()), outside)
    return [scaling.coalesce(gradient) for gradient in gradients], others


def moved_by_rounding(
    pairs: list[Compared],
    tolerance: Tolerance,
    group: UpdateGroup,
    inputs: PassInputs,
    plan: StepPlan,
) -> list[float]:
    """Returns how far each gradient moves if all weights change in their last bits.

    Some gradients are rounding alone: that of a bias before a BatchNormalization, for one, whose
    sum of nearly equal numbers is magnified by 1 / sqrt(epsilon) where all examples are the same,
    as in a trial with zeros. Two ways to compute it then give two results.

    Args:
        pairs: the gradients, from `compared`.
        tolerance: the largest accepted difference.
        group: the update group.
        inputs: the inputs of the pass.
        plan: the run's constants.

    Returns:
        For each pair a norm. All are 0 if the gradients are not the same in two calls, as with
        random numbers that the check cannot repeat.
    """
    again = compared(group, inputs, plan)[0]
    both = list(zip(pairs, again, strict=True))
    repeated = [Compared(one.name, one.step, other.step) for one, other in both]
    repeated += [Compared(one.name, one.plain, other.plain) for one, other in both]
    if different(repeated, tolerance):
        return [0.0] * len(pairs)
    weights = [tensorflow_variable(variable) for variable in plan.weights]
    before = read_copies(weights, plan.strategy)
    moved = [0.0] * len(pairs)
    try:
        for trial in range(TRIALS):
            change_last_bits(weights, trial, LAST_BITS[computes_in_float32(plan.model)])
            now = compared(group, inputs, plan)[0]
            write_copies(weights, before, plan.strategy)
            moved = [
                max(largest, distance(one.step, other.step), distance(one.plain, other.plain))
                for largest, one, other in zip(moved, pairs, now, strict=True)
            ]
    finally:
        write_copies(weights, before, plan.strategy)
    return moved


def change_last_bits(weights: Sequence[tf.Variable], trial: int, fraction: float) -> None:
    """Changes each floating-point weight by a fraction of itself, up or down at random."""
    for place, weight in enumerate(weights):
        if weight.dtype.is_floating:
            draws = tf.random.stateless_uniform(weight.shape, [trial, place], -1.0, 1.0)
            weight.assign(weight * (1.0 + fraction * tf.cast(tf.sign(draws), weight.dtype)))


def check_same(
    pairs: list[Compared], tolerance: Tolerance, moved_by_rounding: Callable[[], list[float]]
) -> None:
    """Raises ValueError if the step's gradient of a variable is missing or different.

    Args:
        pairs: the gradients.
        tolerance: the largest accepted difference.
        moved_by_rounding: returns for each pair how far rounding moves a gradient; it takes longer
            than the rest, and is called only if a difference is larger.
    """
    found = different(pairs, tolerance)
    moved = moved_by_rounding() if any(pairs[place].step is not None for place in found) else []
    for place in found:
        pair = pairs[place]
        if (
            pair.step is not None
            and norm_of_difference(pair.step, pair.plain) <= ROUNDING * moved[place]
        ):
            continue
        kind = "no gradient" if pair.step is None else "a different gradient"
        raise ValueError(
            "`compute_loss` must have the same gradients in a training step as under a plain "
            f"tf.GradientTape; got {kind} for {pair.name!r}. The variable would be trained "
            "wrongly. Compute the loss from the batch, the model's variables and seeded random "
            "numbers alone, or pass check_gradients=False to train with the step's gradients."
        )


def different(pairs: list[Compared], tolerance: Tolerance) -> list[int]:
    """Returns the positions of gradients that the step lacks, or that differ by too much."""
    norms = [norm_of(pair.plain) for pair in pairs if pair.plain is not None]
    norms = [norm for norm in norms if tf.math.is_finite(norm)]  # others may have overflowed
    smallest = tolerance.floor * tf.norm(tf.stack([0.0, *norms]))
    found = []
    for place, pair in enumerate(pairs):
        if pair.plain is None:
            continue
        if pair.step is not None:
            size = tf.maximum(norm_of(pair.step), norm_of(pair.plain))
            allowed = tolerance.relative * tf.maximum(size, smallest)
            # If one is inf or NaN, the step will be skipped, or both are.
            if not tf.math.is_finite(size) or norm_of_difference(pair.step, pair.plain) <= allowed:
                continue
        found.append(place)
    return found


def norm_of(gradient: Gradient) -> tf.Tensor:
    """Returns a coalesced gradient's norm: shape (), float32."""
    return tf.norm(tf.cast(gradient_values(gradient), tf.float32))


def norm_of_difference(one: Gradient, other: Gradient) -> tf.Tensor:
    """Returns the norm of the difference of two coalesced gradients: shape (), float32."""
    both = (one, other)
    if any(isinstance(each, tf.Tensor) for each in both):  # the step may have made its own dense
        both = tuple(tf.convert_to_tensor(each) for each in both)
    first, second = (tf.cast(gradient_values(each), tf.float32) for each in both)
    return tf.norm(first - second) if first.shape == second.shape else tf.constant(math.inf)


def distance(one: Gradient, other: Gradient) -> float:
    """Returns the norm of the difference of two gradients; 0 if one is missing, or it is inf."""
    if one is None or other is None:
        return 0.0
    found = float(norm_of_difference(one, other))
    return found if math.isfinite(found) else 0.0


def computes_in_float32(model: Model) -> bool:
    """Returns whether a model is known to compute in float32; a `tf.Module` is not."""
    if not isinstance(model, keras.Model):
        return False
    return not any(layer.compute_dtype in SIGNIFICANT_BITS for layer in all_layers(model))


def it_or_them(names: Sequence[str]) -> str:
    """Returns the pronoun for one name or several."""
    return "it" if len(names) == 1 else "them"


def listed(names: Sequence[str], shown: int = 5) -> str:
    """Returns the first names of a list in words.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c"], shown=1)
        ("'a' and 'b'", "'a' and 2 more")
    """
    quoted = [repr(name) for name in names[:shown]]
    if len(names) > shown:
        quoted.append(f"{len(names) - shown} more")
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)
