"""Functions to call at regular intervals during a run, in steps or in seconds."""

import time
from collections.abc import Callable
from typing import Any

from scaling.base.argument_checks import check_integer
from trainer.callbacks.callback import Callback
from trainer.loop.inner import next_multiple


class Action(Callback):
    """A callback that calls a function at regular intervals, between inner loops.

    A period in steps is exact, because an inner loop ends at each of its multiples. A period in
    seconds is checked between inner loops, so a call may come late but never early.

    Args:
        call: the function, which receives the trainer; `trainer.totals.attempted` is the current
            step. If `call` has methods `state_dict()` and `load_state_dict(state)`, its state is
            saved in checkpoints, as JSON.
        every_steps: the period in steps, or None.
        every_secs: the period in seconds, or None. Give either `every_steps` or `every_secs`.

    Raises:
        ValueError: unless exactly one period is given, and it is positive.

    Example:
        >>> action = Action(lambda trainer: print(trainer.totals), every_steps=100)
        >>> action.is_due(before=90, step=110), action.is_due(before=110, step=190)
        (True, False)
    """

    def __init__(
        self,
        call: Callable[[Any], None],
        every_steps: int | None = None,
        every_secs: float | None = None,
    ) -> None:
        """Checks the periods and starts the clock."""
        if (every_steps is None) == (every_secs is None):
            raise ValueError(
                f"`every_steps` or `every_secs` must be given, not both; got {every_steps!r}, "
                f"{every_secs!r}"
            )
        if every_steps is not None:
            check_integer("every_steps", every_steps, 1)
        if every_secs is not None and not every_secs > 0:
            raise ValueError(f"`every_secs` must be positive; got {every_secs}")
        self.call = call
        self.every_steps = every_steps
        self.every_secs = every_secs
        self._last_call = time.monotonic()

    @property
    def key(self) -> str:
        """The name under which checkpoints save the state: with the name of the function."""
        name = getattr(self.call, "__qualname__", type(self.call).__qualname__)
        return f"{super().key} {name}"

    def next_stop(self, step: int) -> int | None:
        """Returns the end of the present period in steps."""
        return next_multiple(self.every_steps, step)

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether a period has ended between step `before` and step `step`."""
        if self.every_secs is not None:
            return time.monotonic() - self._last_call >= self.every_secs
        return super().is_due(before, step)

    def after(self, step: int) -> None:
        """Calls the function and starts a new period."""
        del step
        self._last_call = time.monotonic()
        self.call(self.trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the seconds since the last call, and the state of the function if it has one."""
        state = self.call.state_dict() if hasattr(self.call, "state_dict") else None
        return {"elapsed_secs": time.monotonic() - self._last_call, "call": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, with `call.load_state_dict` if it exists."""
        self._last_call = time.monotonic() - state["elapsed_secs"]
        if state["call"] is not None and hasattr(self.call, "load_state_dict"):
            self.call.load_state_dict(state["call"])
