"""One forward and backward pass over a microbatch, as a pure function."""

import contextlib
import functools
import math
import types

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, adam, slopes
from hypothesis import given
from hypothesis import strategies as st
from plans import Pair, keras_model, pass_inputs_of, plan_of

from trainer import Losses, Monitoring, Trainer
from trainer.base.warn_once import warn_once
from trainer.step.passes import (
    find_nonfinite,
    forward,
    fused_batch_norm,
    parts_of_mean,
    split_replaced,
    written_by,
)
from trainer.step.plan import microbatch_plan
from trainer.step.types import Contribution

pytestmark = pytest.mark.sampled


def differentiated(plan, batch, weights=None, *, scale=1.0):
    """The results of a plan's only pass."""
    return plan.groups[0].differentiate(pass_inputs_of(plan, batch, weights, scale=scale))


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_gradients_are_scaled_and_losses_are_not(scale):
    """L2: the loss scale multiplies the gradients, which are of the weighted mean, and not the loss."""
    plan = plan_of(Pair())
    result = differentiated(plan, tf.constant([1.0, 3.0]), [1.0, 3.0], scale=scale)

    assert [float(gradient) for gradient in result.contribution.gradients] == [
        2.5 * scale,
        5.0 * scale,
    ]
    assert float(result.contribution.loss) == 12.5
    assert (result.written, result.rows) == ({}, ((), {}))


def test_regularization_counts_by_examples():
    """A model's own losses enter by the share's part of the examples, and are reported separately."""
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
    )
    plan = plan_of(keras.Sequential([keras.Input([1]), layer]))
    inputs = pass_inputs_of(plan, tf.ones([2, 1]))
    size = inputs.global_batch._replace(weight=tf.constant(8.0), examples=tf.constant(8))
    result = plan.groups[0].differentiate(inputs._replace(global_batch=size))

    # A quarter of the examples: a loss of 1/4, a penalty of 0.5/4, and the gradients of both.
    assert float(result.contribution.loss) == 0.25
    assert float(result.contribution.regularization_loss) == 0.125
    assert result.contribution.gradients[0].numpy().tolist() == [[0.5]]


def test_parts_of_a_mean():
    """L8: floats count by their share of the examples; a bad value of no example does not count."""
    values = {"0": tf.constant([6.0, np.nan]), "1": tf.constant(7)}
    part = parts_of_mean(values, tf.constant(0.5))
    none = parts_of_mean(values, tf.constant(0.0))

    np.testing.assert_array_equal(part["0"], [3.0, np.nan])
    assert (none["0"].numpy().tolist(), int(none["1"])) == ([0.0, 0.0], 7)


def test_sparse_gradients_are_coalesced_or_dense():
    """An embedding's gradient has each row once; with several microbatches it is dense."""
    for num_microbatches, kind in [(1, tf.IndexedSlices), (2, tf.Tensor)]:
        layers = [keras.layers.Embedding(4, 1), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input([2], dtype="int32"), *layers])
        plan = plan_of(model, num_microbatches=num_microbatches)
        result = differentiated(plan, tf.constant([[1, 1], [2, 1]]))
        [gradient, *_] = result.contribution.gradients

        assert isinstance(gradient, kind)
        if kind is tf.IndexedSlices:
            assert sorted(gradient.indices.numpy().tolist()) == [1, 2]


@pytest.mark.parametrize(
    ("loss", "gradient", "single_pass", "expected"),
    [
        (1.0, 1.0, False, (0, [0, 0], [0, 0])),
        (1.0, math.nan, False, (0, [0, 0], [0, 1])),
        (1.0, math.nan, True, (0, [0, 0], [0, 0])),  # `diagnose` looks at the gradients instead
        (math.inf, 1.0, False, (1, [1, 0], [0, 0])),
        (math.inf, math.nan, False, (1, [1, 0], [0, 0])),  # a consequence of the loss
        (math.nan, 1.0, False, (1, [0, 1], [0, 0])),
    ],
)
def test_flags(loss, gradient, single_pass, expected):
    """L17: bad gradients are flagged only if the loss was finite; bad losses are counted."""
    contribution = Contribution(
        [tf.constant([1.0]), tf.constant([0.0, gradient])], tf.constant(loss), tf.constant(0.0)
    )
    flags = find_nonfinite(contribution, [tf.constant([0.0, loss])], single_pass=single_pass)

    assert (int(flags.loss), flags.losses.numpy().tolist(), flags.gradients.numpy().tolist()) == (
        expected
    )


