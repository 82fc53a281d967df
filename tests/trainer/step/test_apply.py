"""The end of an applied step: held-back values are assigned, and the optimizers update."""

import contextlib
import functools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, copies, trained_small
from plans import Pair, keras_model, plan_of

from trainer import Updates
from trainer.step import TrainState, attempt_step
from trainer.step.apply import (
    Before,
    apply_gradients,
    assign_held_back,
    average_unsynchronized,
    fused_rule,
    fused_updates,
    optimizers_prepared,
)

pytestmark = pytest.mark.sampled


def two_losses(model):
    """A loss for each part of a pair."""

    def compute_loss(batch, training):
        del training
        return {"first": model.first.weight * batch, "second": model.second.weight * batch}

    return compute_loss


def two_optimizers():
    """SGD with another learning rate for each part, the second one first."""
    return {"second": keras.optimizers.SGD(0.5), "first": keras.optimizers.SGD(1.0)}


def test_each_optimizer_updates_its_own_variables():
    """Gradients come in the order of the objectives, and each optimizer moves its own part."""
    model = Pair()
    plan = plan_of(model, two_losses(model), optimizer=two_optimizers())
    apply_gradients([tf.constant(2.0), tf.constant(3.0)], plan.groups[0], plan)

    assert (float(model.second.weight), float(model.first.weight)) == (2.0 - 1.0, 1.0 - 3.0)
    assert [int(one.optimizer.iterations.numpy()) for one in plan.objectives] == [1, 1]


def test_a_variable_without_a_gradient_stays():
    """A missing gradient leaves its variable as it is."""
    model = Pair()
    plan = plan_of(model)
    apply_gradients([None, tf.constant(0.5)], plan.groups[0], plan)

    assert (float(model.first.weight), float(model.second.weight)) == (1.0, 1.5)


def test_held_back_values_are_assigned():
    """Positions are those of the plan's held-back variables."""
    model = keras_model()
    plan = plan_of(model)
    mean = model.layers[1].moving_mean
    position = [id(variable) for variable in plan.held_back].index(id(mean))
    assign_held_back({str(position): tf.constant([1.0, 2.0, 3.0, 4.0])}, plan)

    assert mean.numpy().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("replicas", [1, 3])
def test_prepared_optimizers_do_not_sum_again(mirrored, replicas):
    """L7: an optimizer takes a gradient as already reduced, and is restored afterwards."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = Pair()
    plan = plan_of(model, strategy=strategy)
    optimizer = plan.objectives[0].optimizer
    before = dict(vars(optimizer))

    @tf.function
    def step():
        with optimizers_prepared(plan.groups[0], plan):
            gradients = [tf.constant(0.25), tf.constant(0.5)]
            strategy.run(functools.partial(apply_gradients, gradients, plan.groups[0], plan))

    step()

    assert [copy.item() for copy in copies(model.first.weight)] == [0.75] * replicas
    assert [copy.item() for copy in copies(model.second.weight)] == [1.5] * replicas
    assert vars(optimizer).keys() == before.keys()


class Wrapper(keras.optimizers.Optimizer):
    """Leaves the update to an optimizer that it holds, as Lookahead does in most steps."""

    def __init__(self, inner):
        """Stores the inner optimizer."""
        super().__init__(learning_rate=0.1)
        self.inner = inner

    def build(self, variables):
        """Builds both."""
        super().build(variables)
        self.inner.build(variables)

    def apply(self, grads, trainable_variables=None):
        """Updates by the inner optimizer."""
        self.inner.apply(grads, trainable_variables)
        self.iterations.assign_add(1)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_optimizer_that_holds_another_does_not_sum_again(mirrored, replicas):
    """L7 for the optimizer that a wrapper calls: it would add the sums of all replicas."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model, optimizer = Pair(), Wrapper(keras.optimizers.SGD(1.0))
    plan = plan_of(model, strategy=strategy, optimizer=optimizer)
    run = TrainState(plan.rule)
    report = tf.function(lambda batch: attempt_step(batch, plan, run))(tf.ones([3]))

    assert bool(report.grads_finite)
    assert [copy.item() for copy in copies(model.first.weight)] == [0.0] * replicas
    assert optimizer.inner.iterations.numpy() == 1


@pytest.mark.thorough
def test_an_optimizer_that_holds_another_is_rolled_back():
    """If the second of two optimizers in turn cannot be applied, the first one's slots move back."""
    model = Pair()
    optimizer = {"first": Wrapper(keras.optimizers.Adam(0.1)), "second": keras.optimizers.SGD(1.0)}

    def compute_loss(batch, training):
        del training
        return {
            "first": model.first.weight * batch,
            "second": model.second.weight * batch * np.inf,
        }

    plan = plan_of(
        model, compute_loss, optimizer=optimizer, updates=Updates(alternate_optimizers=True)
    )
    inner = optimizer["first"].inner
    before = [variable.numpy() for variable in inner.variables]
    run = TrainState(plan.rule)
    report = tf.function(lambda batch: attempt_step(batch, plan, run))(tf.ones([3]))

    assert not bool(report.grads_finite)
    assert [variable.numpy() for variable in inner.variables] == before


