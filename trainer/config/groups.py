"""The trainer's settings, in groups. Each default and each check stands here once.

The arguments of `Trainer` and the flags of `trainer.flags` take their defaults from these fields.
What each argument means is said in the docstring of `Trainer`, from which flags take their help.
Two groups that have more to say have files of their own: `checkpoint_config.py`, `skip_policy.py`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import scaling
from scaling.ops.precision import COMPUTE_DTYPES
from trainer.base.argument_checks import check_ema_momentum, check_path, check_seed
from trainer.config.fields import check_fields, checked, choice, count, switch
from trainer.config.resolve import resolve_rule, resolve_strategy, warn_of_conflicts
from trainer.log.console import resolve_style
from trainer.monitor.actions import Action, check_actions
from trainer.monitor.divergence import Divergence, check_divergence
from trainer.monitor.profiling import check_profile
from trainer.step.clip import Clip
from trainer.step.xla import COMPILE_MODES


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The number format of the computation, and the scale of the loss."""

    precision: str = choice("float32", tuple(COMPUTE_DTYPES))
    loss_scale: Any = "auto"

    def __post_init__(self) -> None:
        """Checks the fields."""
        scaling.Precision(self.precision)
        self.rule  # noqa: B018  # resolves the argument, or raises
        warn_of_conflicts(self.loss_scale, self.resolved)

    @property
    def resolved(self) -> scaling.Precision:
        """The precision that the name stands for."""
        return scaling.Precision(self.precision)

    @functools.cached_property
    def rule(self) -> scaling.LossScaleRule:
        """The loss-scale rule that the argument stands for."""
        return resolve_rule(self.loss_scale, self.resolved)


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How gradients become an update."""

    num_microbatches: int = count(1)
    global_clipnorm: float | None = Clip.global_clipnorm
    clipnorm: float | None = Clip.clipnorm
    clipvalue: float | None = Clip.clipvalue
    ema_momentum: float | None = checked(None, lambda _, value: check_ema_momentum(value))
    alternate_optimizers: bool = switch(default=False)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        self.clip  # noqa: B018  # checks the bounds

    @functools.cached_property
    def clip(self) -> Clip:
        """The bound on the gradients."""
        return Clip(self.global_clipnorm, self.clipnorm, self.clipvalue)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where a run computes, and how many steps at a time."""

    model_dir: str | pathlib.Path | None = checked(
        None, lambda name, value: check_path(name, value, "runs/digits", optional=True)
    )
    strategy: str | tf.distribute.Strategy = "default"
    steps_per_loop: int = count(10)
    jit_compile: bool | str = choice("auto", ("auto", *COMPILE_MODES))
    seed: int | None = checked(None, lambda _, value: check_seed(value))

    def __post_init__(self) -> None:
        """Checks the fields, except the strategy, which `resolved_strategy` makes."""
        check_fields(self)

    @functools.cached_property
    def resolved_strategy(self) -> tf.distribute.Strategy:
        """The strategy that the argument stands for."""
        return resolve_strategy(self.strategy)

    @property
    def folder(self) -> pathlib.Path | None:
        """`model_dir` as a path."""
        return None if self.model_dir is None else pathlib.Path(self.model_dir)


@dataclasses.dataclass(frozen=True)
class OverflowRecordConfig:
    """Which skipped steps are recorded."""

    max_overflow_records: int = count(0, or_zero=True)
    max_overflow_bytes: int = count(2**30)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)


def check_verbose(name: str, value: Any) -> None:
    """Raises TypeError or ValueError, naming the argument, unless `value` is a style."""
    del name  # the error names it
    resolve_style(value)


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """What a run shows, records and watches."""

    log_interval: int = count(100)
    verbose: bool | str = checked(True, check_verbose)
    profile_steps: Sequence[int] | None = None
    record_gradients: bool = switch(default=False)
    divergence: Divergence | None = None
    actions: Sequence[Action] = ()

    def __post_init__(self) -> None:
        """Checks the fields that need nothing else; `check_model_dir` checks the others."""
        check_fields(self)
        check_actions(self.actions)

    def check_model_dir(self, model_dir: object) -> None:
        """Raises TypeError or ValueError for a profile or a divergence that cannot be used."""
        check_profile(self.profile_steps, model_dir)
        check_divergence(self.divergence, model_dir)