def test_a_bad_regularizer_is_a_bad_loss():
    """A penalty that is not finite is flagged like a loss, and no example is counted."""
    contribution = Contribution([tf.constant(1.0)], tf.constant(0.0), tf.constant(math.inf))
    flags = find_nonfinite(contribution, [tf.constant([0.0])], single_pass=False)

    assert (int(flags.loss), flags.losses.numpy().tolist()) == (1, [0, 0])


def test_a_loss_that_reaches_no_variable_is_refused():
    """If every gradient is missing there is nothing to train; one gradient is enough."""
    model = Pair()
    plan = plan_of(model, lambda batch, **_: batch)
    with pytest.raises(ValueError, match="`compute_loss`"):
        differentiated(plan, tf.constant([1.0]))


def test_a_gradient_has_the_shape_of_its_variable():
    """Also where the trace has lost it, as after a reshape of the model's input."""
    variable = tf.Variable(tf.zeros([2, 3]))
    plan = types.SimpleNamespace(weights=[variable], dense=False)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None)])
    def shape_of(gradient):
        [found], replaced = split_replaced({0: gradient}, plan)
        assert not replaced
        assert found.shape == [2, 3]
        return found

    assert shape_of(tf.ones([2, 3])).shape == [2, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_variable_without_a_gradient_is_named(caplog, mirrored, replicas):
    """L19: a trainable variable that no gradient reaches is named in a warning, once."""

    class Unused(keras.layers.Layer):
        """Has a weight that its outputs do not depend on."""

        def build(self, shape):
            """Creates the weight."""
            self.idle = self.add_weight(name="idle", shape=shape[-1:])

        def call(self, inputs):
            """Returns its inputs."""
            return inputs

    class WithUnused(Linear):
        """A layer without effect before the weight of `Linear`."""

        def build_model(self):
            """Two layers."""
            return keras.Sequential([keras.Input([1]), Unused(), keras.layers.Dense(1)])

    warn_once.cache_clear()
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = WithUnused(verbose=False, strategy=strategy)
    for steps in (1, 2):
        trainer.train(slopes(1.0, 2.0, 3.0), steps=steps, global_batch=3)
    found = [each.getMessage() for each in caplog.records if "No gradient" in each.getMessage()]
    assert "The loss depends" not in caplog.text

    assert len(found) == 1
    assert "unused" in found[0]
    assert "none for 'sequential" in str(trainer.dry_run(slopes(1.0, 2.0, 3.0), global_batch=3))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "use",
    [
        "trained",
        pytest.param("frozen", marks=pytest.mark.slow),
        pytest.param("stopped", marks=pytest.mark.thorough),
    ],
)
def test_a_head_that_nobody_trains_is_named(caplog, use):
    """L19: a layer kept on the trainer, not in the model, is named if the loss gives it a gradient; a
    frozen one, or one under stop_gradient, is not.
    """

    class WithHead(Linear):
        """The loss goes through a layer of the trainer's own."""

        def build_model(self):
            """The model, and beside it a head."""
            self.head = keras.layers.Dense(1, use_bias=False, name="head")
            self.head.build([None, 1])
            self.head.trainable = use != "frozen"
            return super().build_model()

        def compute_loss(self, batch, training):
            """The squared distance of the model's outputs from the head's."""
            outputs = self.model(batch["x"], training=training)
            guesses = self.head(outputs)
            if use == "stopped":
                guesses = tf.stop_gradient(guesses)
            return (outputs - guesses)[:, 0] ** 2

    warn_once.cache_clear()
    trainer = WithHead(verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)
    found = [
        each.getMessage() for each in caplog.records if "The loss depends" in each.getMessage()
    ]
    assert ["'head/kernel'" in text for text in found] == ([True] if use == "trained" else [])


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
    with pytest.raises(ValueError, match="`model` must"):
        trained(lambda: shrinking("mixed_float16"))


