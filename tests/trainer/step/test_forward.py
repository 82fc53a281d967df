"""The forward pass computes with given values and assigns nothing."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from plans import Pair, keras_model, pass_inputs_of, plan_of

from trainer import Losses, Monitoring, Trainer
from trainer.step.forward import forward, written_by
from trainer.step.plan import microbatch_plan

BATCH = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])


def constants_of(plan):
    """The constants of a pass of a plan."""
    return microbatch_plan(plan, plan.objectives, dense=False, fuse=False)


def run(plan, values=None):
    """A forward pass on `BATCH`."""
    inputs = pass_inputs_of(plan, BATCH)
    return forward(BATCH, values or inputs.values, inputs.keys, constants_of(plan))


def test_a_keras_model_assigns_nothing():
    """L6: after a forward pass every variable has its bits; BatchNorm's new statistics are returned."""
    model = keras_model()
    plan = plan_of(model)
    before = [variable.numpy().tobytes() for variable in model.variables]
    passed = run(plan)
    given = pass_inputs_of(plan, BATCH).values
    written = written_by(given, passed.after)
    changed = {
        plan.held_back[int(position)].path.split("/")[-1]
        for position, new in passed.after.items()
        if np.any(given[position].numpy() != new.numpy())
    }

    assert [variable.numpy().tobytes() for variable in model.variables] == before
    assert changed == {"moving_mean", "moving_variance"}
    assert passed.after.keys() == given.keys()
    assert written != {}


def test_the_given_values_are_used():
    """The losses come from the values in the inputs, not from those of the variables."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    plan = plan_of(keras.Sequential([keras.Input([2]), layer]))

    assert run(plan).losses[""].numpy().tolist() == [3.0, 8.0, 3.0]
    doubled = run(plan, {"0": tf.fill([2, 1], 2.0)})
    assert doubled.losses[""].numpy().tolist() == [6.0, 16.0, 6.0]


def test_model_losses_are_returned():
    """A regularizer's loss is returned beside the losses of the examples."""
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
    )
    passed = run(plan_of(keras.Sequential([keras.Input([2]), layer])))

    assert [float(loss) for loss in passed.added] == [1.0]


def test_a_module_gives_losses_alone():
    """A module has no losses of its own, and nothing of it is held back."""
    model = Pair()
    plan = plan_of(model)
    batch = tf.constant([1.0, 2.0])
    inputs = pass_inputs_of(plan, batch)
    passed = forward(batch, inputs.values, inputs.keys, constants_of(plan))

    assert passed.losses[""].numpy().tolist() == [5.0, 10.0]
    assert (passed.added, passed.after, passed.aux) == ([], {}, ())


def test_keys_decide_what_a_model_draws():
    """Dropout draws from the key that it is given: the same key gives the same mask."""
    plan = plan_of(keras_model())
    inputs = pass_inputs_of(plan, BATCH)
    constants = constants_of(plan)
    losses = [
        forward(BATCH, inputs.values, inputs.keys * key, constants).losses[""].numpy().tolist()
        for key in (5, 5, 6)
    ]

    assert losses[0] == losses[1] != losses[2]


def test_only_what_changed_is_written():
    """`written_by` returns the values that were replaced, by their position as a string."""
    old, new = tf.constant(1.0), tf.constant(2.0)

    assert written_by({"0": old, "1": old}, {"0": old, "1": new, "2": new}) == {
        "1": new,
        "2": new,
    }
    assert written_by({}, {}) == {}


class Shrinking(keras.layers.Layer):
    """Assigns the kernel of an inner layer in each pass."""

    def __init__(self, **arguments):
        """Creates the layer inside."""
        super().__init__(**arguments)
        self.inner = keras.layers.Dense(1, dtype="mixed_float16")

    def call(self, inputs):
        """Halves the kernel."""
        outputs = self.inner(inputs)
        self.inner.kernel.assign(self.inner.kernel * 0.5)
        return outputs


def shrinking(policy):
    """A model that assigns a weight in a layer with this policy."""
    return keras.Sequential([keras.Input([2]), Shrinking(dtype=policy)])


def trained(model, compute_loss=None):
    """The weights of a model after a step in float16."""

    class Own(Trainer):
        def compute_loss(self, batch, training):
            if compute_loss:
                return compute_loss(self.model, batch, training)
            return super().compute_loss(batch, training)

    trainer = Own(
        model=model,
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn="mse",
        precision="mixed_float16",
        monitoring=Monitoring(check_gradients=False),
        loss_scale=1.0,
        verbose=False,
    )
    trainer.train((np.ones([4, 2], "f"), np.ones([4, 1], "f")), steps=1, global_batch=4)
    return trainer.model.get_weights()


