"""Functions to call at regular intervals during a run, in steps or in seconds."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from scaling.base.argument_checks import is_number, shown
from trainer.base.argument_checks import as_python, check_count
from trainer.loop.inner import crossed


@dataclasses.dataclass
class Action:
    """A function that the trainer calls between inner loops at regular intervals.

    A period in steps is exact, because an inner loop ends at each of its multiples. A period in
    seconds is checked between inner loops, so a call may come late but never early.

    Args:
        call: the function, which receives the trainer; `trainer.totals.attempted` is the current
            step. If `call` has methods `state_dict()` and `load_state_dict(state)`, its state is
            saved in checkpoints, as JSON.
        every_steps: the period in steps, or None.
        every_secs: the period in seconds, or None. Give either `every_steps` or `every_secs`.

    Raises:
        TypeError: if `call` is not callable.
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
        """Checks the arguments and starts the clock."""
        if not callable(self.call):
            raise TypeError(
                f"`call` must be a function; got {type(self.call).__name__}. The function is "
                "called with the trainer. Pass lambda trainer: print(trainer.totals), for example."
            )
        if (self.every_steps is None) == (self.every_secs is None):
            raise ValueError(
                f"`every_steps` must be given if and only if `every_secs` is None; got "
                f"every_steps={self.every_steps!r}, every_secs={self.every_secs!r}. An action has "
                "one period. Pass either every_steps= or every_secs=."
            )
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps)
            self.every_steps = as_python(self.every_steps)
        secs = self.every_secs
        if secs is not None and not (is_number(secs) and 0 < secs < math.inf):
            raise ValueError(
                f"`every_secs` must be positive and finite; got {shown(secs)}. The value is a "
                "period in seconds. Pass 60 for once a minute."
            )
        self._last_call = time.monotonic()

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether a period has ended between step `before` and step `step`."""
        if self.every_secs is not None:
            return time.monotonic() - self._last_call >= self.every_secs
        return crossed(self.every_steps, before, step)

    def state(self) -> dict[str, Any]:
        """Returns the action's state as JSON types, for checkpoints.

        The state holds the seconds since the last call, and the result of `call.state_dict()` if
        `call` has that method.
        """
        call_state = self.call.state_dict() if hasattr(self.call, "state_dict") else None
        return {"elapsed_secs": time.monotonic() - self._last_call, "call": call_state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `state` returned, with `call.load_state_dict` if it exists."""
        self._last_call = time.monotonic() - state["elapsed_secs"]
        if state["call"] is not None and hasattr(self.call, "load_state_dict"):
            self.call.load_state_dict(state["call"])

    def __call__(self, trainer: Any) -> None:
        """Calls the function and starts a new period."""
        self._last_call = time.monotonic()
        self.call(trainer)
