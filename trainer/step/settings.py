"""A step's settings: `Updates`, how gradients become updates, and `Skips`, what a skip leads to."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from scaling import Cause
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


# With on_stuck="hold", a run ends after HOLD_FACTOR * max_consecutive skips in a row.
HOLD_FACTOR = 10


@dataclasses.dataclass(frozen=True)
class Skips:
    """What to do about steps that cannot be applied, and which of them are recorded.

    Args:
        on_overflow: what to do with a batch whose gradients overflow. "skip" leaves the batch
            out. "retry" attempts the batch again in the same step, at the rule's next scale, up to
            max_retries times.
        max_retries: maximum number of further attempts with on_overflow="retry".
        on_nonfinite_loss: what to do with a batch whose unscaled loss is inf or NaN. "skip" leaves
            the batch out. "raise" ends the run.
        max_consecutive: number of skipped steps in a row after which a run counts as stuck.
        on_stuck: what to do after max_consecutive skipped steps in a row. "raise" ends the run
            with an error that explains why. "hold" keeps waiting, warns at every log line, and
            ends the run after ten times as many skipped steps in a row. "float32" computes one
            step in float32 (Keras models only) and goes on.
        attribute_causes: whether the loss scale moves only after overflows that a smaller scale
            may prevent. False backs off after every skipped step, as other systems do.
        max_records: number of skipped steps to keep in `model_dir/overflows`, so that they can be
            run again. The latest are kept. Of several skipped steps in a row, only the first is
            recorded. 0 records none and costs nothing.
        max_record_bytes: upper bound on the total size of these records in bytes.

    Raises:
        TypeError, ValueError: for a value that is not allowed.

    Example:
        >>> Skips(on_overflow="retry", max_retries=3).retries, Skips().retries
        (3, 0)
    """

    on_overflow: str = choice("skip", ("skip", "retry"))
    max_retries: int = count(40)
    on_nonfinite_loss: str = choice("skip", ("skip", "raise"))
    max_consecutive: int = count(100)
    on_stuck: str = choice("raise", ("raise", "hold", "float32"))
    attribute_causes: bool = switch(default=True)
    max_records: int = count(0, least=0)
    max_record_bytes: int = count(2**30)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)

    @property
    def retries(self) -> int:
        """Maximum number of retries in a step; 0 if an overflow is skipped at once."""
        return self.max_retries if self.on_overflow == "retry" else 0

    @property
    def halting_causes(self) -> tuple[Cause, ...]:
        """Causes of a skipped step that end the run."""
        return (Cause.WEIGHTS, Cause.FORWARD)[: 2 if self.on_nonfinite_loss == "raise" else 1]

    @property
    def max_skips(self) -> int:
        """Number of consecutive skips after which the run ends."""
        bound = self.max_consecutive
        return {"raise": bound, "hold": HOLD_FACTOR * bound, "float32": bound + 1}[self.on_stuck]

    @property
    def float32_after(self) -> int | None:
        """Number of consecutive skips before a step is computed in float32; None for never."""
        return self.max_consecutive if self.on_stuck == "float32" else None
