"""Every optimizer of Keras, on one and three replicas, against a plain loop with the whole batch."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import needs_multi_optimizer
from plans import plan_of

from trainer import Checkpoints, Trainer, Updates
from trainer.step import TrainState, attempt_step

# Keras warns about the variables that the loss does not reach; so do these tests' own loops.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables"),
    # Keras converts its variables in a way that NumPy 2 warns about.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
]

REFUSED = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}  # the others are trained below
NAMES = sorted(
    name
    for name, each in vars(keras.optimizers).items()
    if inspect.isclass(each) and issubclass(each, keras.optimizers.Optimizer)
)
ROWS = np.array([[3, 1], [3, 3], [0, 2], [1, 1], [5, 4], [2, 2]])
TARGETS = np.linspace(-1.0, 1.0, 6, dtype=np.float32)


class Model(keras.Model):
    """An embedding whose ids repeat, two dense layers, and one that the loss does not reach."""

    def __init__(self):
        """Creates the layers; the kernel of the last one is constrained."""
        super().__init__()
        draw = functools.partial(keras.initializers.RandomNormal, stddev=0.3)
        self.unused = keras.layers.Dense(2, name="unused", kernel_initializer=draw(seed=4))
        self.table = keras.layers.Embedding(7, 4, embeddings_initializer=draw(seed=1))
        self.hidden = keras.layers.Dense(5, activation="tanh", kernel_initializer=draw(seed=2))
        limit = keras.constraints.MaxNorm(0.5)
        self.out = keras.layers.Dense(1, kernel_initializer=draw(seed=3), kernel_constraint=limit)
        self.unused.build([None, 4])
        self(np.zeros([1, 2], np.int32))

    def call(self, ids):
        """The mean embedding of the ids, through both layers."""
        return self.out(self.hidden(tf.reduce_mean(self.table(ids), axis=1)))[:, 0]


def losses_of(model, batch):
    """One squared error per example."""
    ids, targets = batch
    return 10.0 * tf.square(model(ids) - targets)


def ours(make, strategy, steps, batch):
    """The model, and its optimizer, after some of our steps."""
    with strategy.scope():
        model, optimizer = Model(), make()

    def compute_loss(batch, training):
        del training
        return losses_of(model, batch)

    plan = plan_of(model, compute_loss, strategy=strategy, optimizer=optimizer)
    with strategy.scope():
        run = TrainState(plan.rule, seed=1)
    step = tf.function(lambda: attempt_step(batch, plan, run))
    for _ in range(steps):
        assert step().grads_finite
    return model, optimizer


def plain(make, steps, batch, model=None):
    """The same after as many steps of Keras's usual loop.

    Its gradients are dense: Keras's optimizers take the rows of a sparse gradient one by one, also where
    ids repeat, and so square parts of a sum instead of the sum.
    """
    model = model or Model()
    optimizer = make()
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(model, batch))
        gradients = tape.gradient(loss, model.trainable_variables)
        dense = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        optimizer.apply(dense, model.trainable_variables)
    return model, optimizer


def assert_equal(one, other, tolerance):
    """Compares all copies of weights and slots, relative to the largest number of each."""
    for found, expected in zip(one, other, strict=True):
        value = expected.numpy()
        for copy in getattr(found.value, "values", [found.value]):
            size = max(np.max(np.abs(value)), 0.05)
            np.testing.assert_allclose(
                copy.numpy(), value, atol=tolerance * size, err_msg=found.path
            )


RATE = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)
SETTINGS = {
    "plain": {"learning_rate": 0.01},
    "everything": {
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "global_clipnorm": 0.5,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
    },
    "clipnorm": {"learning_rate": 0.01, "clipnorm": 0.1, "use_ema": True},
}


def strategy_of(mirrored, replicas):
    """A strategy with as many replicas."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


# In CI two optimizers with the setting that has everything, on three replicas; by night all.
MARKS = {"Lion": pytest.mark.thorough, "Adam": pytest.mark.thorough}
CASES = [
    pytest.param(
        settings,
        replicas,
        marks=() if (settings, replicas) == ("everything", 3) else pytest.mark.slow,
    )
    for settings in SETTINGS
    for replicas in (1, 3)
]


@pytest.mark.parametrize(("settings", "replicas"), CASES)
@pytest.mark.parametrize(
    "name",
    [
        # The catalogue's test compares every optimizer by night, with fewer settings.
        pytest.param(name, marks=MARKS.get(name, pytest.mark.slow))
        for name in NAMES
        if name not in REFUSED
    ],
)
def test_every_optimizer(mirrored, name, settings, replicas):
    """L7, L8: three steps move weights and slots as a plain loop with the whole batch does, with a
    variable that the loss does not reach, sparse gradients, a constraint, a schedule, weight decay, a
    moving average, and clipping.
    """
    make = functools.partial(getattr(keras.optimizers, name), **SETTINGS[settings])
    batch = tf.constant(ROWS), tf.constant(TARGETS)
    model, optimizer = ours(make, strategy_of(mirrored, replicas), 3, batch)
    expected, theirs = plain(make, 3, batch)

    assert_equal(model.variables, expected.variables, 2e-5)
    # Ftrl divides a difference of square roots, about 0.5, by the learning rate of 0.01.
    assert_equal(optimizer.variables, theirs.variables, 1e-4 if name == "Ftrl" else 2e-5)


