"""A profile of some steps, for TensorBoard's profiler."""

import pathlib
from typing import Any

import tensorflow as tf


class Profile:
    """Starts TensorFlow's profiler before one step and stops it after another.

    Args:
        steps: the first and the last step of it.
        model_dir: of the run; the profile goes to `plugins/profile` in it.
    """

    def __init__(self, steps: tuple[int, int], model_dir: pathlib.Path) -> None:
        """Starts nothing yet."""
        self._first, self._last = steps
        self._folder = model_dir
        self._running = False
        # An inner loop has to end here, so that nothing else is in it.
        self.ends = (self._first - 1, self._last)

    def before(self, step: int) -> None:
        """Starts it, if step + 1 is the first."""
        if step + 1 == self._first:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True

    def after(self, step: int) -> bool:
        """Stops it, if the last has come; returns whether that was so."""
        ended = self._running and step >= self._last
        if ended:
            tf.profiler.experimental.stop()
            self._running = False
        return ended


def check_profile(steps: Any, model_dir: Any) -> None:
    """Raises ValueError unless `profile_steps` are two steps in order, and there is a folder."""
    if steps is None:
        return
    whole = isinstance(steps, (tuple, list)) and all(type(step) is int for step in steps)
    if not whole or len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        raise ValueError(
            f"`profile_steps` must be the first and the last step to profile; got {steps!r}. Each "
            "is at least 1, the last not before the first. Pass for instance (101, 110)."
        )
    if model_dir is None:
        raise ValueError(
            f"`profile_steps` must be None without `model_dir`; got {steps!r}. A profile is a "
            "file. Pass model_dir=."
        )
