"""One forward and backward pass over a microbatch, as a pure function."""

import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes
from plans import Pair, pass_inputs_of, plan_of

from trainer import Monitoring, Trainer
from trainer.base.warn_once import warn_once
from trainer.step.differentiate import (
    as_dense,
    check_some_gradient,
    find_nonfinite,
    parts_of_mean,
    split_replaced,
)
from trainer.step.microbatch import Contribution


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
    check_some_gradient([None, tf.constant(1.0)])
    with pytest.raises(
        ValueError, match="must depend on a trainable variable; got None for every gradient"
    ):
        check_some_gradient([None, None])


def test_as_dense():
    """Repeated rows are summed, and a missing gradient stays missing."""
    sparse = tf.IndexedSlices(tf.constant([1.0, 2.0]), tf.constant([1, 1]), tf.constant([3]))

    assert as_dense(None) is None
    np.testing.assert_array_equal(as_dense(sparse), [0.0, 3.0, 0.0])


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


class Remat(keras.layers.Layer):
    """A dense layer that is computed again in the backward pass."""

    def build(self, shape):
        """Builds the inner layer."""
        self.inner = keras.layers.Dense(2, name="inner")
        self.inner.build(shape)

    def call(self, inputs):
        """Rematerializes it."""
        return keras.remat(self.inner)(inputs)


@pytest.mark.parametrize("given", [False, True])
def test_a_weight_that_a_pass_is_given_has_a_gradient(monkeypatch, given):
    """L19: as under parameter servers with jit_compile=True, the gradients would be lost."""

    def all_positions(plan):
        return [str(place) for place in range(len(plan.held_back))]

    if given:
        monkeypatch.setattr("trainer.step.replica.positions_by_value", all_positions)
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([2]), Remat(), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        jit_compile=False,
        monitoring=Monitoring(check_gradients=False),
        verbose=False,
    )
    x = np.ones([4, 2], np.float32)
    if not given:
        assert trainer.train((x, x[:, :1]), steps=1, global_batch=4).totals.applied == 1
        return
    with pytest.raises(ValueError, match="has no gradient") as error:
        trainer.train((x, x[:, :1]), steps=1, global_batch=4)
    assert "inner/kernel" in str(error.value)


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
