"""Settings of the update that change between two calls of `train` count, and in a hook are refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Action, Trainer

pytestmark = pytest.mark.sampled

optimizers, schedules = keras.optimizers, keras.optimizers.schedules
X = np.random.default_rng(0).normal(size=[8, 4, 3]).astype(np.float32)
Y = 3 * X[..., :1] - X[..., 1:2] + 1
MODULE = {"rate": 0.1, "penalty": 0.5}


@pytest.fixture(autouse=True)
def _module_put_back():
    """Puts the module's numbers back."""
    before = dict(MODULE)
    yield
    MODULE.update(before)


def dense(**arguments):
    """A dense layer."""
    layer = keras.layers.Dense(1, kernel_initializer="ones", name="dense", **arguments)
    return keras.Sequential([keras.Input([3]), layer])


class OfTuple(optimizers.Optimizer):
    """SGD whose factor is in a tuple."""

    def __init__(self, **arguments):
        """The tuple."""
        super().__init__(0.1, **arguments)
        self.betas = (0.5, 0.9)

    def update_step(self, gradient, variable, learning_rate):
        """One update."""
        variable.assign_sub(learning_rate * self.betas[0] * gradient)


class OfModule(optimizers.Optimizer):
    """SGD whose rate is in the module."""

    def __init__(self):
        """A rate that has no effect."""
        super().__init__(1.0)

    def update_step(self, gradient, variable, learning_rate):
        """One update."""
        del learning_rate
        variable.assign_sub(MODULE["rate"] * gradient)


