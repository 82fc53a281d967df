"""A separate loss scale for every layer of a chain. Nothing else in `scaling` imports this."""

from scaling.layerwise.chain import LayerwiseGradients, layerwise_gradients
from scaling.layerwise.rule import LayerwiseLossScale

__all__ = ["LayerwiseGradients", "LayerwiseLossScale", "layerwise_gradients"]
