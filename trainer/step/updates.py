"""`Updates`: how the gradients of a step become updates of the weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from scaling.base.argument_checks import is_integer, is_number, shown
from strategies.collectives import REDUCE_DTYPES
from trainer.base.fields import check_fields, checked, choice, count, switch

# A smaller bound is 0 in float32. With a larger one, the product of a gradient and the bound, which
# `tf.clip_by_norm` computes, could be inf: a gradient that passes the verdict is below 2^64.
SMALLEST, LARGEST = 2.0**-126, 2.0**63


def check_bound(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` can bound gradients in float32."""
    if not is_number(value) or not SMALLEST <= value <= LARGEST:
        raise ValueError(f"`{name}` must be None, or from 2^-126 to 2^63; got {shown(value)}")


def check_momentum(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is strictly between 0 and 1."""
    if not is_number(value) or not 0 < value < 1:
        raise ValueError(f"`{name}` must be strictly between 0 and 1; got {shown(value)}")


@dataclasses.dataclass(frozen=True)
class Updates:
    """How the gradients of a step become updates of the weights.

    Args:
        global_clipnorm: upper bound on the global norm of all gradients; with optimizers that
            alternate, of the gradients of each update. None sets no bound.
        clipnorm: upper bound on the norm of each variable's gradient. None sets no bound.
        clipvalue: upper bound on the magnitude of each gradient element. None sets no bound. At
            most one of the three bounds may be set.
        ema_momentum: momentum of a moving average of the weights, between 0 and 1. Evaluation and
            export use the average. None keeps no average.
        alternate_optimizers: whether several optimizers take turns, so that the gradients of each
            are computed after the optimizers before it have been applied. False computes all
            gradients at the old weights. In both cases either all optimizers are applied, or none
            is.
        updates_per_step: number of updates in each step, keyed by the names of optimizers that
            alternate, such as {"critic": 5}; other optimizers are updated once. All updates of a
            step use its batch, and each one draws new random numbers.
        reduce_dtype: the dtype in which gradients are sent and summed over replicas: "float16" or
            "bfloat16", with half the bytes. None sums them in float32. A value or a sum beyond the
            dtype's range is an overflow of the reduction: the step is skipped on all replicas and
            the loss scale backs off. "float16" needs a loss scale, because gradients under 2^-25
            become 0 in it. Losses, flags and statistics are always summed in float32. With one
            replica nothing is summed, and the setting has no effect.
        reduce_bucket_bytes: size of a bucket of gradients. Each bucket is summed over replicas by
            an all-reduce of its own, beginning with the last layers, so that the first sums can run
            beside the rest of the backward pass. None sums all gradients by one all-reduce. Without
            effect on one replica, and on several CPU devices of one process.

    Raises:
        TypeError, ValueError: for a value that is not allowed.

    Example:
        >>> Updates(global_clipnorm=1.0, ema_momentum=0.999).bounds
        {'global_clipnorm': 1.0}
    """

    global_clipnorm: float | None = checked(None, check_bound)
    clipnorm: float | None = checked(None, check_bound)
    clipvalue: float | None = checked(None, check_bound)
    ema_momentum: float | None = checked(None, check_momentum)
    alternate_optimizers: bool = switch(default=False)
    updates_per_step: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reduce_dtype: str | None = choice(None, REDUCE_DTYPES)
    reduce_bucket_bytes: int | None = count(None)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        if len(self.bounds) > 1:
            found = ", ".join(f"{name}={bound!r}" for name, bound in self.bounds.items())
            raise ValueError(
                f"`{next(iter(self.bounds))}` must be None if another bound is set; got {found}"
            )
        for name, number in self.updates_per_step.items():
            if not is_integer(number) or number < 1:
                raise ValueError(
                    f"`updates_per_step` must have positive integers as values; got {name!r}: "
                    f"{number!r}"
                )
        if self.updates_per_step and not self.alternate_optimizers:
            raise ValueError(
                "`updates_per_step` must be used with alternate_optimizers=True; got "
                f"{dict(self.updates_per_step)!r} without it"
            )

    @property
    def bounds(self) -> dict[str, float]:
        """The bound on the gradients that is set, keyed by its name; none or one."""
        names = ("global_clipnorm", "clipnorm", "clipvalue")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
