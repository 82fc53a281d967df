"""Refuses a `train_step` that does not attempt exactly one update.

A run counts its steps by the attempts, and its loop by the calls of `train_step`. If the two
differ, a resumed run ends at another step than the run that was not stopped.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.base.autograph import call_user, without_autograph
from trainer.step.report import StepReport

# The graphs in which the `train_step` that is being traced has attempted an update.
_ATTEMPTS: contextvars.ContextVar[list[tf.Graph] | None] = contextvars.ContextVar(
    "attempts", default=None
)


def note_attempt() -> None:
    """Notes that an update is attempted in the graph that is being traced."""
    attempts = _ATTEMPTS.get()
    if attempts is not None:
        attempts.append(tf.compat.v1.get_default_graph())


def of_one_attempt(step: Callable[[Any], StepReport]) -> Callable[[Any], StepReport]:
    """Returns a `train_step` that raises ValueError unless it attempts exactly one update.

    Args:
        step: takes a global batch, attempts an update, and returns a report.
    """

    @functools.wraps(step)
    @without_autograph
    def checked(batch: Any) -> StepReport:
        attempts: list[tf.Graph] = []
        token = _ATTEMPTS.set(attempts)
        try:
            report: StepReport = call_user(step, batch)
        finally:
            _ATTEMPTS.reset(token)
        if len(attempts) != 1:
            raise ValueError(f"{ONE}; got {len(attempts)} calls. {INSTEAD}")
        if attempts[0] is not tf.compat.v1.get_default_graph():
            raise ValueError(f"{ONE}; got a call in one of these. {INSTEAD}")
        return report

    return checked


ONE = (
    "`train_step` must call super().train_step, or attempt_step, exactly once, and not in a loop, "
    "a condition or a tf.function"
)
INSTEAD = (
    "A run counts its steps by these calls, and a resumed run would end at another step. Leave out "
    "@tf.function, since the step is a graph already; choose the batch in the condition and take "
    "the step after it; for several updates with one batch, let train_data yield it several times; "
    "for several updates of a part, pass updates_per_step=."
)
