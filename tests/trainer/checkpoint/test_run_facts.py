"""Facts that say what makes a run the same, and how two of them differ."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.checkpoint.run_facts import (
    differences,
    loss_facts,
    model_facts,
    optimizer_facts,
)

L = keras.layers


def sequential(rate=0.2, activation="relu", **dense):
    """A small model with the layers that tests change."""
    hidden = L.Dense(3, activation=activation, **dense)
    return keras.Sequential([keras.Input([2]), hidden, L.Dropout(rate), L.Dense(1)])


def functional(factor=2.0, swap=False):
    """A small functional model with an operation that is no layer."""
    inputs = keras.Input([2])
    one = L.Dense(3, "relu")(inputs)
    two = L.Dense(3)(one)
    joined = L.Subtract()([two, one] if swap else [one, two])
    return keras.Model(inputs, joined * factor)


class Scaled(L.Layer):
    """A layer without a configuration."""

    def __init__(self, factor, table=None):
        """Takes an array, which Keras cannot write into a configuration."""
        super().__init__()
        self.factor, self.table = factor, table

    def call(self, x):
        """Scales its input."""
        return x * self.factor


class Subclassed(keras.Model):
    """A model of its own class."""

    def __init__(self, rate=0.1, factor=1.0, kind=Scaled):
        """Keeps a number that `call` uses."""
        super().__init__()
        self.dense, self.scaled, self.rate = L.Dense(1), kind(factor, np.ones(3)), rate

    def call(self, x):
        """Uses the number."""
        return self.scaled(self.dense(x)) + self.rate


def places(one, other):
    """Where two models differ, with both values."""
    found = differences(model_facts(one), model_facts(other))
    return [tuple(each) for each in found]


def test_the_same_model_made_again_is_the_same():
    """Keras numbers the names of layers anew; names and initializers do not count."""
    for make in (sequential, functional, Subclassed):
        assert places(make(), make()) == []
        assert json.loads(json.dumps(model_facts(make()))) == model_facts(make())
    assert places(sequential(), sequential(kernel_initializer="ones", name="first")) == []


def test_what_differs_is_named():
    """A difference has the layer's position and class, the setting, and both values."""
    assert places(sequential(), sequential(activation="gelu")) == [
        ("layers[0] (Dense).activation", "relu", "gelu")
    ]
    assert places(sequential(), sequential(0.5)) == [("layers[1] (Dropout).rate", 0.2, 0.5)]
    regular = sequential(kernel_regularizer=keras.regularizers.L2(0.5))
    assert places(sequential(), regular) == [
        ("layers[0] (Dense).kernel_regularizer", None, {"class": "L2", "l2": 0.5})
    ]
    frozen = sequential()
    frozen.layers[0].trainable = False
    assert places(sequential(), frozen) == [("layers[0] (Dense).trainable", None, False)]


def test_functional_models():
    """What a layer is called with counts, and so do operations that are no layers."""
    assert places(functional(), functional(factor=3.0)) == [
        ("operations[3] (Multiply).called with[0].args[1]", 2.0, 3.0)
    ]
    assert [place for place, *_ in places(functional(), functional(swap=True))] == [
        "operations[2] (Subtract).called with[0].args[0][0][0]",
        "operations[2] (Subtract).called with[0].args[0][1][0]",
    ]


def test_subclassed_models():
    """Layers without a configuration have their numbers, and a hash of its code."""
    assert places(Subclassed(), Subclassed(factor=3.0)) == [("layers[1] (Scaled).factor", 1.0, 3.0)]
    assert places(Subclassed(), Subclassed(rate=0.5)) == [("rate", 0.1, 0.5)]

    added = type("Scaled", (Scaled,), {"call": lambda self, x: x + self.factor})
    [change, name] = places(Subclassed(), Subclassed(kind=added))
    assert change[0] == "layers[1] (Scaled).call.function"
    assert name[0] == "layers[1] (Scaled).call.code"


def test_modules():
    """Of a `tf.Module`, the numbers in all its submodules count."""

    class Module(tf.Module):
        def __init__(self, rate):
            super().__init__()
            self.rate = rate

    outer, other = Module(0.1), Module(0.1)
    outer.inner, other.inner = Module(0.2), Module(0.3)
    assert places(outer, other) == [("modules[1] (Module).rate", 0.2, 0.3)]


