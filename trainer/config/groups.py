"""The trainer's settings, in groups. Each default and each check is defined once, in its group.

The arguments of `Trainer` and the flags of `trainer.flags` take their defaults from these fields.
The docstring of `Trainer` explains each argument, and flags take their help from it. Two larger
groups have files of their own: `checkpoint_config.py` and `skip_policy.py`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import scaling
from scaling.ops.precision import COMPUTE_DTYPES
from strategies.checks import REDUCE_DTYPES, check_reduce_dtype
from trainer.base.argument_checks import (
    check_checkpoint_path,
    check_ema_momentum,
    check_seed,
    local_path,
)
from trainer.callbacks.action import Action, check_actions
from trainer.callbacks.callback import Callback
from trainer.callbacks.divergence import Divergence, check_divergence
from trainer.callbacks.profiling import check_profile
from trainer.config.fields import CHOICES, check_fields, checked, choice, count, switch
from trainer.config.hooks import check_callbacks
from trainer.config.resolve import (
    resolve_precision,
    resolve_rule,
    resolve_strategy,
    warn_of_conflicts,
    warn_of_other_policy,
)
from trainer.log.console import resolve_style
from trainer.log.trackers import Tracker, check_trackers
from trainer.step.clip import Clip
from trainer.step.gather_checks import LOSS_REDUCTIONS, check_loss_reduction
from trainer.step.objective import check_update_counts
from trainer.step.xla import COMPILE_MODES


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The precision of the computation, and the loss scale."""

    precision: str | None = dataclasses.field(
        default=None, metadata={CHOICES: tuple(COMPUTE_DTYPES)}
    )
    loss_scale: Any = "auto"

    def __post_init__(self) -> None:
        """Checks the fields."""
        self.rule  # noqa: B018  # resolves the argument, or raises
        warn_of_conflicts(self.loss_scale, self.resolved)
        if self.precision is not None:
            warn_of_other_policy(self.resolved)

    @functools.cached_property
    def resolved(self) -> scaling.Precision:
        """The `Precision` that `precision` names."""
        return resolve_precision(self.precision)

    @functools.cached_property
    def rule(self) -> scaling.LossScaleRule:
        """The loss-scale rule that `loss_scale` selects."""
        return resolve_rule(self.loss_scale, self.resolved)


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How gradients are turned into an update."""

    loss_reduction: str = choice("mean", LOSS_REDUCTIONS)
    num_microbatches: int = count(1)
    global_clipnorm: float | None = Clip.global_clipnorm
    clipnorm: float | None = Clip.clipnorm
    clipvalue: float | None = Clip.clipvalue
    ema_momentum: float | None = checked(None, lambda _, value: check_ema_momentum(value))
    alternate_optimizers: bool = switch(default=False)
    updates_per_step: Mapping[str, int] | None = None
    reduce_dtype: str | None = checked(None, check_reduce_dtype, choices=REDUCE_DTYPES)
    reduce_bucket_bytes: int | None = count(None)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        check_update_counts(
            self.updates_per_step,
            alternate=self.alternate_optimizers,
            switch="alternate_optimizers",
        )
        check_loss_reduction(self.loss_reduction, self.num_microbatches)
        self.clip  # noqa: B018  # checks the bounds

    @functools.cached_property
    def clip(self) -> Clip:
        """The clipping bound, as a `Clip`."""
        return Clip(self.global_clipnorm, self.clipnorm, self.clipvalue)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The folder, the strategy, the compile mode and the seed of a run."""

    model_dir: str | pathlib.Path | None = checked(
        None, lambda name, value: check_checkpoint_path(name, value, "runs/digits")
    )
    strategy: str | tf.distribute.Strategy = "default"
    steps_per_loop: int = count(10)
    jit_compile: bool | str = choice("auto", ("auto", *COMPILE_MODES))
    seed: int | None = checked(None, lambda _, value: check_seed(value))

    def __post_init__(self) -> None:
        """Checks all fields except `strategy`, which is checked by `resolved_strategy`."""
        check_fields(self)

    @functools.cached_property
    def resolved_strategy(self) -> tf.distribute.Strategy:
        """The strategy itself, created if `strategy` is a name."""
        return resolve_strategy(self.strategy)

    @property
    def folder(self) -> pathlib.Path | None:
        """`model_dir` as an absolute path, so that it does not follow the working directory."""
        return None if self.model_dir is None else local_path(self.model_dir).absolute()


@dataclasses.dataclass(frozen=True)
class OverflowRecordConfig:
    """How many skipped steps are recorded, and the maximum total size of the records."""

    max_overflow_records: int = count(0, or_zero=True)
    max_overflow_bytes: int = count(2**30)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)


def check_verbose(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `verbose` accepts `value`."""
    del name  # the error from `resolve_style` names the argument
    resolve_style(value)


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """What a run prints, logs and monitors."""

    log_interval: int = count(100)
    verbose: bool | str = checked(True, check_verbose)
    profile_steps: Sequence[int] | None = None
    record_gradients: bool = switch(default=False)
    check_gradients: bool = switch(default=False)
    check_data: bool = switch(default=False)
    divergence: Divergence | None = None
    actions: Sequence[Action] = ()
    trackers: Sequence[str | Tracker] = checked((), check_trackers)
    callbacks: Sequence[Callback] = checked((), check_callbacks)

    def __post_init__(self) -> None:
        """Checks the fields that do not depend on `model_dir`; see `check_model_dir`."""
        check_fields(self)
        check_actions(self.actions)

    def check_model_dir(self, model_dir: object) -> None:
        """Raises TypeError or ValueError if `profile_steps` or `divergence` cannot be used."""
        check_profile(self.profile_steps, model_dir)
        check_divergence(self.divergence, model_dir)
