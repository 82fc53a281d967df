"""What a traced step may have read: plain attributes of layers, modules and the trainer."""

import argparse
import dataclasses
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from trainer import Action, Trainer
from trainer.run.plain_attributes import (
    OTHER,
    attributes_of_layer,
    attributes_of_trainer,
    snapshot,
)


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
    of_classes = {"kind": "mean", "factors": (1, ((0, 1.0),))}
    assert attributes_of_trainer(trainer) == {"beta": 1, "power": 2.0, **of_classes}
    trainer.beta, trainer.power, trainer.unread = 2, 3.0, 3.0
    assert attributes_of_trainer(trainer) == {"beta": 2, "power": 3.0, **of_classes}
    assert attributes_of_trainer(Trainer(model=Powers, optimizer="sgd", loss_fn="mse")) == {}
    assert attributes_of_layer(Powers()).items() >= {"factor": 1, "mode": "plain"}.items()
    assert not {"calls", "unread"} & {*attributes_of_layer(Powers())}


@dataclasses.dataclass
class Settings:
    """Settings of a loss."""

    factor: float = 1.0


FACTOR = 1.0


class Hyper:
    """An object of a class of one's own."""

    def __init__(self, factor):
        """Holds a factor, and another object."""
        self.factor = factor
        self.inner = None


class Config:
    """A class that is used for settings."""

    factor = 1.0


FLAGS = flags.FlagValues()
flags.DEFINE_float("factor", 1.0, "A factor.", flag_values=FLAGS)
FLAGS.mark_as_parsed()
MODULE = types.ModuleType("settings")
MODULE.factor = 1.0


class Containers(Trainer):
    """A loss with factors in all kinds of places."""

    def __init__(self, **arguments):
        """All factors are 1."""
        super().__init__(**arguments)
        self.weights, self.pair, self.numbers = {"a": {"b": 1.0}}, (1.0, 2.0), [1.0]
        self.array, self.tensor = np.ones([3], np.float32), tf.constant(1.0)
        self.settings, self.seen = Settings(), []
        self.args = argparse.Namespace(factor=1.0)
        self.hyper, self.partial = Hyper(1.0), functools.partial(tf.multiply, 1.0)
        self.hyper.inner = Hyper(1.0)

    def compute_loss(self, batch, training):
        """The output times all factors; it notes how often it was traced."""
        self.seen.append(1)
        outputs = tf.cast(self.model(batch[0], training=training), tf.float32)[:, 0]
        outputs *= self.weights["a"]["b"] * self.pair[0] * self.numbers[0] * self.array[0]
        outputs *= self.hyper.factor * self.hyper.inner.factor * Config.factor * FLAGS.factor
        outputs = self.partial(outputs) * MODULE.factor
        return outputs * self.tensor * self.settings.factor * self.args.factor * FACTOR


def assign(name, value):
    """Returns a function that assigns an attribute of an object."""
    return lambda trainer: setattr(trainer, name, value)


def change_global(trainer):
    """Changes the factor in this module, for as long as `module_put_back` lets it."""
    del trainer
    globals()["FACTOR"] = 3.0


IN_CONTAINERS = {
    "weights": lambda trainer: trainer.weights["a"].update(b=3.0),
    "pair": assign("pair", (3.0, 2.0)),
    "numbers": lambda trainer: trainer.numbers.__setitem__(0, 3.0),
    "array": lambda trainer: trainer.array.fill(3.0),
    "tensor": assign("tensor", tf.constant(3.0)),
    "settings": lambda trainer: setattr(trainer.settings, "factor", 3.0),
    "args": lambda trainer: setattr(trainer.args, "factor", 3.0),
    "hyper": lambda trainer: setattr(trainer, "hyper", with_inner(3.0, 1.0)),
    "hyper ": lambda trainer: setattr(trainer.hyper.inner, "factor", 3.0),
    "partial": assign("partial", functools.partial(tf.multiply, 3.0)),
    "'FACTOR', which the step has read": change_global,
    "'Config', which the step has read": lambda _: setattr(Config, "factor", 3.0),
    "'FLAGS', which the step has read": lambda _: setattr(FLAGS, "factor", 3.0),
    "'MODULE', which the step has read": lambda _: setattr(MODULE, "factor", 3.0),
}


def with_inner(factor, inner):
    """An object with a factor that holds another."""
    found = Hyper(factor)
    found.inner = Hyper(inner)
    return found


def put_back():
    """Makes all factors outside of trainers 1."""
    globals()["FACTOR"] = Config.factor = FLAGS.factor = MODULE.factor = 1.0


@pytest.fixture
def module_put_back():
    """Puts the factors of the module and of its objects back."""
    yield
    put_back()


@pytest.mark.sampled
@pytest.mark.usefixtures("module_put_back")
@pytest.mark.parametrize("name", IN_CONTAINERS)
def test_a_number_in_a_container_is_read_again(name):
    """L19: in a dict, a tuple, a list, an array, a tensor, a dataclass, an object, or the module, and
    in its classes, flags and modules.
    """
    settings = {"optimizer": lambda: keras.optimizers.SGD(0.0), "log_interval": 1, "verbose": False}

    def model():
        dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        return keras.Sequential([keras.Input([1]), dense])

    trainer = Containers(model=model, **settings)
    assert trainer.train((ONES, ONES), 2, global_batch=4).history["loss"][-1] == 1.0
    traces = len(trainer.seen)
    assert trainer.train((ONES, ONES), 3, global_batch=4).history["loss"][-1] == 1.0
    assert len(trainer.seen) == traces  # its own notes are no change
    IN_CONTAINERS[name](trainer)
    assert trainer.train((ONES, ONES), 4, global_batch=4).history["loss"][-1] == 3.0
    assert trainer.evaluate((ONES, ONES), global_batch=4)["loss"] == 3.0

    put_back()
    hooked = Containers(
        model=model, actions=[Action(IN_CONTAINERS[name], every_steps=1)], **settings
    )
    with pytest.raises(ValueError, match="in a hook") as refused:
        hooked.train((ONES, ONES), 3, global_batch=4)
    where = name if "read" in name else f"trainer.{name.strip()}"
    assert f"; got a change of {where}, in a hook or an action." in str(refused.value)


