"""What shall happen when a step cannot be applied, and when one after the other cannot."""

import dataclasses

import keras

from scaling import Cause
from trainer.base.argument_checks import check_choice, check_count

ON_OVERFLOW = ("skip", "retry")
ON_NONFINITE_LOSS = ("skip", "raise")
ON_STUCK = ("raise", "hold", "float32")

# "hold" waits this many times longer than "raise" does.
PATIENCE = 10


@dataclasses.dataclass(frozen=True)
class SkipPolicy:
    """The user's choices; see the arguments of the same names in `Trainer`.

    Raises:
        ValueError: for a choice there is not.
    """

    on_overflow: str = "skip"
    max_retries: int = 40
    on_nonfinite_loss: str = "skip"
    max_consecutive_skips: int = 100
    on_stuck: str = "raise"
    attribute_causes: bool = True

    def __post_init__(self) -> None:
        """Checks every choice."""
        check_choice("on_overflow", self.on_overflow, ON_OVERFLOW)
        check_count("max_retries", self.max_retries)
        check_choice("on_nonfinite_loss", self.on_nonfinite_loss, ON_NONFINITE_LOSS)
        check_count("max_consecutive_skips", self.max_consecutive_skips)
        check_choice("on_stuck", self.on_stuck, ON_STUCK)
        if not isinstance(self.attribute_causes, bool):
            raise TypeError(
                f"`attribute_causes` must be True or False; got {self.attribute_causes!r}. It says "
                "whether the scale moves only after overflows. Leave it at True."
            )

    def check_model(self, model: object) -> None:
        """Raises ValueError if this model cannot be computed in float32 for want of layers."""
        if self.on_stuck == "float32" and not isinstance(model, keras.Model):
            raise ValueError(
                '`on_stuck` must be "raise" or "hold" unless the model is a keras.Model; got '
                f'"float32" for a {type(model).__name__}. A module casts for itself, and only it '
                "knows how to stop. Choose one of the two."
            )

    @property
    def retries(self) -> int:
        """How often a step is attempted again: 0 if it is skipped at once."""
        return self.max_retries if self.on_overflow == "retry" else 0

    @property
    def halting_causes(self) -> tuple[Cause, ...]:
        """Causes after which no further step may be attempted."""
        return (Cause.WEIGHTS, Cause.FORWARD)[: 2 if self.on_nonfinite_loss == "raise" else 1]

    @property
    def max_skips(self) -> int:
        """How many skips in a row end the run."""
        bound = self.max_consecutive_skips
        return {"raise": bound, "hold": PATIENCE * bound, "float32": bound + 1}[self.on_stuck]

    @property
    def float32_after(self) -> int | None:
        """After how many skips in a row a step is computed in float32."""
        return self.max_consecutive_skips if self.on_stuck == "float32" else None
