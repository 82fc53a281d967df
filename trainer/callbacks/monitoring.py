"""`Monitoring`: what a run checks, records and reports besides its log lines; the profiler."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer.base.fields import check_fields, switch
from trainer.callbacks.callback import Listener
from trainer.callbacks.divergence import Divergence
from trainer.log.trackers import Tracker


@dataclasses.dataclass(frozen=True)
class Monitoring:
    """What a run checks, records and reports besides its log lines.

    Args:
        profile_steps: the first and the last step to profile for TensorBoard; None profiles none.
        record_gradients: whether to record gradient magnitudes, for reports and the simulator.
            `metrics.jsonl` then holds each step's largest magnitude and counts by exponent, which
            `python -m scaling.simulate` reads. This costs a few passes over the gradients per step.
        check_gradients: whether to compare the step's gradients with those of a plain
            `tf.GradientTape` before the first step. A difference is an error. A few examples are
            compared, once. `dry_run` always does so.
        check_data: whether to check the values of every training batch before its step: finite
            numbers, finite weights, and labels that a cross-entropy of Keras can take. A
            wrong batch ends the run with a DataError that says what it holds; without the check it
            may be a skipped step, or a loss of NaN. This costs a pass over the batch per step.
        divergence: a `trainer.Divergence`, which defines when a run counts as diverged and is
            rolled back. None disables rollbacks.
        trackers: where to record settings, log lines and evaluations besides `model_dir`: "mlflow",
            "wandb", "aim", or objects with the methods of `trainer.Tracker`.

    Raises:
        TypeError, ValueError: for a value that is not allowed.

    Example:
        >>> Monitoring(profile_steps=(101, 110), check_data=True).record_gradients
        False
    """

    profile_steps: Sequence[int] | None = None
    record_gradients: bool = switch(default=False)
    check_gradients: bool = switch(default=False)
    check_data: bool = switch(default=False)
    divergence: Divergence | None = None
    trackers: Sequence[str | Tracker] = ()

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        if self.profile_steps is not None:
            first, last = self.profile_steps
            if not 1 <= first <= last:
                raise ValueError(
                    f"`profile_steps` must be a first and a last step; got {first}, {last}"
                )


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