OWN = {
    "on read": {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.MEAN,
    },
    "plain": {},
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("moves", [True, False])
def test_own_writes_are_averaged(mirrored, moves, kind):
    """Step 10: copies that a model assigned by itself become their mean; one that did not move keeps its
    bits, although the mean of three equal float32 numbers can differ from them.
    """
    strategy = mirrored(3)
    with strategy.scope():
        variable = tf.Variable(0.9, trainable=False, **OWN[kind])
    for copy in strategy.experimental_local_results(variable):
        copy.assign(0.9)
    old = copies(variable)
    before = Before([variable], [[tf.constant(old[0])]])
    plan = SimpleNamespace(seeds=(), strategy=strategy)

    @tf.function
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            if moves:
                variable.assign_add(tf.cast(context.replica_id_in_sync_group, tf.float32))
            average_unsynchronized(before, plan)

        strategy.run(replica)

    step()
    expected = np.float32(0.9) + np.float32(1.0) if moves else np.float32(0.9)

    if moves:
        np.testing.assert_allclose(copies(variable), [expected] * 3, rtol=1e-6)
    else:
        assert [copy.tobytes() for copy in copies(variable)] == [copy.tobytes() for copy in old]


def own_copies(strategy, replica, variables):
    """The replicas' copies of variables after each has run `replica` and they were combined."""
    values = [[tf.constant(copies(variable)[0])] for variable in variables]
    before = Before(variables, values)
    plan = SimpleNamespace(seeds=(), strategy=strategy)

    @tf.function
    def step():
        def run():
            replica(tf.distribute.get_replica_context().replica_id_in_sync_group)
            average_unsynchronized(before, plan)

        strategy.run(run)

    step()
    return [[np.asarray(copy).tolist() for copy in copies(variable)] for variable in variables]


def test_own_integers_and_flags_are_those_of_the_first_replica(mirrored):
    """They have no mean. A text is left alone."""
    strategy = mirrored(3)
    with strategy.scope():
        count, flag, text = tf.Variable(2, trainable=False), tf.Variable(False), tf.Variable("a")

    def replica(index):
        count.assign_add(5 + tf.cast(index, tf.int32))
        flag.assign(index == 0)

    assert own_copies(strategy, replica, [count, flag, text]) == [[7] * 3, [True] * 3, [b"a"] * 3]


def test_what_is_infinite_stays_so(mirrored):
    """The difference of two infs is NaN: a mask of -inf and a best value so far keep their values."""
    strategy = mirrored(2)
    with strategy.scope():
        mask = tf.Variable(-np.inf, trainable=False)
        best = tf.Variable(np.inf, trainable=False)

    def replica(index):
        mask.assign(mask)
        best.assign(tf.cast(index + 1, tf.float32))

    assert own_copies(strategy, replica, [mask, best]) == [[-np.inf] * 2, [1.5] * 2]


def test_a_variable_with_one_copy_is_not_combined(mirrored):
    """One that was created outside of the scope has a single copy, which all replicas assign."""
    strategy = mirrored(2)
    count = tf.Variable(0.0, trainable=False)
    found = own_copies(strategy, lambda _: count.assign_add(1.0), [count])

    assert found == [[2.0]]


OPTIMIZERS = {
    "adam": functools.partial(keras.optimizers.Adam, 0.01),
    "adamw": functools.partial(keras.optimizers.AdamW, 0.01, weight_decay=0.1),
    "sgd": functools.partial(keras.optimizers.SGD, 0.01),
    "momentum": functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9),
    "nesterov": functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9, nesterov=True),
}
FUSED = {"ResourceApplyAdam", "ResourceApplyKerasMomentum", "ResourceApplyGradientDescent"}