def test_a_rounded_weight_is_refused():
    """L13: a layer that reads its weights in half precision must not assign one."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        trained(lambda: shrinking("mixed_float16"))
    assert str(error.value).startswith(
        "`model` must not assign its weights in half precision; got an assignment to "
    )


def test_a_weight_that_is_not_rounded_is_assigned():
    """What assigns it reads it in float32: a layer with that policy, or the loss itself."""
    trained(lambda: shrinking("float32"))
    third = np.float32(1 / 3)

    def perturbed(model, batch, training):
        x, y = batch
        for weight in model.trainable_variables:
            weight.assign(weight + third)
        return tf.reduce_mean((tf.cast(model(x, training=training), tf.float32) - y) ** 2, axis=1)

    def dense():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        return keras.Sequential([keras.Input([2]), layer])

    kernel, bias = trained(dense, perturbed)

    assert kernel.tolist() == [[np.float32(1.0) + third]] * 2
    assert bias.tolist() == [third]


class Compiled(Trainer):
    """Uses the loss that the model computes by itself, as a detector of KerasHub does."""

    def build_model(self):
        """Two compiled lines."""
        x = keras.Input([1])
        lines = {
            name: keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)(x)
            for name in "ab"
        }
        model = keras.Model(x, lines)
        model.compile("sgd", {"a": "mse", "b": "mse"})
        return model

    def build_optimizer(self):
        """Plain SGD."""
        return keras.optimizers.SGD(0.25)

    def compute_loss(self, batch, training):
        """The model's own loss, which also updates means that `fit` logs."""
        x, y, outputs = self.all_gather((*batch, self.model(batch[0], training=training)))
        loss = self.model.compute_loss(x, y, outputs)
        return loss * self.strategy.num_replicas_in_sync  # by which Keras divides it


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_may_be_the_models_own(replicas, mirrored):
    """The means that a compiled model's `compute_loss` updates concern `fit`: they do not end a run."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Compiled(losses=Losses(reduction="global"), strategy=strategy, verbose=False)
    x = np.ones([4, 1], np.float32)
    trainer.train((x, {"a": 3 * x, "b": x}), steps=1, global_batch=4)

    assert [v.numpy() for v in trainer.model.trainable_variables] == [2.0, 1.0]


class Freezing(Trainer):
    """Sets `trainable` of its model's layers in the loss."""

    inside = ()

    def build_model(self):
        """Two layers of the same shape."""
        layers = [keras.layers.Dense(2, name=name) for name in "ab"]
        return keras.Sequential([keras.Input([2]), *layers])

    def compute_loss(self, batch, training):
        """Sets what `inside` says, before the model is called."""
        for layer, on in zip(self.model.layers, self.inside, strict=False):
            layer.trainable = on
        return tf.reduce_sum((self.model(batch, training=training) - batch) ** 2, axis=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("outside", "inside", "names"),
    [
        ((True, True), (False, True), ["a/bias", "a/kernel"]),
        ((False, True), (True, True), ["a/bias", "a/kernel"]),
        ((False, True), (True, False), ["a/bias", "a/kernel", "b/bias", "b/kernel"]),
    ],
)
def test_a_loss_that_freezes_or_unfreezes_is_refused(outside, inside, names):
    """Otherwise the gradient of one layer would be applied to another one."""
    trainer = Freezing(optimizer="sgd", jit_compile=False, verbose=False)
    trainer.train(np.ones([4, 2], np.float32), steps=1, global_batch=4)
    for layer, on in zip(trainer.model.layers, outside, strict=True):
        layer.trainable = on
    trainer.inside = inside
    before = [variable.numpy().tolist() for variable in trainer.model.variables]
    with pytest.raises(ValueError, match="must leave `trainable`") as error:
        trainer.train(np.ones([4, 2], np.float32), steps=2, global_batch=4)

    found = str(error.value)
    assert re.sub(r"sequential(_\d+)?/", "", found) == (
        "`compute_loss` must leave `trainable` of the layers as it is; got another value for "
        f"{names}. A step updates the variables that were trainable before it. Freeze or unfreeze "
        "layers between two calls of train. To train parts of a model by losses of their own, as "
        "in a GAN, return a dict of losses, and build a dict of optimizers."
    )
    assert [variable.numpy().tolist() for variable in trainer.model.variables] == before


class Doubling(keras.layers.Layer):
    """Doubles a variable and multiplies by it."""

    def build(self, shape):
        """Creates the variable and a weight."""
        self.gain = self.add_weight(shape=[], initializer="ones", trainable=False, name="gain")
        self.weight = self.add_weight(shape=shape[1:], initializer="ones", name="weight")

    def call(self, inputs):
        """Returns inputs times the weight's square and the variable."""
        self.gain.assign(self.gain * 2.0)
        return inputs * self.weight**2 * self.gain


