"""What to do when a step cannot be applied, and when many steps in a row cannot."""

import dataclasses

import keras

from scaling import Cause
from trainer.config.fields import check_fields, choice, count, switch

# With on_stuck="hold", a run ends after HOLD_FACTOR * max_consecutive_skips skips in a row.
HOLD_FACTOR = 10


@dataclasses.dataclass(frozen=True)
class SkipPolicy:
    """What to do about skipped steps; see the arguments of the same names in `Trainer`.

    Raises:
        TypeError, ValueError: for a value that is not allowed.
    """

    on_overflow: str = choice("skip", ("skip", "retry"))
    max_retries: int = count(40)
    on_nonfinite_loss: str = choice("skip", ("skip", "raise"))
    max_consecutive_skips: int = count(100)
    on_stuck: str = choice("raise", ("raise", "hold", "float32"))
    attribute_causes: bool = switch(default=True)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)

    def check_model(self, model: object) -> None:
        """Raises ValueError if `on_stuck` is "float32" and the model is not a Keras model."""
        if self.on_stuck == "float32" and not isinstance(model, keras.Layer):
            raise ValueError(
                '`on_stuck` must be "raise" or "hold" unless the model is a keras.Model; got '
                f'"float32" with a {type(model).__name__}. A tf.Module casts by itself, so the '
                'trainer cannot make it compute in float32. Use "raise" or "hold".'
            )

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
        bound = self.max_consecutive_skips
        return {"raise": bound, "hold": HOLD_FACTOR * bound, "float32": bound + 1}[self.on_stuck]

    @property
    def float32_after(self) -> int | None:
        """Number of consecutive skips before a step is computed in float32; None for never."""
        return self.max_consecutive_skips if self.on_stuck == "float32" else None
