"""Which callbacks of Keras cannot work; `test_keras_callbacks.py` has the text of each."""

import keras
import pytest

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