def several(**inner):
    """A `MultiOptimizer` whose inner optimizers have these settings."""
    adam, sgd = (
        keras.optimizers.Adam(0.01, **inner),
        keras.optimizers.SGD(0.1, momentum=0.9, **inner),
    )
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(sgd, {".*embedding.*": adam})
    )


@needs_multi_optimizer
@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("inner", [{}, {"global_clipnorm": 0.1, "use_ema": True}])
def test_a_multi_optimizer(mirrored, inner, replicas):
    """L7: the inner optimizers of a `MultiOptimizer` use gradients that are already reduced, and count
    updates, as in a plain loop. Each clips the gradients of its own variables.
    """
    make = functools.partial(several, **inner)
    batch = tf.constant(ROWS), tf.constant(TARGETS)
    model, optimizer = ours(make, strategy_of(mirrored, replicas), 3, batch)
    expected, theirs = plain(make, 3, batch)

    assert_equal(model.variables, expected.variables, 2e-5)
    assert_equal(optimizer.variables, theirs.variables, 2e-5)
    assert [int(one.iterations.numpy()) for one in (optimizer, *optimizer.optimizers)] == [3] * 3


class Trained(Trainer):
    """Trains the model on the rows."""

    def __init__(self, make=several, **arguments):
        """Takes a function that makes the optimizer."""
        self.make = make
        super().__init__(seed=1, verbose=False, jit_compile=False, **arguments)

    def build_model(self):
        """The model."""
        return Model()

    def build_optimizer(self):
        """The optimizer."""
        return self.make()

    def compute_loss(self, batch, training):
        """One squared error per example."""
        del training
        return losses_of(self.model, (batch["ids"], batch["y"]))


DATA = {"ids": ROWS, "y": TARGETS}


@needs_multi_optimizer
@pytest.mark.slow
def test_a_multi_optimizer_in_a_run(tmp_path, mirrored):
    """L12: a run with a `MultiOptimizer` is trained, averaged, evaluated, saved and resumed to the bit."""
    settings = {"strategy": mirrored(3), "updates": Updates(ema_momentum=0.5)}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    one = Trained(model_dir=whole, **settings)
    one.train(DATA, steps=4, global_batch=6)
    Trained(model_dir=halves, **settings).train(DATA, steps=2, global_batch=6)
    other = Trained(model_dir=halves, **settings)
    other.train(DATA, steps=4, global_batch=6)

    for optimizer in other.optimizer.optimizers:
        assert int(optimizer.iterations.numpy()) == 4
        assert optimizer.use_ema
    pairs = zip(one.optimizer.variables, other.optimizer.variables, strict=True)
    assert all(first.numpy().tobytes() == second.numpy().tobytes() for first, second in pairs)
    pairs = zip(one.model.variables, other.model.variables, strict=True)
    assert all(first.numpy().tobytes() == second.numpy().tobytes() for first, second in pairs)
    assert one.evaluate(DATA, global_batch=6) == other.evaluate(DATA, global_batch=6)
    assert one.evaluate(DATA, global_batch=6) != one.evaluate(DATA, global_batch=6, averaged=False)


@needs_multi_optimizer
def test_a_multi_optimizer_of_a_function_is_refused():
    """Its inner optimizers are not known before it is built, so they cannot be checked."""
    trainer = Trained(lambda: keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD()))
    with pytest.raises(ValueError, match="`optimizer`"):
        trainer.train(DATA, steps=1, global_batch=6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("ScheduleFreeAdamW", "Adam") else pytest.mark.slow)
        for name in NAMES
        if name not in REFUSED
    ],
)
def test_weights_are_loaded_before_the_optimizer_is_built(tmp_path, name):
    """L12: after `init_from`, steps equal those of a plain loop that loads the weights first, also for
    an optimizer that copies the weights when it is built.
    """
    make = functools.partial(getattr(keras.optimizers, name), 0.01, use_ema=True)
    old = Model()
    for place, variable in enumerate(old.trainable_variables):
        variable.assign(variable + 0.1 * (place + 1))
    old.save_weights(tmp_path / "old.weights.h5")
    trainer = Trained(make, checkpoints=Checkpoints(init_from=tmp_path / "old.weights.h5"))
    trainer.train(DATA, steps=2, global_batch=6)
    expected, theirs = plain(make, 2, (tf.constant(ROWS), tf.constant(TARGETS)), old)

    assert_equal(trainer.model.variables, expected.variables, 2e-5)
    assert_equal(trainer.optimizer.variables, theirs.variables, 2e-5)


def test_an_optimizer_that_holds_other_weights_is_refused(tmp_path):
    """An optimizer that the user has built holds copies of the weights before `init_from`."""
    Model().save_weights(tmp_path / "old.weights.h5")

    class Built(Trained):
        def build_optimizer(self):
            optimizer = keras.optimizers.ScheduleFreeAdamW(name="free")
            optimizer.build(self.model.trainable_variables)
            return optimizer

    where = tmp_path / "old.weights.h5"
    with pytest.raises(ValueError, match="`init_from`"):
        Built(checkpoints=Checkpoints(init_from=where)).train(DATA, steps=1, global_batch=6)


@pytest.mark.parametrize("name", sorted(REFUSED - {"MultiOptimizer"}))
def test_what_is_no_optimizer_is_refused(name):
    """The two remaining classes: one scales the loss, the other has no rule."""
    make = {
        "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        "Optimizer": lambda: keras.optimizers.Optimizer(0.1),
    }[name]
    with pytest.raises((ValueError, NotImplementedError)):
        Trained(make).train(DATA, steps=1, global_batch=6)