def general(make):
    """Returns a subclass of an optimizer with the same rule, which the kernels do not recognize."""
    base = type(make())

    class General(base):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)

    return functools.partial(General, *make.args, **make.keywords)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_kernel_is_the_whole_rule(mirrored, replicas, name):
    """The fused kernels move weights and slots as Keras's own operations do."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    fused = trained_small(make=OPTIMIZERS[name], strategy=strategy)
    plain = trained_small(make=general(OPTIMIZERS[name]), strategy=strategy)

    assert fused_rule(fused.optimizer) is not None
    assert fused_rule(plain.optimizer) is None
    assert_close(fused, plain)


def operations(optimizer, gradient, dtype="float32"):
    """The types of the operations with which an optimizer updates a variable of three rows."""
    variable = keras.Variable(np.ones([3, 2]), dtype=dtype)
    optimizer.build([variable])
    with fused_updates(optimizer):
        traced = tf.function(lambda: optimizer.apply([gradient()], [variable]))
        graph = traced.get_concrete_function().graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dense_update_is_one_kernel(name):
    """A dense update uses one fused kernel, and the optimizer is restored afterwards."""
    optimizer = OPTIMIZERS[name]()

    assert operations(optimizer, lambda: tf.ones([3, 2])) & FUSED
    assert "update_step" not in vars(optimizer)


def rows():
    """A sparse gradient for one of three rows."""
    return tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))


@pytest.mark.parametrize(
    ("make", "gradient", "dtype"),
    [
        (OPTIMIZERS["adam"], rows, "float32"),
        (OPTIMIZERS["adam"], lambda: tf.ones([3, 2], tf.float64), "float64"),
        (functools.partial(keras.optimizers.Adam, amsgrad=True), None, "float32"),
        (keras.optimizers.Lion, None, "float32"),
        (general(OPTIMIZERS["adam"]), None, "float32"),
    ],
)
def test_updates_without_a_kernel_are_left_to_keras(make, gradient, dtype):
    """Sparse gradients, other dtypes and other rules use no fused kernel."""
    assert not operations(make(), gradient or (lambda: tf.ones([3, 2])), dtype) & FUSED


GENERATOR = np.random.default_rng(0)
SIZES = 10.0 ** GENERATOR.uniform(-4, 2, size=[1, 500])
GRADIENTS = (GENERATOR.normal(size=[30, 500]) * SIZES).astype(np.float32)


def path_of(optimizer, *, fused):
    """Returns 500 weights after each of the updates, initially all 1."""
    weight = keras.Variable(np.ones(500, np.float32))
    optimizer.build([weight])

    @tf.function
    def update(gradient):
        with fused_updates(optimizer) if fused else contextlib.nullcontext():
            optimizer.apply([gradient], [weight])

    path = []
    for gradient in GRADIENTS:
        update(tf.constant(gradient))
        path.append(weight.numpy())
    return np.array(path)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}],
)
def test_sgd_has_the_bits_of_keras(arguments):
    """At a learning rate of 1, SGD's kernels give the bits of Keras's operations."""
    one, other = (
        path_of(keras.optimizers.SGD(1.0, **arguments), fused=fused) for fused in (True, False)
    )

    assert one.tobytes() == other.tobytes()


def decaying(step):
    """The learning rate of `RATE`."""
    return 0.9**step


RATE = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.9)


@pytest.mark.parametrize(
    ("make", "rate", "beta_2", "epsilon", "decay"),
    [
        (lambda: keras.optimizers.Adam(1.0), lambda _: 1.0, 0.999, 1e-7, 0.0),
        (lambda: keras.optimizers.Adam(1.0, epsilon=1e-3), lambda _: 1.0, 0.999, 1e-3, 0.0),
        (lambda: keras.optimizers.Adam(1.0, beta_2=0.9999), lambda _: 1.0, 0.9999, 1e-7, 0.0),
        (lambda: keras.optimizers.AdamW(1.0, weight_decay=0.01), lambda _: 1.0, 0.999, 1e-7, 0.01),
        (lambda: keras.optimizers.Adam(RATE), decaying, 0.999, 1e-7, 0.0),
    ],
)
def test_adam_is_closer_to_float64(make, rate, beta_2, epsilon, decay):
    """At a learning rate of about 1, Adam's kernel is at most 6e-8 / (1 - beta_2) off in each update, and
    closer to Adam in float64 than Keras's operations.
    """
    weight, first, second, exact = np.ones(500), np.zeros(500), np.zeros(500), []
    for step, gradient in enumerate(GRADIENTS.astype(np.float64), 1):
        weight = weight - weight * decay * rate(step - 1)
        first += (gradient - first) * (1 - 0.9)
        second += (gradient**2 - second) * (1 - beta_2)
        alpha = rate(step - 1) * np.sqrt(1 - beta_2**step) / (1 - 0.9**step)
        weight = weight - alpha * first / (np.sqrt(second) + epsilon)
        exact.append(weight)
    fused, plain = (np.abs(path_of(make(), fused=fused) - exact) for fused in (True, False))

    assert fused[0].max() <= 2.0**-24 / (1 - beta_2)
    assert fused[0].max() < plain[0].max() / 2
    assert fused.max() < plain.max()


def test_rules_that_assign_in_their_own_way_are_left_to_keras():
    """A kernel would pass over a method, or a constant, that the user has replaced."""

    class Assigning(keras.optimizers.SGD):
        def assign_sub(self, variable, value):
            super().assign_sub(variable, 2.0 * value)

    replaced = keras.optimizers.SGD()
    replaced.update_step = lambda *_: None
    variable = keras.optimizers.Adam(beta_1=tf.Variable(0.9))

    assert [fused_rule(one) for one in (Assigning(), replaced, variable)] == [None] * 3
