"""`Timer`: ends a run after a given time."""

import datetime as dt
import time
from typing import Any

from trainer.callbacks.callback import Callback


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
