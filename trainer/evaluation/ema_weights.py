"""The weights to evaluate: the moving averages (EMA) that optimizers keep, or the trained ones."""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer.base.tracking import read_copies, write_copies
from trainer.keras_compat import built_for
from trainer.step.averages import assign_averages, average_weights
from trainer.step.plan import StepPlan


def keeps_average(plan: StepPlan) -> bool:
    """Returns whether every optimizer of a run keeps a moving average of its weights."""
    return average_weights(objective.optimizer for objective in plan.objectives)


@contextlib.contextmanager
def averaged_weights(plan: StepPlan) -> Iterator[None]:
    """Context manager: replaces the model's weights with their moving averages.

    Before the first update there are no averages, and the weights stay as they are. On exit the
    weights are restored bit for bit, even after an exception.
    """
    variables: list[Any] = [
        variable for objective in plan.objectives for variable in built_for(objective.optimizer)
    ]
    weights = read_copies(variables, plan.strategy)
    try:
        with plan.strategy.scope():
            for objective in plan.objectives:
                if objective.optimizer.iterations.numpy():
                    for optimizer in objective.updating:
                        assign_averages(optimizer, plan.strategy)
        yield
    finally:
        write_copies(variables, weights, plan.strategy)


@contextlib.contextmanager
def evaluated_weights(
    plan: StepPlan, averaged: bool | None, *, beside_train: bool = False
) -> Iterator[None]:
    """Context manager: gives the model the weights to evaluate or export.

    Args:
        plan: the run's plan.
        averaged: True for the moving averages, False for the trained weights themselves, None
            for the averages if the run keeps them.
        beside_train: whether another thread takes steps meanwhile.

    Raises:
        ValueError: if `averaged` is True and the run keeps no averages.
        RuntimeError: if the averages would be used while another thread takes steps.
    """
    if averaged and not keeps_average(plan):
        raise ValueError("`averaged` must be None or False, as the run keeps no average of weights")
    use = keeps_average(plan) if averaged is None else averaged
    if use and beside_train:
        # Restoring the weights would undo the steps taken meanwhile.
        raise RuntimeError("`averaged` must be False in another thread while train() runs")
    with averaged_weights(plan) if use else contextlib.nullcontext():
        yield
