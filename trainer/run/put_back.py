"""Lets a trainer take steps on trial, and then restores its variables exactly."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import keras

from trainer.run.parts import Parts
from trainer.run.roots import roots_of_run
from trainer.step.reach import reach
from trainer.step.rollback import read_copies, variables_in_reach, write_copies

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@contextlib.contextmanager
def put_back(trainer: "Trainer", parts: Parts) -> Iterator[None]:
    """Context manager: restores all variables that a trainer reaches when the block ends."""
    roots = roots_of_run(trainer, parts)
    variables = variables_in_reach(roots.values(), held_back=())
    before = read_copies(variables, trainer.strategy)
    known = {id(variable) for variable in variables}
    parts.state.halted.assign(value=False)  # a run that was stuck takes steps here
    try:
        yield
    finally:
        write_copies(variables, before, trainer.strategy)
        # Some metrics create their variables in their first update: these had no value before.
        metrics = [item for _, item, _ in reach(roots) if isinstance(item, keras.metrics.Metric)]
        for metric in metrics:
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()
