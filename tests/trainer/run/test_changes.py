"""What changes about a model or an optimizer between two calls of a trainer's methods."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Action, Trainer

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=[12, 3]).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def model():
    """Two dense layers with a factor between them."""
    layers = keras.layers
    hidden = layers.Dense(4, activation="tanh", name="hidden")
    return keras.Sequential(
        [
            keras.Input([3]),
            hidden,
            layers.Rescaling(1.0, name="factor"),
            layers.Dense(1, name="out"),
        ],
        name="net",
    )


def trainer_of(**arguments):
    """A trainer with plain SGD."""
    settings = {
        "model": model,
        "optimizer": lambda: keras.optimizers.SGD(0.125),
        "loss_fn": "mse",
        "verbose": False,
        "jit_compile": False,
        "seed": 1,
    }
    return Trainer(**settings | arguments)


def train(trainer, steps):
    """Trains up to a step; returns how far each weight moved."""
    before = trainer.model.get_weights()
    trainer.train((X, Y), steps=steps, global_batch=12)
    after = trainer.model.get_weights()
    return [float(np.abs(new - old).max()) for new, old in zip(after, before, strict=True)]


WAY_OUT = (
    "The optimizer has slots for those variables only. Continue with a new trainer and a new optimizer: "
    "Trainer(model=lambda: trainer.model, strategy=trainer.strategy, optimizer=..., ...)."
)


@pytest.mark.parametrize("replicas", [1, 3])
def test_other_trained_variables_are_refused(mirrored, replicas):
    """L19: a layer that is frozen or unfrozen between two calls is neither trained by mistake nor left
    out in silence. The error names the variable, and what it suggests trains the right ones.
    """
    first = trainer_of(strategy=mirrored(replicas) if replicas > 1 else "default")
    assert all(train(first, 1))
    first.model.get_layer("hidden").trainable = False
    for use in (lambda: train(first, 2), lambda: first.dry_run((X, Y), global_batch=12)):
        with pytest.raises(ValueError, match="`model`") as error:
            use()
        assert str(error.value) == (
            "`model` must train the variables for which its optimizer was built; got "
            f"'net/hidden/kernel', which is no longer trainable. {WAY_OUT}"
        )
    second = trainer_of(model=lambda: first.model, strategy=first.strategy)
    moved = train(second, 1)
    assert moved[:2] == [0.0, 0.0]
    assert min(moved[2:]) > 0.0
    first.model.get_layer("hidden").trainable = True
    with pytest.raises(ValueError, match="`model`") as error:
        train(second, 2)
    assert str(error.value) == (
        "`model` must train the variables for which its optimizer was built; got 'net/hidden/kernel', which "
        f"was not trainable then. {WAY_OUT}"
    )
    assert min(train(trainer_of(model=lambda: first.model, strategy=first.strategy), 1)) > 0.0


def test_lora_is_refused():
    """L19: variables that appear between two calls are named."""
    trainer = trainer_of()
    train(trainer, 1)
    trainer.model.get_layer("out").enable_lora(2)
    with pytest.raises(ValueError, match=r"lora_kernel_a', which was not trainable then\. The"):
        train(trainer, 2)


def test_what_is_evaluated_may_be_frozen():
    """Evaluation and prediction train nothing, so a frozen model is not refused there."""
    trainer = trainer_of()
    train(trainer, 1)
    expected = trainer.evaluate((X, Y), global_batch=12)
    trainer.model.trainable = False

    assert trainer.evaluate((X, Y), global_batch=12) == expected
    assert trainer.predict(X, global_batch=12).shape == (12, 1)


def piecewise(*rates):
    """A schedule with these learning rates, each for two updates."""
    places = [2 * place for place in range(1, len(rates))]
    return keras.optimizers.schedules.PiecewiseConstantDecay(places, list(rates))


@pytest.mark.thorough
def test_a_new_learning_rate_is_used(tmp_path):
    """L10: a number or a schedule that is assigned to `learning_rate` between two calls is used from the
    next step on, and the run can be saved and resumed.
    """
    trainer = trainer_of()
    assert min(train(trainer, 1)) > 0.0
    trainer.optimizer.learning_rate = 0.0
    assert max(train(trainer, 2)) == 0.0
    trainer.optimizer.learning_rate = 0.125
    assert min(train(trainer, 3)) > 0.0

    settings = {
        "model_dir": tmp_path,
        "optimizer": lambda: keras.optimizers.SGD(piecewise(0.125, 0.0)),
    }
    trainer = trainer_of(**settings)
    assert min(train(trainer, 1)) > 0.0
    trainer.optimizer.learning_rate = piecewise(0.0, 0.125)
    assert max(train(trainer, 2)) == 0.0
    assert min(train(trainer, 4)) > 0.0  # the next updates have iterations == 2 and more
    resumed = trainer_of(**settings)
    train(resumed, 4)

    assert int(resumed.optimizer.iterations.numpy()) == 4
    for one, other in zip(resumed.model.get_weights(), trainer.model.get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_schedule_in_place_of_a_number_is_refused():
    """Keras removes the number from the optimizer's variables, which TensorFlow cannot save then."""
    trainer = trainer_of()
    train(trainer, 1)
    trainer.optimizer.learning_rate = piecewise(0.125, 0.0)
    with pytest.raises(ValueError, match="`optimizer`") as error:
        train(trainer, 2)

    assert str(error.value) == (
        "`optimizer` must keep a number as its learning rate if it was made with one; got "
        "PiecewiseConstantDecay. TensorFlow can no longer save this optimizer. Assign a number, or make "
        "the optimizer with the schedule. To change over now, continue with a new trainer and a new "
        "optimizer: Trainer(model=lambda: trainer.model, strategy=trainer.strategy, optimizer=..., ...)."
    )


