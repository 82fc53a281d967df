"""What a traced step may have read: plain attributes of layers, modules and the trainer."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Action, Trainer
from trainer.run.plain_attributes import attributes_of_layer, attributes_of_trainer


class Powers(keras.layers.Layer):
    """Counts its calls, and reads a number, a flag and a name."""

    def __init__(self, **arguments):
        """Multiplies by 1."""
        super().__init__(**arguments)
        self.factor, self.mode, self.calls, self.unread = 1, "plain", 0, 0

    def call(self, inputs):
        """Multiplies."""
        self.calls += 1
        return inputs * self.factor * (1.0 if self.mode == "plain" else 10.0)


class Weighted(Trainer):
    """A loss with a factor, a plain attribute of the trainer."""

    beta = 1
    seen = 0

    def compute_loss(self, batch, training):
        """The output times the factor."""
        return self.weigh(tf.cast(self.model(batch[0], training=training), tf.float32)[:, 0])

    def weigh(self, losses):
        """Multiplies; it is called by a method that is traced."""
        return losses * self.beta

    def on_log(self, step, values):
        """Counts, which no step reads."""
        self.seen += 1


def weighted(**arguments):
    """Returns a trainer whose loss is 1 until something changes."""
    dense = {"kernel_initializer": "ones", "use_bias": False}
    return Weighted(
        model=lambda: keras.Sequential(
            [keras.Input([1]), Powers(name="powers"), keras.layers.Dense(1, **dense)]
        ),
        optimizer=lambda: keras.optimizers.SGD(0.0),
        log_interval=1,
        steps_per_loop=1,
        verbose=False,
        **arguments,
    )


ONES = np.ones([4, 1], np.float32)


def changing(name, value):
    """Returns a function that changes an attribute of a trainer's layer."""
    return lambda trainer: setattr(trainer.model.get_layer("powers"), name, value)


CHANGES = [
    (lambda trainer: setattr(trainer, "beta", np.float32(5)), 5.0, "trainer.beta"),
    pytest.param(changing("factor", 3), 3.0, "layer 'powers'", marks=pytest.mark.thorough),
    pytest.param(changing("mode", "x"), 10.0, "layer 'powers'", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("change", "loss", "name"), CHANGES)
def test_a_number_or_name_that_the_step_read_is_read_again(change, loss, name):
    """L19: an attribute of a layer or of the trainer that its traced methods read: the next call of
    `train`, `evaluate` and `predict` uses the new value, and a change by a hook is refused.
    """
    del name
    trainer = weighted()
    assert trainer.train((ONES, ONES), 2, global_batch=4).history["loss"][-1] == 1.0
    change(trainer)
    assert trainer.evaluate((ONES, ONES), global_batch=4)["loss"] == loss
    assert trainer.train((ONES, ONES), 4, global_batch=4).history["loss"][-1] == loss


@pytest.mark.thorough
@pytest.mark.parametrize(("change", "loss", "name"), CHANGES)
def test_a_hook_that_changes_what_the_step_read_is_refused(change, loss, name):
    """The step was traced before, and would go on with the old value."""
    del loss
    trainer = weighted(actions=[Action(change, every_steps=1)])
    with pytest.raises(ValueError, match="in a hook") as refused:
        trainer.train((ONES, ONES), 2, global_batch=4)
    assert f"; got a change of {name}, in a hook or an action." in str(refused.value)


def test_what_a_layer_counts_and_what_no_step_reads_changes_nothing():
    """The step is not traced again for a count of calls, or for a number that only hooks read."""
    trainer = weighted()
    trainer.train((ONES, ONES), 2, global_batch=4)
    calls = trainer.model.get_layer("powers").calls
    trainer.model.get_layer("powers").unread = 7
    trainer.train((ONES, ONES), 4, global_batch=4)
    assert trainer.seen == 4
    assert trainer.model.get_layer("powers").calls == calls


class Scaled(tf.Module):
    """A module with a factor."""

    def __init__(self):
        """Multiplies by 1."""
        super().__init__()
        self.weight, self.factor = tf.Variable(1.0), 1.0

    def __call__(self, x, training=None):
        """Multiplies."""
        return x * self.weight * self.factor


@pytest.mark.thorough
def test_a_number_of_a_module_is_read_again():
    """The same for a `tf.Module`."""
    trainer = Trainer(
        model=Scaled, optimizer=lambda: keras.optimizers.SGD(0.0), loss_fn="mae", verbose=False
    )
    trainer.train((ONES, 0 * ONES), 2, global_batch=4)
    trainer.model.factor = 3.0
    assert trainer.train((ONES, 0 * ONES), 4, global_batch=4).history["loss"][-1] == 3.0


def regularized():
    """A dense layer with an activation and a regularizer, whose weight is 1."""
    dense = keras.layers.Dense(
        1,
        "relu",
        use_bias=False,
        kernel_initializer="ones",
        kernel_regularizer=keras.regularizers.L2(0.0),
    )
    return keras.Sequential([keras.Input([1]), dense])


@pytest.mark.thorough
def test_an_activation_and_a_regularizer_are_read_again():
    """L21: a layer's activation and the factor of its regularizer, changed between two calls."""
    trainer = Trainer(
        model=regularized,
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn="mse",
        log_interval=1,
        verbose=False,
    )
    history = trainer.train((ONES, ONES), 1, global_batch=4).history
    assert (history["loss"][-1], history["regularization_loss"][-1]) == (0.0, 0.0)
    [layer] = trainer.model.layers
    layer.kernel_regularizer.l2 = 0.5
    history = trainer.train((ONES, ONES), 2, global_batch=4).history
    assert history["regularization_loss"][-1] == 0.5
    layer.activation = keras.activations.tanh
    expected = (np.tanh(1.0) - 1.0) ** 2
    assert trainer.evaluate((ONES, ONES), global_batch=4)["loss"] == pytest.approx(expected)
    history = trainer.train((ONES, ONES), 3, global_batch=4).history
    assert history["loss"][-1] == pytest.approx(expected)


def test_what_is_read_is_found_through_methods_and_inner_functions():
    """And what a call assigns, what only hooks read, and what is no plain value are not."""

    class Reads(Weighted):
        kind, factors, power = "mean", [1.0], 2.0

        @property
        def strength(self):
            return self.power

        def weigh(self, losses):
            self.seen += 1
            return super().weigh(losses) * self.strength * self.factors[0]

        def predict_batch(self, batch):
            return self.model(batch).unread  # an attribute of another object

        @functools.lru_cache  # noqa: B019  # any decorator
        def example_weights(self, batch):
            return tf.map_fn(lambda one: one if self.kind == "mean" else 0.0, batch[1][:, 0])

    trainer = Reads(model=Powers, optimizer="sgd", verbose=False)
    assert attributes_of_trainer(trainer) == {"beta": 1, "kind": "mean", "power": 2.0}  # of classes
    trainer.beta, trainer.power, trainer.unread = 2, 3.0, 3.0
    assert attributes_of_trainer(trainer) == {"beta": 2, "kind": "mean", "power": 3.0}
    assert attributes_of_trainer(Trainer(model=Powers, optimizer="sgd", loss_fn="mse")) == {}
    assert attributes_of_layer(Powers()).items() >= {"factor": 1, "mode": "plain"}.items()
    assert not {"calls", "unread"} & {*attributes_of_layer(Powers())}