class Normalizing(keras.layers.BatchNormalization):
    """Assigns statistics in every call, and reads them in none."""

    def call(self, inputs):
        """Runs in training mode."""
        return super().call(inputs, training=True)


class Rematerialized(keras.layers.Layer):
    """Computes a layer again in the backward pass."""

    def __init__(self, inner, on):
        """Takes the layer, and whether to do so."""
        super().__init__()
        self.inner = inner
        self.on = on

    def build(self, shape):
        """Builds the layer."""
        self.inner.build(shape)

    def call(self, inputs):
        """Calls the layer."""
        return keras.remat(self.inner)(inputs) if self.on else self.inner(inputs)


def weights_after_a_step(inner, calls, *, rematerialized, check_gradients=True):
    """The weights of a model whose only layer is called a number of times, each on its outputs."""

    class Chain(Trainer):
        def build_model(self):
            return keras.Sequential([keras.Input([2]), Rematerialized(inner(), rematerialized)])

        def compute_loss(self, batch, training):
            outputs = batch
            for _ in range(calls):
                outputs = self.model(outputs, training=training)
            return tf.reduce_sum((outputs - tf.reverse(batch, [0])) ** 2, axis=1)

    trainer = Chain(
        optimizer=lambda: keras.optimizers.SGD(2.0**-10),
        jit_compile=False,
        monitoring=Monitoring(check_gradients=check_gradients),
        verbose=False,
    )
    trainer.train(np.array(BATCH), steps=1, global_batch=3)
    return [variable.numpy() for variable in trainer.model.variables]


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("check_gradients", [False, True])
@pytest.mark.parametrize(("inner", "calls"), [(Doubling, 1), (Normalizing, 1), (Normalizing, 2)])
def test_a_rematerialized_layer_reads_what_it_has_read(inner, calls, check_gradients):
    """L19: the same weights and statistics, also with variables that the layer assigns."""
    plain, again = (
        weights_after_a_step(inner, calls, rematerialized=on, check_gradients=check_gradients)
        for on in (False, True)
    )

    for one, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_gradients", [False, True])
def test_a_rematerialized_layer_that_could_not_is_refused(check_gradients):
    """The second call's result depends on what the first one has assigned."""
    with pytest.raises(ValueError, match="must assign a variable at most once") as error:
        weights_after_a_step(Doubling, 2, rematerialized=True, check_gradients=check_gradients)

    assert re.sub(r"'sequential.*gain'", "'gain'", str(error.value)) == (
        "`model` must assign a variable at most once in a forward pass, and in the layer itself, "
        "if a rematerialized layer reads it; got 2 assignments of 'gain'. When the layer is "
        "computed again in the backward pass, it would read another value than in the forward "
        "pass. Call it once, with all inputs in one batch, or do not rematerialize it."
    )


def test_a_loss_that_is_added_in_a_rematerialized_layer_is_refused():
    """It would have no gradient. Added outside, it has one."""
    penalized = functools.partial(keras.layers.Dense, 2, activity_regularizer="l2", name="inner")
    assert weights_after_a_step(penalized, 1, rematerialized=False)
    with pytest.raises(ValueError, match="`model`"):
        weights_after_a_step(penalized, 1, rematerialized=True)


class Centered(keras.layers.Layer):
    """Takes off the mean over all replicas."""

    def call(self, x):
        """Returns what is left."""
        context = tf.distribute.get_replica_context()
        if context is None:  # while the model is built
            return x
        return x - context.all_reduce("mean", tf.reduce_mean(x, axis=0, keepdims=True))


@pytest.mark.parametrize(
    "place",
    ["loss", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("layer", "condition"))],
)
def test_a_collective_in_the_loss_is_refused(mirrored, place):
    """TensorFlow's error says nothing of `all_gather`; on one replica there is nothing to refuse."""

    class Own(Trainer):
        def build_model(self):
            layers = [Centered()] if place == "layer" else []
            return keras.Sequential([keras.Input([2]), *layers, keras.layers.Dense(1)])

        def compute_loss(self, batch, training):
            outputs = self.model(batch, training=training)[:, 0]
            if place == "loss":
                outputs = Centered()(outputs[:, None])[:, 0]
            if place == "condition":
                rows = self.all_gather(outputs)
                outputs = tf.cond(rows[0] > 0, lambda: Centered()(outputs), lambda: outputs)
            return tf.reduce_mean(outputs**2) if place == "condition" else outputs**2

    def train(strategy):
        reduction = "global" if place == "condition" else "mean"
        trainer = Own(
            optimizer="sgd", losses=Losses(reduction=reduction), strategy=strategy, verbose=False
        )
        return trainer.train(np.eye(4, 2, dtype=np.float32), steps=1, global_batch=4)

    with pytest.raises(RuntimeError, match=r"`compute_loss`.*all_gather"):
        train(mirrored(2))
    assert train("default").totals.applied == 1
