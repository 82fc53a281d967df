"""`Checkpoints`: when checkpoints are written, and how a run resumes from one."""

import dataclasses
import pathlib
from collections.abc import Sequence

from scaling.base.argument_checks import shown
from trainer.base.fields import CHOICES, check_fields, choice, count, switch
from trainer.checkpoint.best import BETTER
from trainer.checkpoint.folder import committed
from trainer.checkpoint.saver import PREFIX
from trainer.data.iterator_state import RESUME_MODES
from trainer.fingerprint import ALLOWABLE


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written to `model_dir`, and how a run resumes from one.

    Args:
        interval: number of steps between checkpoints. None saves only at the end of the run and
            when it is stopped.
        interval_secs: number of seconds since the last checkpoint after which the next one is
            written; may be combined with interval. None ignores the time.
        max_to_keep: number of checkpoints to keep. None keeps all.
        background: whether checkpoints are written in a background thread, from a copy of the
            variables.
        enabled: whether checkpoints are written at all. If not, `model_dir` holds only the log and
            what keep_best keeps, and the run cannot be resumed.
        keep_best: number of models to keep in `model_dir/best`, those with the best evaluations.
        best_metric: name of the evaluation result that decides which models are best.
        best_is: "lowest" or "highest": which value of best_metric is best.
        data_resume: how a resumed run finds its place in the data. "exact" restores the saved
            position. "skip" reads and drops as many batches as were used. "restart" begins a new
            pass.
        allow_changes: settings that may differ from the run that is resumed: "precision",
            "loss_scale", "seed", "num_replicas", "global_batch", "data", "num_microbatches",
            "model", "optimizer", "loss", "global_clipnorm", "clipnorm", "clipvalue",
            "ema_momentum", "alternate_optimizers" and "updates_per_step". A new loss-scale rule
            begins at its initial scale, and a new learning rate replaces the saved one. A change of
            the seed, the global batch or the data restarts the data. docs/resume.md lists all
            changes.
        init_from: a checkpoint, a model_dir, or a file of Keras weights from which a new run loads
            its initial weights. Nothing but the weights is loaded. A resumed run ignores it.
        init_from_skip: regular expressions of the names of weights that init_from does not load,
            such as ("head/",) for a new head. The rest of a checkpoint is then matched by name, and
            must be complete.

    Raises:
        TypeError, ValueError: for a value that is not allowed.

    Example:
        >>> Checkpoints(interval=500, keep_best=1).max_to_keep
        5
    """

    interval: int | None = count(None)
    interval_secs: float | None = None
    max_to_keep: int | None = count(5, optional=True)
    background: bool = switch(default=False)
    enabled: bool = switch(default=True)
    keep_best: int = count(0, least=0)
    best_metric: str = "loss"
    best_is: str = choice("lowest", tuple(BETTER))
    data_resume: str = choice("exact", RESUME_MODES)
    allow_changes: Sequence[str] = dataclasses.field(default=(), metadata={CHOICES: ALLOWABLE})
    init_from: str | pathlib.Path | None = None
    init_from_skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        skip = self.init_from_skip
        if isinstance(skip, str):  # each letter would be an expression, which most names match
            raise TypeError(f"`init_from_skip` must be a list of expressions; got {skip!r}")
        if skip and not self.init_from:
            raise ValueError(f"`init_from_skip` must be empty without init_from; got {skip!r}")

    def folder_in(self, model_dir: pathlib.Path | None) -> pathlib.Path | None:
        """Returns the folder of the checkpoints; None if there are none to write or to restore.

        Raises:
            ValueError: if checkpoints are not written, but `model_dir` holds some: the run would
                begin anew beside them.
        """
        if self.enabled or model_dir is None:
            return model_dir
        if found := [*committed(model_dir, PREFIX).values()]:
            raise ValueError(
                "`enabled` must be True in a model_dir that holds checkpoints; got False and "
                f"{str(found[-1])!r}"
            )
        return None

    def check_results(self, names: Sequence[str] | None) -> None:
        """Raises ValueError if `best_metric` is no result, or if nothing says which model is best.

        Args:
            names: the names of the evaluation results; None if there are no evaluations.
        """
        if self.keep_best and names is None:
            raise ValueError(f"`eval_data` must be given with keep_best={self.keep_best}; got None")
        # With several data sets there is no default `best_metric`.
        chosen = self.keep_best or self.best_metric != Checkpoints.best_metric
        if chosen and names is not None and self.best_metric not in names:
            raise ValueError(
                f"`best_metric` must be one of {', '.join(names)}; got {shown(self.best_metric)}"
            )
