"""Which callbacks of Keras cannot work; `test_keras_callbacks.py` has the text of each."""

import keras
import numpy as np
import pytest
from helpers import linear_model

from trainer import Trainer, Updates
from trainer.callbacks import KerasCallbacks
from trainer.callbacks.keras_refused import (
    REFUSED,
    check_keras_callbacks,
    check_model_and_optimizer,
    overrides,
)


def test_hooks_of_instances_count():
    """LambdaCallback has its hooks as attributes."""
    own = keras.callbacks.LambdaCallback(on_epoch_end=print)

    assert overrides(own, "on_epoch_end")
    assert not overrides(own, "on_epoch_begin")
    assert keras.callbacks.CallbackList in REFUSED


def test_a_function_for_the_batches_of_an_evaluation_is_refused():
    """It would never be called. Keras's own methods for them are left out without a word."""
    check_keras_callbacks([keras.callbacks.ProgbarLogger()])
    with pytest.raises(ValueError, match="on_test_batch_end") as error:
        check_keras_callbacks([keras.callbacks.LambdaCallback(on_test_batch_end=print)])
    assert str(error.value) == (
        "`callbacks` must not hold a callback with on_test_batch_end; got LambdaCallback. An "
        "evaluation is one graph call, so the method would never be called. Use on_test_begin and "
        "on_test_end instead."
    )


def test_several_optimizers_have_no_rate_to_set():
    """The callbacks of Keras that set a learning rate know one optimizer."""
    plateau = keras.callbacks.ReduceLROnPlateau()
    optimizers = dict.fromkeys(["first", "second"])

    with pytest.raises(ValueError, match="several") as error:
        check_model_and_optimizer([plateau], keras.Model(), optimizers, None)
    assert str(error.value) == (
        "`callbacks` must not hold keras.callbacks.ReduceLROnPlateau with several optimizers; got "
        "first, second. It sets the learning rate of one optimizer. Use ReduceLROnPlateau of "
        "trainer.callbacks, or assign learning rates in a hook."
    )


def test_a_module_is_no_model():
    """Keras's callbacks call methods that a tf.Module does not have."""
    with pytest.raises(ValueError, match="model") as error:
        check_model_and_optimizer([], object(), {}, None)
    assert str(error.value) == (
        "`model` must be a keras.Model with KerasCallbacks; got object. Keras's callbacks use a "
        "model's methods, such as get_weights. Use callbacks that derive from trainer.Callback."
    )


def best_checkpoint(monitor):
    """A callback that saves the best model."""
    return keras.callbacks.ModelCheckpoint("best.keras", monitor=monitor, save_best_only=True)


def best_weights(monitor):
    """A callback that restores the best weights."""
    return keras.callbacks.EarlyStopping(monitor, restore_best_weights=True)


@pytest.mark.parametrize("make", [best_checkpoint, best_weights])
def test_the_best_weights_of_a_run_with_an_average_are_not_those_evaluated(make):
    """An evaluation uses the average, and the callbacks would keep the weights themselves."""

    def run(monitor, **arguments):
        trainer = Trainer(
            model=linear_model,
            optimizer="sgd",
            loss_fn="mse",
            verbose=False,
            callbacks=[KerasCallbacks([make(monitor)])],
            **arguments,
        )
        data = (np.ones([4, 1], np.float32), np.ones([4, 1], np.float32))
        trainer.train(data, epochs=1, global_batch=4, eval_data=data)

    name = type(make("loss")).__name__
    with pytest.raises(ValueError, match="val_loss") as error:
        run("val_loss", updates=Updates(ema_momentum=0.9))
    assert str(error.value) == (
        f"`callbacks` must not hold keras.callbacks.{name} for the best val_loss of a run with an "
        f"average of the weights; got {name}. An evaluation uses the average, and the callback "
        "would keep the weights themselves, which have another val_loss. Use EarlyStopping of "
        "trainer.callbacks, or keep_best= of Trainer."
    )


def test_other_callbacks_may_watch_a_run_with_an_average():
    """What keeps no weights, or the best of a training loss, or every epoch's, keeps what it says."""
    average = keras.optimizers.SGD(use_ema=True)
    average.build([keras.Variable(1.0)])
    for callback in (
        keras.callbacks.EarlyStopping("val_loss"),
        keras.callbacks.ModelCheckpoint("all.keras", monitor="val_loss"),
        best_checkpoint("loss"),
        best_weights("loss"),
    ):
        check_model_and_optimizer([callback], keras.Model(), average, 0.1)
    plain = keras.optimizers.SGD()
    plain.build([keras.Variable(1.0)])
    for optimizer in (plain, {"a": average, "b": plain}):
        check_model_and_optimizer([best_weights("val_loss")], keras.Model(), optimizer, 0.1)


def test_an_inner_optimizer_without_variables_averages_nothing():
    """The evaluation uses the averages of the others, so the callback is refused."""
    makes = {"nothing.*": keras.optimizers.Adam()}
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(use_ema=True), makes)
    )
    several.build([keras.Variable(1.0)])
    with pytest.raises(ValueError, match="val_loss"):
        check_model_and_optimizer([best_weights("val_loss")], keras.Model(), several, 0.1)
