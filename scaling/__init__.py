"""Loss scaling for half-precision training: rules as values, the casts, checks and diagnosis."""

from scaling.constant import FixedLossScale, FixedLossScaleState, NoLossScale, NoLossScaleState
from scaling.dynamic import DynamicLossScale, DynamicLossScaleState
from scaling.finite import all_finite
from scaling.gradients import coalesce, scale_loss, unscale_gradients
from scaling.headroom import HeadroomLossScale, HeadroomLossScaleState
from scaling.layerwise import LayerwiseGradients, layerwise_gradients
from scaling.layerwise_rule import LayerwiseLossScale
from scaling.logmax import LogMaxLossScale, LogMaxLossScaleState
from scaling.named import parse_rule
from scaling.order import Token
from scaling.precision import Precision
from scaling.presets import preset
from scaling.recommend import Recommendation, recommend
from scaling.rule import LossScaleRule
from scaling.scaler import LossScaler, update_together
from scaling.stats import GradientStats, gradient_stats
from scaling.tolerant import TolerantLossScale, TolerantLossScaleState
from scaling.verdict import Cause, Verdict, as_verdict, find_cause

__all__ = [
    "Cause",
    "DynamicLossScale",
    "DynamicLossScaleState",
    "FixedLossScale",
    "FixedLossScaleState",
    "GradientStats",
    "HeadroomLossScale",
    "HeadroomLossScaleState",
    "LayerwiseGradients",
    "LayerwiseLossScale",
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
    "layerwise_gradients",
    "parse_rule",
    "preset",
    "recommend",
    "scale_loss",
    "unscale_gradients",
    "update_together",
]
