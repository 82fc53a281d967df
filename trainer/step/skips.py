"""`Skips`: what to do when a step cannot be applied, and when many steps in a row cannot."""

import dataclasses

from scaling import Cause
from trainer.base.fields import check_fields, choice, count, switch

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