@pytest.mark.thorough
def test_settings_of_layers_and_optimizers_are_used():
    """What the traced step holds as numbers is traced again if it changes; nothing else is."""
    trainer = trainer_of(ema_momentum=0.5)
    train(trainer, 1)
    run_steps = trainer._parts.run_steps
    train(trainer, 2)
    assert trainer._parts.run_steps is run_steps
    trainer.model.get_layer("factor").scale = 0.0
    moved = train(trainer, 3)
    assert trainer._parts.run_steps is not run_steps
    assert (moved[0], moved[2]) == (0.0, 0.0)  # all activations are 0
    trainer.model.get_layer("factor").scale = 1.0
    trainer.optimizer.clipnorm = 2.0**-10

    assert max(train(trainer, 4)) <= 2.0**-13 * 1.0001
    assert trainer.optimizer.ema_momentum == 0.5
    assert int(trainer.optimizer.iterations.numpy()) == 4


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_another_static_batch_size(num_microbatches):
    """L8: batches of another fixed size take the same steps as in a plain loop."""

    def data(size):
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size, drop_remainder=True).take(1)

    trainer = trainer_of(num_microbatches=num_microbatches)
    plain = model()
    sgd = keras.optimizers.SGD(0.125)
    for step, size in enumerate([12, 6, 4]):
        trainer.train(data(size), steps=step + 1) if step else train_first(
            trainer, data(size), plain
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(X[:size]) - Y[:size]) ** 2)
        sgd.apply(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables)
        for one, other in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)


def train_first(trainer, data, plain):
    """Gives a plain model the trainer's initial weights, and takes one step."""
    plain.set_weights(trainer.model.get_weights())
    trainer.train(data, steps=1)


def test_a_change_during_training_is_refused():
    """L19: hooks and actions cannot change what the step was traced with; the error names it."""

    def freeze(trainer):
        trainer.model.get_layer("hidden").trainable = False

    def scale(trainer):
        trainer.model.get_layer("factor").scale = 0.5

    with pytest.raises(ValueError, match="`model`") as error:
        train(trainer_of(actions=[Action(freeze, every_steps=1)]), 3)
    assert "'net/hidden/kernel', which is no longer trainable" in str(error.value)
    with pytest.raises(ValueError, match="`train`") as error:
        train(trainer_of(actions=[Action(scale, every_steps=1)]), 3)
    assert str(error.value) == (
        "`train` must not meet a change of a layer's or an optimizer's settings while it runs; got a "
        "change of layer 'factor' in a hook or an action. The step was traced before and would not notice. "
        "Change it between two calls of train()."
    )
