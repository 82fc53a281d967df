"""Loss scaling for half-precision training: rules as values, the casts, and the finite check."""

from scaling.finite import all_finite
from scaling.gradients import coalesce, scale_loss, unscale_gradients
from scaling.precision import Precision
from scaling.rules import (
    DynamicLossScale,
    DynamicLossScaleState,
    FixedLossScale,
    FixedLossScaleState,
    LossScaleRule,
    NoLossScale,
    NoLossScaleState,
)
from scaling.scaler import LossScaler
from scaling.verdict import Cause, Verdict

__all__ = [
    "Cause",
    "DynamicLossScale",
    "DynamicLossScaleState",
    "FixedLossScale",
    "FixedLossScaleState",
    "LossScaleRule",
    "LossScaler",
    "NoLossScale",
    "NoLossScaleState",
    "Precision",
    "Verdict",
    "all_finite",
    "coalesce",
    "scale_loss",
    "unscale_gradients",
]
