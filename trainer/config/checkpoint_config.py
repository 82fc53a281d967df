"""The user's choices about checkpoints: when they are written, and how a run resumes from one."""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import logging

from scaling.base.argument_checks import shown
from trainer.base.argument_checks import check_checkpoint_path
from trainer.checkpoint.best import BETTER
from trainer.checkpoint.compatibility import ARGUMENTS, check_allow_changes
from trainer.checkpoint.folder import committed
from trainer.checkpoint.saver import PREFIX
from trainer.config.fields import (
    CHOICES,
    check_fields,
    check_seconds,
    checked,
    choice,
    count,
    count_or_none,
    switch,
)
from trainer.data.iterator_state import RESUME_MODES


def check_metric_name(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a string, the name of an evaluation result."""
    if not isinstance(value, str):
        raise TypeError(
            f"`{name}` must be the name of an evaluation result; got {shown(value)}. The result "
            'decides which models are best. Pass "loss", or the name of a metric.'
        )


def check_allowed(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` names only settings that may change."""
    if not isinstance(value, Collection):
        raise TypeError(
            f"`{name}` must be a sequence of names; got {shown(value)}. Each name is a setting "
            "that "
            'may differ from the checkpoint. Pass ("seed",), for example.'
        )
    check_allow_changes(value)  # type: ignore[arg-type]  # any collection can be iterated over


def check_expressions(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` is a sequence of regular expressions."""
    if isinstance(value, str | Mapping) or not isinstance(value, Collection):
        raise TypeError(
            f"`{name}` must be a sequence of regular expressions; got {shown(value)}. A weight "
            'whose name contains a match is not loaded. Pass ("head/",), for example.'
        )
    for each in value:
        if fault := fault_of(each):
            raise ValueError(
                f"`{name}` must be a sequence of regular expressions; got {shown(each)} in it. "
                f'That is no expression: {fault}. Pass ("head/",), for example.'
            )


def fault_of(expression: Any) -> str:
    """Returns why something is no regular expression, or ""."""
    if not isinstance(expression, str):
        return "it is no string"
    try:
        re.compile(expression)
    except re.error as error:
        return str(error)
    return ""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints and resuming; see the arguments of the same names in `Trainer`.

    Raises:
        TypeError, ValueError: for a value that is not allowed.
    """

    enable_checkpointing: bool = switch(default=True)
    checkpoint_interval: int | None = count(None)
    checkpoint_secs: float | None = checked(None, check_seconds)
    max_to_keep: int | None = count_or_none(5)
    async_checkpoint: bool = switch(default=False)
    keep_best: int = count(0, or_zero=True)
    best_metric: str = checked("loss", check_metric_name)
    best_is: str = choice("lowest", tuple(BETTER))
    data_resume: str = choice("exact", RESUME_MODES)
    allow_changes: Sequence[str] = checked((), check_allowed, **{CHOICES: tuple(ARGUMENTS)})
    init_from: str | pathlib.Path | None = checked(
        None, lambda name, value: check_checkpoint_path(name, value, "runs/digits/ckpt-1000")
    )
    init_from_skip: Sequence[str] = checked((), check_expressions)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        if self.init_from_skip and not self.init_from:
            raise ValueError(
                "`init_from_skip` must be empty without init_from; got "
                f"{tuple(self.init_from_skip)}. It says which weights are not taken from there. "
                "Pass init_from=, or leave it out."
            )
        for name in ("checkpoint_interval", "checkpoint_secs"):
            if not self.enable_checkpointing and getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` must be None with enable_checkpointing=False; got "
                    f"{getattr(self, name)!r}. No checkpoint is written then. Leave out one of "
                    "the two."
                )

    def folder_in(self, model_dir: pathlib.Path | None) -> pathlib.Path | None:
        """Returns the folder of the checkpoints; None if there are none to write or to restore.

        Raises:
            ValueError: if checkpoints are not written, but `model_dir` holds some.
        """
        if self.enable_checkpointing or model_dir is None:
            return model_dir
        if found := [*committed(model_dir, PREFIX).values()]:
            raise ValueError(
                f"`enable_checkpointing` must be True in a model_dir that holds checkpoints; got "
                f"False and {str(found[-1])!r}. The run would begin anew beside them. Leave out "
                "enable_checkpointing=False, or choose another model_dir."
            )
        return None

    def check_divergence(self, divergence: object) -> None:
        """Raises ValueError if a diverged run would have no checkpoint to go back to."""
        if divergence is not None and not self.enable_checkpointing:
            raise ValueError(
                "`divergence` must be None with enable_checkpointing=False; got a Divergence. A "
                "diverged run goes back to a checkpoint. Leave out one of the two."
            )

    def check_results(self, names: Sequence[str] | None) -> None:
        """Raises ValueError if `best_metric` is no result, or if nothing says which model is best.

        Args:
            names: the names of the evaluation results; None if there are no evaluations.
        """
        if self.keep_best and names is None:
            raise ValueError(
                f"`eval_data` must be given to keep the best models; got None with "
                f"keep_best={self.keep_best}. Evaluations say which models are best. Pass "
                "eval_data=, or leave out keep_best."
            )
        # The default is no choice: without it, no result of several data sets is the best.
        chosen = self.keep_best or self.best_metric != CheckpointConfig.best_metric
        if chosen and names is None:
            logging.warning(
                "best_metric=%r has no effect without eval_data, whose results it compares.",
                self.best_metric,
            )
        if chosen and names is not None and self.best_metric not in names:
            raise ValueError(
                f"`best_metric` must be a result of the evaluation; got {shown(self.best_metric)}, "
                f"but the results are {', '.join(names)}. This result decides which models are "
                "best. Choose one of these results."
            )
