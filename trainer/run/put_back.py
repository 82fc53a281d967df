"""Lets a trainer take steps on trial, and then restores its variables exactly."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import keras

from trainer.base.tracking import tracked, tracked_variables
from trainer.run.build import attributes_of
from trainer.run.parts import Parts
from trainer.step.rollback import read_copies, write_copies

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@contextlib.contextmanager
def put_back(trainer: "Trainer", parts: Parts) -> Iterator[None]:
    """Context manager: restores all variables that a trainer holds when the block ends."""
    own = [trainer.model, trainer.optimizer, parts.state, parts.metrics]
    roots = [*own, *attributes_of(trainer).values()]
    variables = tracked_variables(roots)
    before = read_copies(variables, trainer.strategy)
    known = {id(variable) for variable in variables}
    parts.state.halted.assign(value=False)  # a run that was stuck takes steps here
    try:
        yield
    finally:
        write_copies(variables, before, trainer.strategy)
        # Some metrics create their variables in their first update: these had no value before.
        metrics = [item for item in tracked(*roots) if isinstance(item, keras.metrics.Metric)]
        for metric in metrics:
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()
