"""Callbacks that are ready to use, for `Trainer(callbacks=[...])`."""

from trainer.callbacks.callback import Callback
from trainer.callbacks.keras_callbacks import KerasCallbacks
from trainer.callbacks.learning_rate_finder import LearningRates, find_learning_rate
from trainer.callbacks.monitored import BestWeights, EarlyStopping, ReduceLROnPlateau
from trainer.callbacks.timed import Timer

__all__ = [
    "BestWeights",
    "Callback",
    "EarlyStopping",
    "KerasCallbacks",
    "LearningRates",
    "ReduceLROnPlateau",
    "Timer",
    "find_learning_rate",
]
