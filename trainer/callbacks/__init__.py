"""Callbacks that are ready to use, for `Trainer(callbacks=[...])`."""

from trainer.callbacks.callback import Callback
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.keras_callbacks import KerasCallbacks
from trainer.callbacks.learning_rate_finder import LearningRates, find_learning_rate
from trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from trainer.callbacks.timer import Timer
from trainer.callbacks.weights import BestWeights

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
