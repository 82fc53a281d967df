"""The user's choices about what is saved of a run, and how it is taken up again."""

import dataclasses
import pathlib
from collections.abc import Collection, Sequence

from scaling.base.argument_checks import is_number
from trainer.base.argument_checks import check_bool, check_choice, check_count, check_nonnegative
from trainer.checkpoint.best import BETTER
from trainer.checkpoint.compatibility import check_allow_changes
from trainer.data.iterator_state import RESUME_MODES


@dataclasses.dataclass(frozen=True)
class Saving:
    """See the arguments of the same names in `Trainer`.

    Raises:
        TypeError, ValueError: for a choice there is not.
    """

    checkpoint_interval: int | None = None
    checkpoint_secs: float | None = None
    max_to_keep: int = 5
    async_checkpoint: bool = False
    keep_best: int = 0
    best_metric: str = "loss"
    best_is: str = "lowest"
    data_resume: str = "exact"
    allow_changes: Sequence[str] = ()
    init_from: pathlib.Path | None = None

    def __post_init__(self) -> None:
        """Checks every choice."""
        if self.checkpoint_interval is not None:
            check_count("checkpoint_interval", self.checkpoint_interval)
        secs = self.checkpoint_secs
        if secs is not None and not (is_number(secs) and secs > 0):
            raise ValueError(
                f"`checkpoint_secs` must be positive, or None; got {secs!r}. It is the time "
                "between checkpoints in seconds. 600 is every ten minutes."
            )
        check_count("max_to_keep", self.max_to_keep)
        check_bool("async_checkpoint", self.async_checkpoint)
        check_nonnegative("keep_best", self.keep_best)
        if not isinstance(self.best_metric, str):
            raise TypeError(
                f"`best_metric` must be a name; got {self.best_metric!r}. It is a result of the "
                'evaluation. Use "loss", or the name of a metric.'
            )
        check_choice("best_is", self.best_is, tuple(BETTER))
        check_choice("data_resume", self.data_resume, RESUME_MODES)
        if not isinstance(self.allow_changes, Collection):
            raise TypeError(
                f"`allow_changes` must be a sequence of names; got {self.allow_changes!r}. Each is "
                'something that may differ from the checkpoint. Pass for instance ("seed",).'
            )
        check_allow_changes(self.allow_changes)

    def check_results(self, names: Sequence[str] | None) -> None:
        """Raises ValueError if evaluations have no result to keep the best models by.

        Args:
            names: of the results that they have; None if there are no evaluations.
        """
        if self.keep_best and names is None:
            raise ValueError(
                f"`eval_data` must be given where the best models are kept; got None with "
                f"keep_best={self.keep_best}. Evaluations say which are best. Pass eval_data, or "
                "leave out keep_best."
            )
        if self.keep_best and names is not None and self.best_metric not in names:
            raise ValueError(
                f"`best_metric` must be a result of the evaluation; got {self.best_metric!r} where "
                f"it has {', '.join(names)}. It says which models are kept. Choose one of them."
            )
