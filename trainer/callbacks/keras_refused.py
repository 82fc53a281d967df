"""Which callbacks of Keras cannot work with a trainer, why, and what to use instead."""

from typing import Any

import keras

from trainer.step.objective import average_weights

REFUSED: dict[type, tuple[str, str]] = {
    keras.callbacks.BackupAndRestore: (
        (
            "The trainer saves and resumes runs itself, with the loss scale and the position in "
            "the data, which it would not"
        ),
        "Pass model_dir= and Checkpoints(interval=) to Trainer",
    ),
    keras.callbacks.OrbaxCheckpoint: (
        "It saves the state of a compiled model, and the trainer does not compile",
        "Pass model_dir= and Checkpoints(interval=) to Trainer, or use ModelCheckpoint",
    ),
    keras.callbacks.SwapEMAWeights: (
        (
            "The trainer evaluates and exports with the average by itself, and the average would "
            "be swapped twice"
        ),
        "Leave it out; trainer.evaluate(data, averaged=False) uses the weights themselves",
    ),
    keras.callbacks.TerminateOnNaN: (
        (
            "A step whose loss or gradient is inf or NaN is skipped, so the logs have no NaN to "
            "terminate on"
        ),
        'Pass Skips(on_nonfinite_loss="raise") to Trainer',
    ),
    keras.callbacks.CallbackList: (
        "KerasCallbacks makes such a list itself",
        "Pass the callbacks that are in it",
    ),
}

# Hooks that Keras calls for every batch of an evaluation.
NEVER_CALLED = ("on_test_batch_begin", "on_test_batch_end")
SET_RATES = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)


def check_keras_callbacks(callbacks: Any) -> None:
    """Raises TypeError or ValueError unless `callbacks` is a list of callbacks that can work."""
    found = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in found:
        if found is not callbacks or not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                "`callbacks` must be a list of keras.callbacks.Callback; got "
                f"{type(callback).__name__}. KerasCallbacks calls the methods of Keras's "
                "callbacks. Pass [keras.callbacks.CSVLogger('log.csv')], for example; a "
                "trainer.Callback belongs into callbacks= of Trainer itself."
            )
        for cls, (why, remedy) in REFUSED.items():
            if isinstance(callback, cls):
                raise ValueError(
                    f"`callbacks` must not hold keras.callbacks.{cls.__name__}; got one. {why}. "
                    f"{remedy}."
                )
        of_keras = type(callback).__module__.startswith("keras.")
        own = [
            hook
            for hook in NEVER_CALLED
            # A LambdaCallback has a user's functions as attributes.
            if hook in vars(callback) or (overrides(callback, hook) and not of_keras)
        ]
        if own:
            raise ValueError(
                f"`callbacks` must not hold a callback with {own[0]}; got "
                f"{type(callback).__name__}. An evaluation is one graph call, so the method would "
                "never be called. Use on_test_begin and on_test_end instead."
            )


def overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Returns whether a callback has a method of its own, in its class or as an attribute."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(
        keras.callbacks.Callback, hook
    )


def check_model_and_optimizer(
    callbacks: list[keras.callbacks.Callback], model: Any, optimizer: Any, rate: Any
) -> None:
    """Raises ValueError if a trainer's model or optimizer does not suit the callbacks.

    Args:
        callbacks: the callbacks.
        model: the trainer's model.
        optimizer: its optimizer, or a dict of several.
        rate: what the learning rate of its only optimizer was set to.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a keras.Model with KerasCallbacks; got {type(model).__name__}. "
            "Keras's callbacks use a model's methods, such as get_weights. Use callbacks that "
            "derive from trainer.Callback."
        )
    optimizers = optimizer.values() if isinstance(optimizer, dict) else [optimizer]
    for callback in callbacks:
        name = type(callback).__name__
        if keeps_best(callback) and average_weights(optimizers):
            raise ValueError(
                f"`callbacks` must not hold keras.callbacks.{name} for the best {callback.monitor} "
                f"of a run with an average of the weights; got {name}. An evaluation uses the "
                "average, and the callback would keep the weights themselves, which have another "
                f"{callback.monitor}. Use EarlyStopping of trainer.callbacks, or keep_best= of "
                "Trainer."
            )
        if not isinstance(callback, SET_RATES):
            continue
        if isinstance(optimizer, dict):
            raise ValueError(
                f"`callbacks` must not hold keras.callbacks.{name} with several optimizers; got "
                f"{', '.join(optimizer)}. It sets the learning rate of one optimizer. Use "
                "ReduceLROnPlateau of trainer.callbacks, or assign learning rates in a hook."
            )
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            raise ValueError(
                f"`callbacks` must not hold keras.callbacks.{name} if a schedule decides the "
                f"learning rate; got {type(rate).__name__}. The optimizer has no number to set. "
                "Make the optimizer with a number, or leave the callback out."
            )


def keeps_best(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback keeps the weights that had the best result of an evaluation."""
    keeps = (isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only) or (
        isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
    )
    return bool(keeps and callback.monitor.startswith("val_"))
