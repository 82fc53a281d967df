"""Callbacks about time: a function at regular intervals, and the end of a run."""

import datetime as dt
import time
from collections.abc import Callable
from typing import Any

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
        ValueError: unless exactly one period is given.

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
        """Stores the arguments and starts the clock."""
        if (every_steps is None) == (every_secs is None):
            raise ValueError(
                f"`every_steps` or `every_secs` must be given, not both; got {every_steps!r}, "
                f"{every_secs!r}"
            )
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


class Timer(Callback):
    """Ends a run after a given time, which is counted over all calls of `train` and resumes.

    The time is looked at between inner loops. The run is then saved, and can be resumed with a
    longer duration. Time between calls of `train` does not count; neither does building and
    tracing before the first step, except for the tracing of the steps themselves.

    Args:
        duration: seconds, or a `datetime.timedelta`.

    Attributes:
        elapsed: the seconds so far.

    Example:
        >>> import datetime as dt, keras, numpy as np
        >>> from trainer import Trainer
        >>> timer = Timer(dt.timedelta(hours=12))
        >>> x = np.ones([8, 1], np.float32)
        >>> line = Trainer(
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...     optimizer="sgd", loss_fn="mse", verbose=False, callbacks=[timer])
        >>> line.train((x, x), 4, global_batch=8).step, 0 < timer.elapsed < timer.duration
        (4, True)
    """

    def __init__(self, duration: float | dt.timedelta) -> None:
        """Stores the duration."""
        in_seconds = duration.total_seconds() if isinstance(duration, dt.timedelta) else duration
        self.duration = float(in_seconds)
        self.elapsed = 0.0
        self._last = 0.0

    def on_train_begin(self) -> None:
        """Starts the clock; ends a run that has used its time before."""
        self._last = time.monotonic()
        self._look()

    def on_loop_end(self, step: int) -> None:
        """Ends the run if its time is over."""
        del step
        self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self.elapsed += now - self._last
        self._last = now
        if self.elapsed >= self.duration:
            self.trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        """Returns the seconds so far."""
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, but a rollback does not bring time back."""
        self.elapsed = max(self.elapsed, state["elapsed"])