def test_a_layers_own_dtype_counts():
    """Layers with the policy of the run have no dtype, others do."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        half, whole = sequential(), sequential(dtype="float32")
    finally:
        keras.config.set_dtype_policy("float32")
    one, other = model_facts(half, "mixed_bfloat16"), model_facts(whole, "mixed_bfloat16")
    assert [tuple(each) for each in differences(one, other)] == [
        ("layers[0] (Dense).dtype", None, "float32")
    ]
    assert one == model_facts(sequential())
    assert differences(one, other, ignored=("dtype",)) == []


def test_optimizers():
    """Class and constants count, schedules too; a rate is written as in the program."""
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 100)
    adam, adam_w = keras.optimizers.Adam(0.1), keras.optimizers.AdamW(0.1)
    facts = optimizer_facts({"a": adam, "b": keras.optimizers.SGD(schedule, momentum=0.9)})
    assert facts["a"]["learning_rate"] == 0.1
    assert facts["b"]["learning_rate"] == {
        "class": "CosineDecay",
        "initial_learning_rate": 0.5,
        "decay_steps": 100,
        "alpha": 0.0,
        "warmup_steps": 0,
    }
    [change] = differences(optimizer_facts({"o": adam}), optimizer_facts({"o": adam_w}))
    assert tuple(change) == ("o", "Adam", "AdamW")


class Around(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a configuration that holds another, or an array."""

    def __init__(self, inner):
        """Holds it."""
        self.inner = inner

    def __call__(self, step):
        """The rate of the other."""
        return self.inner(step)


def cosine(rate):
    """A schedule of Keras."""
    return keras.optimizers.schedules.CosineDecay(rate, 9)


class Rate:
    """A learning rate that is called."""

    def __init__(self, rate):
        """Holds a number."""
        self.rate = rate

    def __call__(self):
        """The number."""
        return self.rate


def decayed(*names):
    """AdamW that leaves out some variables in its weight decay."""
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=names)
    return optimizer


@pytest.mark.parametrize(
    ("was", "now", "place"),
    [
        (Around(cosine(0.5)), Around(cosine(0.25)), ".inner"),
        (Around(np.full(99, 0.5)), Around(np.full(99, 0.25)), ".inner"),
        (Rate(0.5), Rate(0.25), ".rate"),
    ],
)
def test_learning_rates_without_a_configuration(was, now, place):
    """What a schedule or a callable object of the user's holds counts."""
    one, other = (optimizer_facts({"o": keras.optimizers.SGD(rate)}) for rate in (was, now))
    [change] = differences(one, other)
    assert place in change.place
    assert differences(one, optimizer_facts({"o": keras.optimizers.SGD(was)})) == []


def test_weight_decay_exclusions():
    """Keras's configuration does not have them."""
    one, other = (optimizer_facts({"o": decayed(*names)}) for names in (["a", "b"], ["a"]))
    assert [change.place for change in differences(one, other)] == ["o (AdamW).not decayed[1]"]
    assert differences(one, optimizer_facts({"o": decayed("b", "a")})) == []
    plain = optimizer_facts({"o": keras.optimizers.AdamW(0.1, weight_decay=0.5)})
    assert "not decayed" not in plain["o"]


def test_losses():
    """A Keras loss, several, and the methods that a trainer overrides."""
    huber = keras.losses.Huber(delta=2.0)
    assert loss_facts({"a": "mse", "b": [huber]}, {}) == {
        "loss_fn": {
            "a": "mse",
            "b": [{"class": "Huber", "reduction": "sum_over_batch_size", "delta": 2.0}],
        }
    }
    own = loss_facts(None, {"compute_loss": lambda batch: batch * 2, "train_step": len})
    assert list(own) == ["compute_loss"]


def test_differences_of_lists():
    """Lists of other lengths differ where one of them ends."""
    assert [tuple(each) for each in differences([1, 2], [1])] == [("[1]", 2, None)]
    assert differences({"code": 1}, {"code": 2}, ignored=("code",)) == []


class Head(keras.Model):
    """A functional model with a constructor of its own, as all of KerasHub's are."""

    def __init__(self, units, config):
        """Keeps what `get_config` returns."""
        x = keras.Input([3])
        super().__init__(inputs=x, outputs=L.Dense(units)(x))
        self.config = config

    def get_config(self):
        """Returns what a user likes, or raises."""
        if self.config is None:
            raise NotImplementedError
        return self.config


@pytest.mark.parametrize("config", [{"units": 1}, {"layers": 2}, {"layers": [16, 32]}, None, 5])
@pytest.mark.parametrize("nested", [False, True])
def test_a_configuration_that_says_nothing_is_left_out(config, nested):
    """The layers of a model are described, whatever its own configuration is."""
    model = Head(1, config)
    if nested:
        model = keras.Sequential([keras.Input([3]), model])
    facts = model_facts(model)

    assert {"class": "Dense", "units": 1}.items() <= facts["layers"][-1].items()
    assert differences(facts, model_facts(Head(2, config) if not nested else model)) == (
        [] if nested else [("layers[0] (Dense).units", 1, 2)]
    )