@pytest.mark.thorough
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
    ("outside", "inside"),
    [
        ((True, True), (False, True)),
        ((False, True), (True, True)),
        ((False, True), (True, False)),
    ],
)
def test_a_loss_that_freezes_or_unfreezes_is_refused(outside, inside):
    """Otherwise the gradient of one layer would be applied to another one."""
    trainer = Freezing(optimizer="sgd", jit_compile=False, verbose=False)
    trainer.train(np.ones([4, 2], np.float32), steps=1, global_batch=4)
    for layer, on in zip(trainer.model.layers, outside, strict=True):
        layer.trainable = on
    trainer.inside = inside
    before = [variable.numpy().tolist() for variable in trainer.model.variables]
    with pytest.raises(ValueError, match=r"`compute_loss`.*a/kernel"):
        trainer.train(np.ones([4, 2], np.float32), steps=2, global_batch=4)

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
    with pytest.raises(ValueError, match=r"`model`.*gain"):
        weights_after_a_step(Doubling, 2, rematerialized=True, check_gradients=check_gradients)


@pytest.mark.thorough
def test_a_loss_that_is_added_in_a_rematerialized_layer_is_refused():
    """It would have no gradient. Added outside, it has one."""
    penalized = functools.partial(keras.layers.Dense, 2, activity_regularizer="l2", name="inner")
    assert weights_after_a_step(penalized, 1, rematerialized=False)
    with pytest.raises(ValueError, match="`model`"):
        weights_after_a_step(penalized, 1, rematerialized=True)


IDS = np.arange(300, 308, dtype=np.int32)[:, None]
DATA = (IDS, np.ones([8, 1], np.float32))


def tower():
    """A lookup for each example."""
    layers = [keras.layers.Embedding(400, 3, name="table"), keras.layers.Flatten()]
    return keras.Sequential(layers, name="blind")


def called():
    """A `Sequential` without an input inside a functional model."""
    inputs = keras.Input([1], dtype="int32")
    return keras.Model(inputs, keras.layers.Dense(1)(tower()(inputs)))


def built():
    """A `Sequential` that was built by hand."""
    model = tower()
    model.add(keras.layers.Dense(1))
    model.build([None, 1])
    return model


class Subclassed(keras.Model):
    """Casts floats to its compute dtype, as every subclass does."""

    def __init__(self):
        """A lookup."""
        super().__init__()
        self.table = keras.layers.Embedding(400, 3, name="table")
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        """Looks up."""
        return self.dense(self.table(x)[:, 0])


def trainer_of(make, **arguments):
    """A trainer in bfloat16."""
    return Trainer(
        model=make,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss_fn="mse",
        precision="mixed_bfloat16",
        verbose=False,
        seed=0,
        **arguments,
    )


def functional():
    """An `Input` without a dtype holds floats, which a layer around the lookup casts to its own."""

    class Tokens(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(400, 3, name="table")

        def build(self, shape):
            self.table.build(shape)

        def call(self, ids):
            return self.table(ids)[:, 0]

    inputs = keras.Input([1])
    return keras.Model(inputs, keras.layers.Dense(1)(Tokens()(inputs)))


@pytest.mark.parametrize("make", [called, built, functional])
def test_ids_that_a_model_would_round_are_refused(make):
    """In training and in evaluations of the same precision; one in float32 rounds nothing."""
    with pytest.raises(ValueError, match=r"`model`.*Embedding 'table'"):
        trainer_of(make).train(DATA, steps=1, global_batch=8)
    with pytest.raises(ValueError, match=r"`model`.*Embedding 'table'"):
        trainer_of(make).predict(IDS, global_batch=8, precision="train")

    trainer = trainer_of(make)
    rows = trainer.model.get_weights()[0][IDS[:, 0]]
    kernel, bias = trainer.model.get_weights()[1:]
    found = trainer.predict(IDS, global_batch=8)
    np.testing.assert_allclose(found, rows @ kernel + bias, rtol=1e-5)


@pytest.mark.thorough
def test_ids_that_arrive_as_half_floats_are_refused():
    """Integers pass a subclassed model as they are; it rounds ids that a file holds as floats."""
    trainer = trainer_of(Subclassed)
    floats = (IDS.astype(np.float32), DATA[1])
    with pytest.raises(ValueError, match=r"`model`.*Embedding 'table'"):
        trainer.train(floats, steps=1, global_batch=8)

    trainer = trainer_of(Subclassed)
    before = trainer.model(IDS) is None or trainer.model.get_weights()[0]
    trainer.train(DATA, steps=1, global_batch=8)
    moved = np.flatnonzero((trainer.model.get_weights()[0] != before).any(1))
    np.testing.assert_array_equal(moved, IDS[:, 0])


def test_integers_that_are_no_ids_are_rounded_as_floats_are():
    """Pixels, for a `Sequential` without an `Input`."""

    def make():
        model = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Dense(1)])
        model.build([None, 1])
        return model

    trainer = trainer_of(make)
    assert trainer.train((IDS - 300, DATA[1]), steps=1, global_batch=8).totals.applied == 1


