"""The moving averages of the weights that optimizers keep, in the weights' place for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer.step.plan import StepPlan
from trainer.step.rollback import read_copies, write_copies


def keeps_average(plan: StepPlan) -> bool:
    """Returns whether every optimizer of a run keeps one."""
    return all(objective.optimizer.use_ema for objective in plan.objectives)


@contextlib.contextmanager
def averaged_weights(plan: StepPlan) -> Iterator[None]:
    """Within, the model's weights are their averages; before the first update, themselves.

    The weights are put back bit for bit, also when something raises within.
    """
    variables: list[Any] = list(plan.model.trainable_variables)
    weights = read_copies(variables, plan.strategy)
    try:
        with plan.strategy.scope():
            for objective in plan.objectives:
                # Keras's own way to end a training: it writes the averages over the weights.
                if objective.optimizer.iterations.numpy():
                    own = [variables[position] for position in objective.positions]
                    objective.optimizer.finalize_variable_values(own)
        yield
    finally:
        write_copies(variables, weights, plan.strategy)


def as_asked(plan: StepPlan, averaged: bool | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context with the weights that were asked for.

    Args:
        plan: the run's.
        averaged: whether the averages; None: if there are any.

    Raises:
        TypeError: if it was not asked in these words.
        ValueError: if there are none.
    """
    if averaged is not None and not isinstance(averaged, bool):
        raise TypeError(
            f"`averaged` must be True, False or None; got {averaged!r}. It says whether the "
            "moving average takes the weights' place. Leave it at None."
        )
    if averaged and not keeps_average(plan):
        raise ValueError(
            "`averaged` must be None or False if no average is kept; got True. There is nothing to "
            "put in the weights' place. Train with ema_momentum=."
        )
    use = keeps_average(plan) if averaged is None else averaged
    return averaged_weights(plan) if use else contextlib.nullcontext()
