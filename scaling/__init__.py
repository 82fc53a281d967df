"""Loss scaling for half-precision training: rules, casts, checks and diagnosis."""

from scaling.base import tensorflow_startup

tensorflow_startup.import_tensorflow()  # before anything else imports it

from scaling.base.verdict import Cause, Verdict, as_verdict, find_cause
from scaling.ops.gradients import all_finite, coalesce, scale_loss, unscale_gradients
from scaling.ops.precision import Precision
from scaling.rules.constant import (
    FixedLossScale,
    FixedLossScaleState,
    NoLossScale,
    NoLossScaleState,
)
from scaling.rules.dynamic import DynamicLossScale, DynamicLossScaleState
from scaling.rules.headroom import HeadroomLossScale, HeadroomLossScaleState
from scaling.rules.logmax import LogMaxLossScale, LogMaxLossScaleState
from scaling.rules.named import parse_rule, preset
from scaling.rules.rule import LossScaleRule
from scaling.rules.tolerant import TolerantLossScale, TolerantLossScaleState
from scaling.scaler import LossScaler, Token, update_together
from scaling.telemetry.stats import GradientStats, Recommendation, gradient_stats, recommend

__all__ = [
    "Cause",
    "DynamicLossScale",
    "DynamicLossScaleState",
    "FixedLossScale",
    "FixedLossScaleState",
    "GradientStats",
    "HeadroomLossScale",
    "HeadroomLossScaleState",
    "LogMaxLossScale",
    "LogMaxLossScaleState",
    "LossScaleRule",
    "LossScaler",
    "NoLossScale",
    "NoLossScaleState",
    "Precision",
    "Recommendation",
    "Token",
    "TolerantLossScale",
    "TolerantLossScaleState",
    "Verdict",
    "all_finite",
    "as_verdict",
    "coalesce",
    "find_cause",
    "gradient_stats",
    "parse_rule",
    "preset",
    "recommend",
    "scale_loss",
    "unscale_gradients",
    "update_together",
]
