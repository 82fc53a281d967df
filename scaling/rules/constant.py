"""The two rules whose scale never changes: a fixed loss scale, and no loss scaling."""

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaling.base.number_formats import check_power_of_two
from scaling.base.verdict import VerdictLike
from scaling.rules.rule import normalize_numbers


class FixedLossScaleState(NamedTuple):
    """The state of `FixedLossScale`: the scale, which never changes.

    Example:
        >>> float(FixedLossScale(8.0).initial_state().loss_scale)
        8.0
    """

    loss_scale: tf.Tensor  # shape=(), float32


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
    """Keeps one loss scale for the whole run. Steps that overflow are still skipped.

    Attributes:
        loss_scale: a power of two in [2^-126, 2^126].

    Raises:
        ValueError: if the scale is not a power of two in that range.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2,
        https://arxiv.org/abs/1710.03740: "a constant scaling factor".

    Example:
        >>> rule = FixedLossScale(1024.0)
        >>> float(rule.advance(rule.initial_state(), False).loss_scale)
        1024.0
    """

    loss_scale: float

    needs_magnitude: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Rejects a scale that is not a power of two, which would round the gradients."""
        check_power_of_two("loss_scale", self.loss_scale)
        normalize_numbers(self)

    def initial_state(self) -> FixedLossScaleState:
        """Returns the only state of this rule."""
        return FixedLossScaleState(tf.constant(self.loss_scale))

    def advance(self, state: FixedLossScaleState, verdict: VerdictLike) -> FixedLossScaleState:
        """Returns the state with this rule's scale, even if `state` was saved with another one."""
        del state, verdict
        return self.initial_state()


class NoLossScaleState(NamedTuple):
    """The state of `NoLossScale`: a scale of 1. Nothing is multiplied by it.

    Example:
        >>> float(NoLossScale().initial_state().loss_scale)
        1.0
    """

    loss_scale: tf.Tensor  # shape=(), float32: always 1


@dataclasses.dataclass(frozen=True)
class NoLossScale:
    """No loss scaling, for float32 and bfloat16. Non-finite steps are still skipped.

    Source:
        Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019,
        https://arxiv.org/abs/1905.12322: bfloat16 needs no loss scaling.

    Example:
        >>> state = NoLossScale().initial_state()
        >>> float(state.loss_scale)
        1.0
    """

    needs_magnitude: ClassVar[bool] = False

    def initial_state(self) -> NoLossScaleState:
        """Returns the only state of this rule."""
        return NoLossScaleState(tf.constant(1.0))

    def advance(self, state: NoLossScaleState, verdict: VerdictLike) -> NoLossScaleState:
        """Returns the only state of this rule."""
        del state, verdict
        return self.initial_state()
