"""Profiles a range of steps, for TensorBoard."""

import pathlib
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import shown


class Profile:
    """Starts TensorFlow's profiler before one step and stops it after another.

    Args:
        steps: the first and the last step to profile.
        model_dir: the run's folder; the profile is written to `plugins/profile` in it. None for a
            worker that profiles nothing, and whose inner loops end where those of the others do.
    """

    def __init__(self, steps: tuple[int, int], model_dir: pathlib.Path | None) -> None:
        """Stores the range of steps; `before` starts the profiler."""
        self._first, self._last = steps
        self._folder = model_dir
        self._running = False
        # Inner loops must end at these steps, so that the profile contains no other steps.
        self.ends = (self._first - 1, self._last)

    def before(self, step: int) -> None:
        """Starts the profiler if the first step to profile follows `step`."""
        if self._folder and step + 1 == self._first:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True

    def after(self, step: int) -> bool:
        """Stops the profiler after the last step to profile; returns whether it was stopped."""
        return step >= self._last and self.end()

    def end(self) -> bool:
        """Stops the profiler if it runs, and returns whether it did."""
        ended, self._running = self._running, False
        if ended:
            tf.profiler.experimental.stop()
        return ended


def check_profile(name: str, steps: Any) -> None:
    """Raises ValueError, naming the argument, unless `steps` is a first and a last step."""
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        raise ValueError(
            f"`{name}` must be the first and the last step to profile; got {shown(steps)}"
        )
