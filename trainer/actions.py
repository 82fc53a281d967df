"""Things to do now and then while a run goes on: every so many steps, or seconds."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from trainer.settings import check_count


@dataclasses.dataclass
class Action:
    """A function to call between inner loops, with a period.

    An inner loop ends where a period in steps does, so steps are met exactly; seconds are
    looked at between loops, and are at least so many.

    Args:
        call: takes the trainer; the step it stands at is `trainer.totals.attempted`.
        every_steps: the period in steps, or None.
        every_secs: the period in seconds, or None; give one of the two.

    Raises:
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
        """Checks the period, and starts the clock."""
        if (self.every_steps is None) == (self.every_secs is None):
            raise ValueError(
                f"`every_steps` must be given if `every_secs` is not; got {self.every_steps!r} and "
                f"{self.every_secs!r}. One of the two is the period. Pass exactly one."
            )
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps)
        if self.every_secs is not None and not self.every_secs > 0:
            raise ValueError(
                f"`every_secs` must be positive; got {self.every_secs!r}. It is a time in seconds. "
                "60 is once a minute."
            )
        self._last = time.monotonic()

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether its period has ended since step `before`."""
        if self.every_steps is not None:
            return step // self.every_steps > before // self.every_steps
        return time.monotonic() - self._last >= (self.every_secs or 0)

    def __call__(self, trainer: Any) -> None:
        """Calls it, and begins a new period."""
        self._last = time.monotonic()
        self.call(trainer)
