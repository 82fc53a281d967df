"""Profiles a range of steps, for TensorBoard."""

import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.callbacks.callback import Listener


class Profile(Listener):
    """Starts TensorFlow's profiler before one step and stops it after another.

    Args:
        steps: the first and the last step to profile.
        model_dir: the run's folder; the profile is written to `plugins/profile` in it. None for a
            worker that profiles nothing, and whose inner loops end where those of the others do.
        say: prints a line.
    """

    reads = False

    def __init__(
        self, steps: tuple[int, int], model_dir: pathlib.Path | None, say: Callable[[str], None]
    ) -> None:
        """Stores the range of steps; `before` starts the profiler."""
        self._first, self._last = steps
        self._folder = model_dir
        self._say = say
        self._running = False

    def next_stop(self, step: int) -> int | None:
        """Returns a step at which a loop must end, so that the profile contains no other steps."""
        ends = [end for end in (self._first - 1, self._last) if end > step]
        return min(ends, default=None)

    def before(self, step: int) -> None:
        """Starts the profiler if the first step to profile follows `step`."""
        if self._folder and step + 1 == self._first:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True

    def after(self, step: int) -> None:
        """Stops the profiler after the last step to profile."""
        if step >= self._last:
            self.end()

    def end(self) -> None:
        """Stops the profiler if it runs."""
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()
            self._say(f"profiled, for TensorBoard: {self._folder}/plugins/profile")


def check_profile(name: str, steps: Any) -> None:
    """Raises ValueError, naming the argument, unless `steps` is a first and a last step."""
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        raise ValueError(f"`{name}` must be the first and the last step to profile; got {steps}")
