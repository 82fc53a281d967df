"""What a step refuses if its loss is one number, a function of the whole global batch."""

from collections.abc import Callable

import tensorflow as tf

import strategies
from scaling.base.argument_checks import shown
from trainer.base.argument_checks import check_choice
from trainer.step.microbatch import Microbatch, PassInputs

LOSS_REDUCTIONS = ("mean", "global")
GLOBAL = 'with reduction="global"'


def check_loss_reduction(reduction: object, num_microbatches: int) -> None:
    """Raises ValueError for an unknown reduction, or a global loss of microbatches."""
    check_choice("reduction", reduction, LOSS_REDUCTIONS)
    if reduction == "global" and num_microbatches > 1:
        raise ValueError(
            f"`num_microbatches` must be 1 {GLOBAL}; got {num_microbatches}. Microbatches are "
            "computed one after the other, so none of them sees the whole batch that the loss "
            "compares. Use more replicas, a smaller batch, or keras.RematScope to save memory."
        )


def check_no_weights(example_weights: object) -> None:
    """Raises ValueError if weights are given that a global loss would ignore."""
    if example_weights is not None:
        raise ValueError(
            f"`example_weights` must not be given {GLOBAL}; got a function. The loss is one "
            "number, so there is nothing that the trainer could weight. Weight the examples "
            "inside compute_loss, with self.all_gather(weights)."
        )


def check_gathers(
    strategy: tf.distribute.Strategy, jit_compile: bool | str, float32_after: int | None
) -> None:
    """Raises ValueError if replicas cannot exchange rows inside the step.

    Args:
        strategy: a strategy with several replicas.
        jit_compile: the compile mode.
        float32_after: see `plan_step`.
    """
    several = f"{GLOBAL} on several replicas"
    found = strategies.capabilities(strategy)
    if found.decides_in_replica or found.asynchronous:
        raise ValueError(
            f"`strategy` must be mirrored or multi_worker_mirrored {several}; got "
            f"{type(strategy).__name__}. Replicas exchange rows in the middle of a step, which "
            "was not tried there. Use another strategy, or a single replica."
        )
    if jit_compile is not False:
        raise ValueError(
            f"`jit_compile` must be False {several}; got {shown(jit_compile)}. XLA cannot compile "
            "a pass in the middle of which replicas exchange rows. Leave out jit_compile=."
        )
    if float32_after is not None:
        raise ValueError(
            f'`on_stuck` must not be "float32" {several}; got "float32". Replicas cannot exchange '
            'rows under a condition, here that of a step in float32. Use "raise" or "hold".'
        )


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