def test_a_small_embedding_takes_half_floats():
    """All ids up to 256 are exact in bfloat16."""

    class Small(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(257, 1)

        def call(self, x):
            return self.table(x)[:, 0]

    data = (IDS.astype(np.float32) - 100, DATA[1])
    assert trainer_of(Small).train(data, steps=1, global_batch=8).totals.applied == 1


@pytest.mark.thorough
def test_a_reversed_embedding_takes_hidden_states():
    """Its floats are no ids."""

    def make():
        inputs = keras.Input([1], dtype="int32")
        table = keras.layers.ReversibleEmbedding(400, 3)
        hidden = keras.layers.Dense(3)(table(inputs))
        return keras.Model(inputs, keras.layers.Flatten()(table(hidden, reverse=True))[:, :1])

    assert trainer_of(make).train(DATA, steps=1, global_batch=8).totals.applied == 1


@pytest.mark.thorough
def test_a_subclass_of_embedding_may_take_other_arguments():
    """Positional tensors, or the ids by another name."""

    class Shifted(keras.layers.Embedding):
        def call(self, ids, offset):
            return super().call(ids + offset)

    class Named(keras.layers.Embedding):
        def call(self, ids):
            return super().call(ids)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.shifted, self.named = Shifted(400, 1), Named(400, 1)

        def call(self, x):
            return self.shifted(x, keras.ops.ones_like(x))[:, 0] + self.named(ids=x)[:, 0]

    assert trainer_of(Model).train(DATA, steps=1, global_batch=8).totals.applied == 1


@pytest.mark.thorough
def test_replicas_share_a_lookup(mirrored):
    """Each waits for the rows of the other one between its own two: the table of one device."""

    class Pairs(Trainer):
        def build_model(self):
            inputs = keras.Input([], dtype="int32")
            return keras.Model(inputs, keras.layers.Embedding(5, 3)(inputs))

        def compute_loss(self, batch, training):
            first = self.all_gather(self.model(batch[:, 0], training=training))
            second = self.all_gather(self.model(batch[:, 1], training=training))
            scores = tf.cast(tf.matmul(first, second, transpose_b=True), tf.float32)
            labels = tf.range(tf.shape(scores)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            return tf.reduce_mean(losses)

    ids = np.arange(24, dtype=np.int32).reshape(12, 2) % 5
    found = []
    for strategy in ("default", mirrored(2), mirrored(3)):
        trainer = Pairs(
            optimizer=lambda: keras.optimizers.SGD(0.5),
            losses=Losses(reduction="global"),
            strategy=strategy,
            seed=0,
            verbose=False,
        )
        trainer.train(ids, steps=3, global_batch=12)
        loss = trainer.evaluate(ids, global_batch=12)["loss"]
        found.append([loss, *trainer.model.get_weights()[0].ravel()])
        assert "call" not in vars(trainer.model.layers[1])
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-5)


Norm = keras.layers.BatchNormalization
IMAGES = (4, 3, 3, 2)


def computed(model, images, *, wanted, **arguments):
    """A training call's outputs, gradients and new weights, and the types of its operations."""
    start = model.get_weights()

    @tf.function
    def run(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            with fused_batch_norm(model, wanted=wanted):
                made = model(images, **{"training": True} | arguments)
            loss = tf.reduce_sum(tf.cast(made, tf.float32) ** 3)
        gradients = tape.gradient(loss, [images, *model.trainable_variables])
        return [made, *[each for each in gradients if each is not None]]

    graph = run.get_concrete_function(images).graph
    found = [np.asarray(tf.cast(each, tf.float32)) for each in run(images)]
    found += model.get_weights()
    model.set_weights(start)
    return found, {operation.type for operation in graph.get_operations()}


def model_of(layer, shape=IMAGES):
    """A model of one layer, with weights other than the initial ones."""
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    generator = np.random.default_rng(0)
    model.set_weights([0.5 + generator.random(weight.shape) for weight in model.get_weights()])
    return model


def random_images(shape, dtype="float32", seed=0):
    """Random images with mean 1 and standard deviation 2."""
    drawn = np.random.default_rng(seed).normal(1.0, 2.0, shape)
    return tf.cast(tf.constant(drawn, tf.float32), dtype)


@pytest.mark.thorough
@given(
    st.tuples(*[st.integers(1, 5)] * 4),
    st.sampled_from(["float32", "mixed_bfloat16", "mixed_float16"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.99, 0.5]),
)
def test_the_kernel_computes_what_keras_computes(shape, policy, scale, center, momentum):
    """Outputs, gradients and moving statistics equal those of Keras to rounding, even for a single
    number.
    """
    policy = keras.DTypePolicy(policy)
    model = model_of(Norm(scale=scale, center=center, momentum=momentum, dtype=policy), shape)
    images = random_images(shape, policy.compute_dtype)
    fused, operations = computed(model, images, wanted=True)
    usual, others = computed(model, images, wanted=False)
    bound = 1e-4 if policy.compute_dtype == "float32" else 4e-2

    assert "FusedBatchNormV3" in operations - others
    for one, other in zip(fused, usual, strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * (1 + np.abs(other).max()))


class SubclassedNorm(Norm):
    """A user's subclass."""


def with_replaced_call():
    """A layer whose `call` was replaced on the instance."""
    layer = Norm()
    layer.call = layer.call
    return layer


# Layers and calls that the kernel does not support, by the reason.
UNSUPPORTED = {
    "another axis": (functools.partial(Norm, axis=1), IMAGES, {}),
    "no images": (Norm, (4, 3), {}),
    "evaluation": (Norm, IMAGES, {"training": False}),
    "a mask": (Norm, IMAGES, {"mask": tf.ones([4, 3, 3], tf.bool)}),
    "frozen": (functools.partial(Norm, trainable=False), IMAGES, {}),
    "renorm": (functools.partial(Norm, renorm=True), IMAGES, {}),
    "synchronized": (functools.partial(Norm, synchronized=True), IMAGES, {}),
    "a small epsilon": (functools.partial(Norm, epsilon=1e-6), IMAGES, {}),
    "float64": (functools.partial(Norm, dtype="float64"), IMAGES, {}),
    "a subclass": (SubclassedNorm, IMAGES, {}),
    "a call of its own": (with_replaced_call, IMAGES, {}),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_anything_else_is_left_to_keras(what):
    """Unsupported layers and calls keep Keras's own operations, to the bit."""
    make, shape, arguments = UNSUPPORTED[what]
    layer = make()
    model = layer if arguments.get("mask") is not None else model_of(layer, shape)
    images = random_images(shape, layer.compute_dtype)
    model(images)
    fused, operations = computed(model, images, wanted=True, **arguments)
    usual, _ = computed(model, images, wanted=False, **arguments)

    assert "FusedBatchNormV3" not in operations
    for one, other in zip(fused, usual, strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_are_left_as_they_were():
    """Layers have their own `call` again afterwards, even if the model raises."""
    model = model_of(Norm())
    with contextlib.suppress(RuntimeError), fused_batch_norm(model, wanted=True):
        assert "call" in vars(model.layers[0])
        raise RuntimeError
    assert "call" not in vars(model.layers[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("jit_compile", "fused"), [(False, True), ("elementwise", True), (True, False)]
)
def test_a_step_uses_the_kernel_unless_xla_compiles_it(jit_compile, fused):
    """The training loop uses the kernel unless XLA compiles the whole step and fuses the operations
    itself.
    """
    trainer = Trainer(
        model=lambda: keras.Sequential(
            [
                keras.Input([4, 4, 1]),
                keras.layers.Conv2D(2, 3),
                Norm(),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        ),
        optimizer=adam,
        loss_fn="mse",
        jit_compile=jit_compile,
        verbose=False,
    )
    images = np.ones([8, 4, 4, 1], np.float32)
    dataset = tf.data.Dataset.from_tensors((images, np.ones([8, 1], np.float32)))
    trainer.train(dataset, steps=1)
    loop = access.steps(trainer).get_concrete_function(iter(dataset), tf.constant(1))

    assert ("FusedBatchNormV3" in str(loop.graph.as_graph_def())) == fused
