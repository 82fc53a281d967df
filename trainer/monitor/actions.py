"""Things to do now and then while a run goes on: every so many steps, or seconds."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from scaling.base.argument_checks import is_number
from trainer.base.argument_checks import check_count


@dataclasses.dataclass
class Action:
    """A function to call between inner loops, with a period.

    An inner loop ends where a period in steps does, so steps are met exactly; seconds are
    looked at between loops, and are at least so many.

    Args:
        call: takes the trainer; the step it stands at is `trainer.totals.attempted`. If it has
            `state_dict()` and `load_state_dict(state)`, a checkpoint keeps that, as JSON.
        every_steps: the period in steps, or None.
        every_secs: the period in seconds, or None; give one of the two.

    Raises:
        TypeError: if `call` is no function.
        ValueError: unless exactly one period is given, and it is positive.

    Example:
        >>> action = Action(lambda trainer: print(trainer.totals), every_steps=100)
        >>> action.is_due(before=90, step=110), action.is_due(before=110, step=190)
        (True, False)
    """

    call: Callable[[Any], None]
    every_steps: int | None = None
    every_secs: float | None = None

    def __post_init__(self) -> None:
        """Checks call and period, and starts the clock."""
        if not callable(self.call):
            raise TypeError(
                f"`call` must be a function; got {type(self.call).__name__}. It is called with the "
                "trainer. Pass for instance lambda trainer: print(trainer.totals)."
            )
        if (self.every_steps is None) == (self.every_secs is None):
            raise ValueError(
                f"`every_steps` must be given if `every_secs` is not; got {self.every_steps!r} and "
                f"{self.every_secs!r}. One of the two is the period. Pass exactly one."
            )
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps)
        secs = self.every_secs
        if secs is not None and not (is_number(secs) and secs > 0):
            raise ValueError(
                f"`every_secs` must be positive; got {secs!r}. It is a time in seconds. 60 is once "
                "a minute."
            )
        self._last = time.monotonic()

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether its period has ended since step `before`."""
        if self.every_steps is not None:
            return step // self.every_steps > before // self.every_steps
        return time.monotonic() - self._last >= (self.every_secs or 0)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, as JSON can hold it.

        The seconds since its last call; and what `call.state_dict()` returns, if there is such a
        method.
        """
        own = self.call.state_dict() if hasattr(self.call, "state_dict") else None
        return {"elapsed_secs": time.monotonic() - self._last, "call": own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes up what `state` returned; what is the call's goes to `load_state_dict`."""
        self._last = time.monotonic() - state["elapsed_secs"]
        if state["call"] is not None and hasattr(self.call, "load_state_dict"):
            self.call.load_state_dict(state["call"])

    def __call__(self, trainer: Any) -> None:
        """Calls it, and begins a new period."""
        self._last = time.monotonic()
        self.call(trainer)


def check_actions(actions: Any) -> None:
    """Raises TypeError unless there is a sequence of actions."""
    found = actions if isinstance(actions, (list, tuple)) else [actions]
    for action in found:
        if found is not actions or not isinstance(action, Action):
            raise TypeError(
                f"`actions` must be a list of trainer.Action; got {action!r}. An action says what "
                "to do and how often. Use for instance [Action(call, every_steps=100)]."
            )
