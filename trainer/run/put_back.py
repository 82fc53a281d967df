"""Lets a trainer take steps on trial, and then restores its variables exactly."""

import contextlib
from collections.abc import Iterator

import keras

from trainer.run.protocol import Parts, RunnableTrainer
from trainer.step.held_back import leaves
from trainer.step.rollback import read_copies, variables_in_reach, write_copies


@contextlib.contextmanager
def put_back(trainer: RunnableTrainer, parts: Parts) -> Iterator[None]:
    """Context manager: restores all variables of a trainer exactly when the block ends."""
    roots = [trainer.model, trainer.optimizer, parts.state, *vars(trainer).values()]
    roots += [metric for metrics in parts.metrics for metric in metrics.values()]
    # TensorFlow does not find the variables of a Keras metric, nor of optimizers in another one.
    roots += [objective.optimizer.variables for objective in parts.plan.objectives]
    roots += [leaf.variables for leaf in leaves(roots) if isinstance(leaf, keras.metrics.Metric)]
    variables = variables_in_reach(roots, held_back=())
    before = read_copies(variables, trainer.strategy)
    try:
        yield
    finally:
        write_copies(variables, before, trainer.strategy)
