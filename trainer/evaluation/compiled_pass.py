"""Compiles the forward pass of an evaluation or a prediction, as the training step's passes are."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

import strategies
from trainer.step.xla import (
    listed_operations,
    operations_on_int32_variables,
    operations_sized_by_values,
    operations_without_xla,
)


def compiled_pass(run: Callable[[], Any], strategy: tf.distribute.Strategy) -> Any:
    """Returns the result of a forward pass, compiled by XLA if its results are right then.

    Call it while a graph is traced. The pass may do in evaluation what no training step does, such
    as returning strings, so a step that XLA can compile says nothing about it.

    Args:
        run: the whole pass, with the scope in which the model's writes are held back. What it reads
            from around it becomes an input of the program.
        strategy: the run's strategy. On a GPU, programs of XLA cannot reach int32 variables.
    """
    program = tf.function(run, autograph=False, jit_compile=True)
    trace = program.get_concrete_function()
    inputs = trace.graph.internal_captures
    found = [f"an input of {each.dtype.name}s" for each in inputs if each.dtype == tf.string]
    found += operations_without_xla(trace)
    if strategies.capabilities(strategy).on_gpu:
        found += operations_on_int32_variables(trace)
    sized = operations_sized_by_values(trace)
    if not (found or sized):
        return program()
    why = (
        f"it cannot compile {listed_operations(found)}"
        if found
        else f"it may compute wrong numbers behind {listed_operations(sized)}, sized by values"
    )
    logging.warning("This evaluation or prediction runs without XLA, as %s.", why)
    return run()
