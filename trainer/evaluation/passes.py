"""The forward pass of an evaluation or a prediction.

It writes to no variable and draws random numbers of its own, so that it does not advance the
generators that training draws from. XLA compiles it as it compiles the training step's passes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from trainer.step.held_back import HoldBack
from trainer.step.passes import ids_unrounded
from trainer.step.plan import StepPlan
from trainer.step.randomness import make_keys
from trainer.step.trace import functions_of_one_precision
from trainer.step.xla import operations_sized_by_values


def place_for_call(
    generator: tf.random.Generator, call: int, strategy: tf.distribute.Strategy
) -> None:
    """Moves a generator to the numbers of a call, which training does not reach.

    Each call has 2^32 blocks of numbers of its own.
    """
    for copy in strategy.experimental_local_results(generator.state):
        counter = tf.constant([2**62 + call * 2**32], copy.dtype)
        copy.assign(tf.concat([counter, copy[1:]], axis=0))


def next_source(counter: tf.Variable) -> tf.Tensor:
    """Returns the source of a batch's keys, and counts the batch: shape (2,), int64.

    Args:
        counter: the call's number, and the index of its next batch: shape (2,), int64.
    """
    source = counter.read_value()
    with tf.control_dependencies([source]):
        counter.assign_add([0, 1])
    return source


def keys_of(plan: StepPlan, source: tf.Tensor) -> tf.Tensor:
    """Returns a key for each of the plan's generators: shape (generators, 2), int64.

    Call it in replica context, outside of XLA-compiled code; see `make_keys`.

    Args:
        plan: the plan of the training step.
        source: what the keys are computed from: shape (2,), int64.
    """
    context = tf.distribute.get_replica_context()
    replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    return make_keys(source, replica, replicas, 1, len(plan.seeds))[0]


@contextlib.contextmanager
def without_writes(plan: StepPlan, keys: tf.Tensor) -> Iterator[None]:
    """Context manager: a Keras model does not write to its variables.

    Args:
        plan: the plan of the training step.
        keys: the generators' keys, from `keys_of`.
    """
    given = [(variable, variable.value) for variable in plan.held_back]
    given += zip(plan.seeds, tf.unstack(keys, num=len(plan.seeds)), strict=True)
    with contextlib.ExitStack() as stack:
        if isinstance(plan.model, keras.Layer):
            stack.enter_context(functions_of_one_precision(plan.model))
            stack.enter_context(ids_unrounded(plan.model))
        held = [*plan.held_back, *plan.seeds]
        stack.enter_context(HoldBack(held, given, dropped=None))
        yield


def compiled_pass(run: Callable[[], Any]) -> Any:
    """Returns the result of a forward pass, compiled by XLA if its results are right then.

    Call it while a graph is traced.

    Args:
        run: the whole pass, with the scope in which the model's writes are held back. What it reads
            from around it becomes an input of the program.
    """
    program = tf.function(run, autograph=False, jit_compile=True)
    sized = operations_sized_by_values(program.get_concrete_function())
    if not sized:
        return program()
    logging.warning(
        "This evaluation or prediction runs without XLA, which may compute wrong numbers behind "
        "operations whose sizes depend on values, as %s.",
        sized,
    )
    return run()