def test_a_loss_is_read_again():
    """The settings of a loss of Keras, and what a function reads of its closure."""
    factor = [1.0]
    losses = [keras.losses.Huber(delta=1.0), lambda y, outputs: factor[0] * (y - outputs) ** 2]
    for loss_fn in losses:
        factor[0] = 1.0
        trainer = Trainer(
            model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
            optimizer="sgd",
            loss_fn=loss_fn,
            verbose=False,
        )
        data = ONES, 50 * ONES
        before = trainer.evaluate(data, global_batch=4)["loss"]
        if isinstance(loss_fn, keras.losses.Loss):
            loss_fn._fn_kwargs["delta"] = 5.0
        factor[0] = 5.0
        assert trainer.evaluate(data, global_batch=4)["loss"] > 1.5 * before


class WithoutConfig(keras.losses.Loss):
    """A loss as in Keras's guides."""

    def __init__(self, factor):
        """Holds the factor."""
        super().__init__()
        self._factor = factor

    def call(self, y_true, y_pred):
        """The squares times the factor."""
        return self._factor * tf.reduce_mean((y_true - y_pred) ** 2, axis=1)


class Callable:
    """An object that computes a loss."""

    def __init__(self, factor):
        """Holds the factor."""
        self._factor = factor

    def __call__(self, y_true, y_pred):
        """The squares times the factor."""
        return self._factor * tf.reduce_mean((y_true - y_pred) ** 2, axis=1)

    def method(self, y_true, y_pred):
        """The same."""
        return self(y_true, y_pred) + 0.0 * self._factor


@pytest.mark.sampled
@pytest.mark.parametrize(
    "make",
    [
        WithoutConfig,
        Callable,
        lambda factor: Callable(factor).method,
        lambda factor: {"a": WithoutConfig(factor)},
    ],
)
def test_a_loss_of_ones_own_is_read_again(make):
    """An object, or a method of one, whose number changes between two calls."""
    loss = make(1.0)
    named = isinstance(loss, dict)

    def model():
        inputs = keras.Input([1])
        outputs = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)(inputs)
        return keras.Model(inputs, {"a": outputs} if named else outputs)

    trainer = Trainer(
        model=model,
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn=loss,
        log_interval=1,
        verbose=False,
    )
    data = ONES, {"a": 3 * ONES} if named else 3 * ONES
    assert trainer.train(data, 1, global_batch=4).history["loss"][-1] == 4.0
    owner = loss["a"] if named else getattr(loss, "__self__", loss)
    owner._factor = 0.5
    assert trainer.train(data, 2, global_batch=4).history["loss"][-1] == 2.0
    assert trainer.evaluate(data, global_batch=4)["loss"] == 2.0


@pytest.mark.parametrize(
    ("value", "again"),
    [
        (0.0, 0.0),
        ([float("nan")], [np.float32("nan")]),
        ({"a": [1, {"b": np.zeros(2)}]}, {"a": [1, {"b": np.zeros(2)}]}),
        ({1, 2}, {2, 1}),
        ([keras.layers.Dense(1)], [keras.layers.Dense(2)]),  # layers are compared by themselves
        (list(range(10**5)), list(range(10**5))),
    ],
)
def test_what_is_the_same_is_equal(value, again):
    """A snapshot is equal to another one of equal content, in other objects."""
    assert snapshot(value) == snapshot(again)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ([1.0], [1.0, 1.0]),
        ({"a": 1}, {"b": 1}),
        (np.zeros(3), np.array([0, 0, 1.0])),
        (np.zeros(3), np.zeros([3, 1])),
        (tf.constant(1.0), tf.constant(1.0)),  # whether they are equal would take a device's time
        (Settings(1.0), Settings(2.0)),
        ([None], [0]),
    ],
)
def test_what_differs_is_not_equal(value, other):
    """A snapshot differs where the content does."""
    assert snapshot(value) != snapshot(other)


def test_an_object_tells_nothing():
    """One without plain values is left out."""
    assert snapshot(keras.layers.Dense(1)) is OTHER


class Caching(Weighted):
    """Fills caches while it is traced."""

    def __init__(self, **arguments):
        """None is filled yet."""
        super().__init__(**arguments)
        self.cache = {}

    @functools.cached_property
    def table(self):
        """Numbers that are computed once."""
        return np.ones([1], np.float32)

    def weigh(self, losses):
        """Multiplies by what the caches hold."""
        cache = self.cache
        cache[losses.shape.rank] = 1.0
        return losses * self.table[0] * self.cache[losses.shape.rank]


def test_what_a_trace_changes_itself_is_no_change_of_a_hook():
    """A cache that is filled in the first trace."""
    trainer = Caching(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer="sgd",
        steps_per_loop=1,
        actions=[Action(lambda _: None, every_steps=1)],
        verbose=False,
    )
    trainer.train((ONES, ONES), 3, global_batch=4)
    assert trainer.totals.applied == 3
    other = Caching(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer="sgd",
        actions=[Action(lambda _: None, every_steps=1)],
        verbose=False,
    )
    for _ in range(3):
        other.train_on_batch((ONES, ONES))
    assert other.totals.applied == 3