class Around(optimizers.Optimizer):
    """Calls another optimizer, as Lookahead does."""

    def __init__(self, inner):
        """Holds it."""
        super().__init__(1.0)
        self.inner = inner

    def build(self, variables):
        """Builds both."""
        if not self.built:
            super().build(variables)
            self.inner.build(variables)

    def apply(self, gradients, trainable_variables=None):
        """Updates by the inner one, and counts."""
        self.inner.apply(gradients, trainable_variables)
        super().apply(gradients, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        """Nothing more."""


class Warm(schedules.LearningRateSchedule):
    """Warms up to another schedule."""

    def __init__(self, after):
        """Holds the other."""
        self.after = after

    def __call__(self, step):
        """The rate."""
        return tf.minimum(tf.cast(step, tf.float32) + 1, 3.0) / 3 * self.after(step)


class Table(schedules.LearningRateSchedule):
    """Has a rate for each step."""

    def __init__(self):
        """More rates than `repr` shows."""
        self.rates = np.full(2000, 0.1, np.float32)

    def __call__(self, step):
        """The rate."""
        return tf.gather(tf.constant(self.rates), tf.cast(step, tf.int32))


class RateOfModule(schedules.LearningRateSchedule):
    """Reads its rate from the module."""

    def __call__(self, step):
        """The rate."""
        return MODULE["rate"] * tf.ones_like(step, tf.float32)


class OwnWeight(keras.layers.Layer):
    """Gives its weight a regularizer that it does not keep."""

    def build(self, shape):
        """The weight."""
        penalty = keras.regularizers.L2(0.5)
        self.w = self.add_weight(shape=[shape[-1], 1], initializer="ones", regularizer=penalty)

    def call(self, x):
        """A product."""
        return x @ self.w


def assign(path, value):
    """Returns a change: sets an attribute of the optimizer or of the first layer, by its path."""

    def change(model, optimizer):
        *outer, name = path.split(".")
        owner = {"optimizer": optimizer, "layer": model.layers[0]}[outer[0]]
        for each in outer[1:]:
            owner = getattr(owner, each)
        setattr(owner, name, value)

    return change


def of_module(**values):
    """Returns a change of the module's numbers."""
    return lambda *_: MODULE.update(values)


def in_table(_, optimizer):
    """Changes an array in place."""
    optimizer._learning_rate.rates[4:-10] = 0.001


def sgd():
    """Plain SGD."""
    return optimizers.SGD(0.1)


L2, MAX_NORM = keras.regularizers.L2(0.5), keras.constraints.MaxNorm(0.1)
CHANGES = {
    "tuple": (dense, OfTuple, assign("optimizer.betas", (0.1, 0.9))),
    "no decay": (
        dense,
        lambda: optimizers.SGD(0.1, weight_decay=0.5),
        lambda _, optimizer: optimizer.exclude_from_weight_decay(var_names=["kernel"]),
    ),
    "schedule in a schedule": (
        dense,
        lambda: optimizers.SGD(Warm(schedules.CosineDecay(0.1, 100))),
        assign("optimizer._learning_rate.after.initial_learning_rate", 0.001),
    ),
    "array": (dense, lambda: optimizers.SGD(Table()), in_table),
    "schedule's module": (dense, lambda: optimizers.SGD(RateOfModule()), of_module(rate=0.001)),
    "optimizer's module": (dense, OfModule, of_module(rate=0.001)),
    "regularizing function": (
        lambda: dense(kernel_regularizer=lambda w: MODULE["penalty"] * tf.reduce_sum(w**2)),
        sgd,
        of_module(penalty=0.0),
    ),
    "no regularizer": (
        lambda: dense(kernel_regularizer=L2),
        sgd,
        assign("layer.kernel.regularizer", None),
    ),
    "no constraint": (
        lambda: dense(kernel_constraint=MAX_NORM),
        sgd,
        assign("layer.kernel.constraint", None),
    ),
    "regularizer of a weight": (
        lambda: keras.Sequential([keras.Input([3]), OwnWeight()]),
        sgd,
        assign("layer.w.regularizer.l2", 0.0),
    ),
    "inner momentum": (
        dense,
        lambda: Around(optimizers.SGD(0.01, momentum=0.9)),
        assign("optimizer.inner.momentum", 0.0),
    ),
    "inner schedule": (
        dense,
        lambda: Around(optimizers.SGD(0.01)),
        assign("optimizer.inner.learning_rate", schedules.CosineDecay(0.0001, 10)),
    ),
    "inner clipping": (
        dense,
        lambda: Around(optimizers.SGD(0.01)),
        assign("optimizer.inner.clipnorm", 0.1),
    ),
}


def trainer_of(make, optimizer, **arguments):
    """A trainer that compiles nothing."""
    return Trainer(
        model=make,
        optimizer=optimizer,
        loss_fn="mse",
        jit_compile=False,
        verbose=False,
        **arguments,
    )


def by_hand(make, optimizer, change=None):
    """The weights after eight steps of a plain loop, with a change after four."""
    model, optimizer = make(), optimizer()
    optimizer.build(model.trainable_variables)
    for step in range(8):
        if step == 4 and change:
            change(model, optimizer)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X[step]) - Y[step]) ** 2) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    return model.get_weights()[0]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts_from_the_next_call_on(name):
    """The weights are those of a loop without a graph in which the same is changed."""
    make, optimizer, change = CHANGES[name]
    trainer = trainer_of(make, optimizer)
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    before = dict(MODULE)
    trainer.train(data, steps=4)
    change(trainer.model, trainer.optimizer)
    trainer.train(data, steps=8)
    found = trainer.model.get_weights()[0]
    MODULE.update(before)

    unchanged, expected = by_hand(make, optimizer), by_hand(make, optimizer, change)
    assert np.abs(unchanged - expected).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tuple", "the optimizer"),
        ("array", "the optimizer"),
        ("inner momentum", "the optimizer"),
        ("schedule's module", "'MODULE', which the step has read"),
        ("no regularizer", "the regularizer of 'sequential/dense/kernel'"),
        ("no constraint", "the constraint of 'sequential/dense/kernel'"),
    ],
)
def test_a_change_in_an_action_is_refused(name, found):
    """The step was traced before."""
    keras.utils.clear_session()
    make, optimizer, change = CHANGES[name]
    action = Action(lambda trainer: change(trainer.model, trainer.optimizer), every_steps=4)
    trainer = trainer_of(make, optimizer, actions=[action])
    with pytest.raises(ValueError, match="while it runs") as error:
        trainer.train(tf.data.Dataset.from_tensor_slices((X, Y)), steps=8)
    assert f"got a change of {found}, in a hook or an action" in str(error.value)


class LazySlots(optimizers.Optimizer):
    """Makes a slot at the first update of a variable."""

    def __init__(self):
        """No slots yet."""
        super().__init__(0.1)
        self.slots = {}

    def update_step(self, gradient, variable, learning_rate):
        """One update with momentum."""
        if str(self._get_variable_index(variable)) not in self.slots:
            with tf.init_scope():
                slot = tf.Variable(tf.zeros(variable.shape))
                self.slots[str(self._get_variable_index(variable))] = slot
        slot = self.slots[str(self._get_variable_index(variable))]
        slot.assign(0.9 * slot + gradient)
        variable.assign_sub(learning_rate * slot)


def test_slots_that_are_made_while_a_step_is_traced_are_no_change():
    """A dict of variables that fills in the first step says nothing about settings."""
    trainer = trainer_of(dense, LazySlots, actions=[Action(lambda _: None, every_steps=1)])
    trainer.train(tf.data.Dataset.from_tensor_slices((X, Y)), steps=4)
    assert trainer.totals.applied == 4
