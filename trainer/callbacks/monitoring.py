"""`Monitoring`: what a run checks, records and reports besides its log lines."""

import dataclasses
from collections.abc import Sequence

from trainer.base.fields import check_fields, checked, switch
from trainer.callbacks.divergence import Divergence
from trainer.callbacks.profiling import check_profile
from trainer.log.trackers import Tracker, check_trackers


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

    profile_steps: Sequence[int] | None = checked(None, check_profile)
    record_gradients: bool = switch(default=False)
    check_gradients: bool = switch(default=False)
    check_data: bool = switch(default=False)
    divergence: Divergence | None = None
    trackers: Sequence[str | Tracker] = checked((), check_trackers)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
