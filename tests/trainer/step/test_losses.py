"""What `compute_loss` returned: checked, named and weighted."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, attempt, linear_model
from hypothesis import example, given
from hypothesis import strategies as st

import strategies
from trainer import Trainer
from trainer.step.losses import (
    added_loss,
    by_objective,
    check_losses,
    losses_and_aux,
    mask_weightless,
    shared_with,
    weighted_mean,
    weighted_sum,
)
from trainer.step.objective import ONLY, Objective
from trainer.step.types import GlobalBatchSize

pytestmark = pytest.mark.sampled

SINGLE = [Objective(ONLY, None, (0,))]
TWO = [Objective("a", None, (0,)), Objective("b", None, (1,))]
BATCH = {"x": tf.ones([3, 2])}


def share_of(weights):
    """A share of examples with these weights."""
    weights = tf.constant(weights, tf.float32)
    return strategies.whole(tf.zeros([len(weights)]), weights)


@given(
    st.lists(
        st.tuples(st.integers(-8, 8), st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
)
@example([(3, 0.0)], 2)  # no weight at all, and an empty share
def test_shares_add_up_to_the_weighted_mean(examples, parts):
    """L8: the means of all shares, empty ones included, add up to the mean over the global batch, or to
    0 if all weights are 0.
    """
    losses, weights = np.float32(list(zip(*examples, strict=True)))
    whole = strategies.whole(tf.constant(losses), tf.constant(weights))
    total = 0.0
    for index in range(parts):
        share = strategies.take(whole, index, parts)
        total += float(weighted_mean(share.batch, share, tf.constant(weights.sum())))
    expected = np.average(losses, weights=weights) if weights.any() else 0.0

    assert total == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_example_of_weight_0_does_not_count(bad):
    """A bad loss at weight 0 adds nothing and is masked; at another weight it shows."""
    losses = tf.constant([bad, 3.0])

    assert float(weighted_sum(losses, share_of([0.0, 2.0]))) == 6.0
    assert mask_weightless(losses, share_of([0.0, 2.0])).numpy().tolist() == [0.0, 3.0]
    assert not math.isfinite(weighted_sum(losses, share_of([1.0, 2.0])))
    assert not math.isfinite(mask_weightless(losses, share_of([1.0, 2.0])).numpy()[0])


def test_losses_may_come_with_aux():
    """Losses come alone or in a pair with aux, which is () if there is none."""
    losses, aux = tf.ones([3]), {"outputs": tf.zeros([3, 2])}
    alone, nothing = losses_and_aux(losses, BATCH, SINGLE)
    paired, found = losses_and_aux((losses, aux), BATCH, SINGLE)

    assert alone[ONLY].numpy().tolist() == paired[ONLY].numpy().tolist() == [1.0] * 3
    assert (nothing, found) == ((), aux)
    of_two, nothing = losses_and_aux(tf.ones([2]), {"x": tf.ones([2, 2])}, SINGLE)  # no pair
    assert (of_two[ONLY].shape, nothing) == ([2], ())


def test_a_loss_under_two_names_is_recognized():
    """Also behind identities, and as two outputs of a `tf.function`. Two calls give two losses, and an
    objective may have none.
    """

    @tf.function(autograph=False)
    def twice(x):
        return x, x

    @tf.function(autograph=False)
    def traced(x):
        one, other = twice(x), twice(x)
        cases = [
            ({"a": x, "b": x}, {"b"}),
            ({"a": x, "b": tf.identity(x)}, {"b"}),
            ({"a": one[0], "b": tf.identity(one[1])}, {"b"}),
            ({"a": one[0], "b": other[0]}, set()),
            ({"a": x, "b": x + 0.0}, set()),
            ({"a": x}, set()),
        ]
        for losses, shared in cases:
            assert shared_with(losses, ["a"], TWO[1:]) == shared_with((losses, ()), ["a"], TWO[1:])
            assert shared_with(losses, ["a"], TWO[1:]) == shared
        assert shared_with(x, ["a"], TWO[1:]) == set()
        return x

    traced(tf.ones([3]))


def test_losses_are_found_by_name():
    """Each objective gets the losses of its name, in the objectives' order; others are ignored."""
    losses = {"b": 2, "c": 3, "a": 1}

    assert list(by_objective(losses, TWO).items()) == [("a", 1), ("b", 2)]
    assert by_objective(2, SINGLE) == {ONLY: 2}


@pytest.mark.parametrize(
    ("losses", "objectives"), [({"a": 1}, TWO), (1.0, TWO), ({"task": 1, "size": 2}, SINGLE)]
)
def test_each_objective_needs_a_loss(losses, objectives):
    """Losses without names, without one of the names, or with names for one optimizer."""
    with pytest.raises(TypeError, match="`compute_loss` must"):
        by_objective(losses, objectives)


@pytest.mark.parametrize(
    ("losses", "error"),
    [
        (tf.ones([3], tf.float16), TypeError),
        (tf.constant(1.0), ValueError),
        (tf.ones([2]), ValueError),
        (None, TypeError),
        ((tf.ones([2]), {}, {}), TypeError),
        ([tf.ones([2]), tf.ones([2])], TypeError),
    ],
    ids=str,
)
def test_losses_are_one_float32_per_example(losses, error):
    """Another dtype or shape, no `return`, or three results instead of two."""
    with pytest.raises(error, match="`compute_loss` must"):
        check_losses(losses, BATCH)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_losses_that_hide_their_number_are_counted(jit_compile):
    """`tf.boolean_mask` does not tell how many losses it leaves, also in a batch of a known size. XLA
    cannot fail then: the losses are NaN, and the step is skipped.
    """

    @tf.function(jit_compile=jit_compile)
    def checked(mask):
        return check_losses(tf.boolean_mask(tf.ones([2]), mask), tf.ones([2]))

    assert checked(tf.constant([True, True])).numpy().tolist() == [1.0, 1.0]
    if jit_compile:
        assert np.isnan(checked(tf.constant([True, False]))).all()
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="`compute_loss` must"):
            checked(tf.constant([True, False]))


def test_losses_of_elements_need_weights_of_elements():
    """L8: losses of shape (examples, tokens) meet weights of that shape, and no others."""
    whole = strategies.whole(tf.zeros([3]), tf.constant([[1.0, 0.0], [2.0, 1.0], [0.0, 0.0]]))
    losses = tf.constant([[1.0, math.nan], [3.0, 5.0], [7.0, 9.0]])
    total = sum(
        float(weighted_sum(losses[one:other], strategies.take(whole, index, 2)))
        for index, (one, other) in enumerate([(0, 2), (2, 3)])
    )

    assert total == 12.0
    for losses, weights in [
        (tf.ones([3, 2]), share_of([1.0, 1.0, 1.0])),
        (tf.ones([3]), whole),
    ]:
        with pytest.raises(ValueError, match="`compute_loss` must"):
            weighted_sum(losses, weights)


def test_weights_of_elements_are_not_broadcast():
    """Where sizes are not static, an op of the graph compares those of losses and weights."""

    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([None, None])])
    def summed(losses, weights):
        return weighted_sum(losses, strategies.whole(losses, weights))

    assert float(summed(tf.ones([2, 3]), tf.ones([2, 3]))) == 6.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="`compute_loss` must"):
        summed(tf.ones([2, 3]), tf.ones([2, 1]))


def added_over_shares(entries_of, values, weights, parts):
    """The sum of all shares' contributions; `entries_of` makes the entries of some examples."""
    whole = strategies.whole(tf.constant(values), tf.constant(weights))
    size = GlobalBatchSize(tf.reduce_sum(whole.weights), tf.constant(len(weights)))
    shares = [strategies.take(whole, index, parts) for index in range(parts)]
    return sum(float(added_loss(entries_of(share.batch), share, size)) for share in shares)


@given(
    st.lists(
        st.tuples(st.integers(-8, 8), st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
)
@example([(3, 1.0), (5, 3.0)], 3)  # an empty share
def test_shares_add_up(examples, parts):
    """L8: over all shares, one number per example adds up to the weighted mean, with other dimensions
    summed; a mean adds up to the mean; and a regularizer to itself.
    """
    values, weights = np.float32(list(zip(*examples, strict=True)))

    def entries_of(share):
        return [share, tf.stack([share, 2 * share], axis=1), tf.reduce_mean(share)]

    def regularizer(share):
        del share
        return [tf.constant(7.0), tf.fill([9], 0.5)]

    mean = np.average(values, weights=weights) if weights.any() else 0.0
    expected = mean + 3 * mean + values.mean()
    assert added_over_shares(entries_of, values, weights, parts) == pytest.approx(
        expected, abs=1e-4
    )
    assert added_over_shares(regularizer, values, weights, parts) == pytest.approx(11.5, rel=1e-5)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_number_of_rows_may_be_unknown(jit_compile):
    """L8: where the batch size is not static, the number of rows decides in the graph."""

    @tf.function(input_signature=[tf.TensorSpec([None])] * 2, jit_compile=jit_compile)
    def added(entry, weights):
        share = strategies.Share(weights, weights, tf.shape(weights)[0])
        return added_loss([entry], share, GlobalBatchSize(tf.constant(8.0), tf.constant(4)))

    weights = tf.constant([2.0, 0.0])

    assert float(added(tf.constant([3.0, math.nan]), weights)) == 3.0 * 2 / 8
    assert float(added(tf.constant([3.0, 4.0, 5.0]), weights)) == 12.0 * 2 / 4


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("shape", [[None], [None, None], None], ids=str)
def test_an_entry_may_hide_how_many_rows_it_has(shape, jit_compile):
    """L8: some operations, such as `tf.math.segment_sum` and `tf.sparse.reduce_sum`, do not tell their
    shape where that of the batch is known.
    """

    @tf.function(jit_compile=jit_compile)
    def added(entry):
        hidden = tf.raw_ops.PlaceholderWithDefault(input=entry, shape=tf.TensorShape(shape))
        weights = tf.constant([2.0, 0.0])
        share = strategies.Share(weights, weights, tf.constant(2))
        return added_loss([hidden], share, GlobalBatchSize(tf.constant(8.0), tf.constant(4)))

    columns = [[1.0], [3.0]] if shape == [None, None] else [1.0, 3.0]
    assert float(added(tf.constant(columns))) == 1.0 * 2 / 8
    rows = [[1.0], [3.0], [4.0]] if shape == [None, None] else [1.0, 3.0, 4.0]
    assert float(added(tf.constant(rows))) == 8.0 * 2 / 4
    if shape is None:
        assert float(added(tf.constant(5.0))) == 5.0 * 2 / 4


class Adding(keras.layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, loss_of, **arguments):
        """Keeps the function of the inputs."""
        super().__init__(**arguments)
        self._loss_of = loss_of
        self.supports_masking = True

    def call(self, inputs):
        """Returns its inputs."""
        self.add_loss(self._loss_of(inputs))
        return inputs


def reports(loss_of, replicas, num_microbatches, mirrored, name):
    """The report of a step of a model with a layer that adds a loss, and the weight after it."""

    class Added(Linear):
        def build_model(self):
            inner = linear_model()
            return keras.Model(inner.inputs, Adding(loss_of, name=name)(inner.outputs[0]))

        def example_weights(self, batch):
            return batch["weight"]

    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Added(strategy=strategy, num_microbatches=num_microbatches, verbose=False)
    x = np.arange(1, 8, dtype=np.float32)[:, None]
    slope, weight = np.zeros(7, np.float32), np.float32([1, 0, 2, 1, 1, 3, 1])
    [report] = attempt(trainer, [{"x": x, "slope": slope, "weight": weight}])
    return report, trainer.weight


@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "num_microbatches"), [(1, 1), (3, 1), (3, 2)])
def test_one_number_per_example_is_weighted_as_the_losses_are(
    mirrored, caplog, replicas, num_microbatches
):
    """L8: a loss of shape (examples, 2) from `add_loss` enters as the weighted mean over the global
    batch, in the report and in the gradient, on replicas and microbatches; a warning names the layer.
    """
    name = f"kl_{replicas}_{num_microbatches}"

    def loss_of(inputs):
        return tf.concat([inputs, 3 * inputs], axis=1)

    with caplog.at_level("WARNING"):
        report, weight = reports(loss_of, replicas, num_microbatches, mirrored, name)

    mean = np.average(np.arange(1, 8), weights=[1, 0, 2, 1, 1, 3, 1])
    assert report.regularization_loss == pytest.approx(4 * mean, rel=1e-6)
    assert weight == pytest.approx(1.0 - 4 * mean, rel=1e-6)
    assert len([text for text in caplog.messages if repr(name) in text]) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("how", ["in training", "regularizer of outputs"])
def test_a_scalar_of_a_layer_is_named_where_batches_are_divided(caplog, how, num_microbatches):
    """L8: a sum over examples counts for less on shares of a batch than on the whole batch. A warning
    names the layer that adds a scalar; nothing is said of a weight's regularizer, and of whole batches.
    """

    class Penalty(keras.layers.Layer):
        def call(self, x, training=None):
            if training:
                self.add_loss(0.01 * keras.ops.sum(x**2))
            return x

    name = f"scalar_{how.replace(' ', '_')}_{num_microbatches}"
    last = Penalty(name=name)
    if how != "in training":
        last = keras.layers.Dense(1, activity_regularizer="l2", name=name)

    def model():
        dense = keras.layers.Dense(1, kernel_regularizer="l2", kernel_initializer="ones")
        return keras.Sequential([keras.Input([3]), dense, last])

    trainer = Trainer(
        model=model,
        optimizer="sgd",
        loss_fn="mse",
        num_microbatches=num_microbatches,
        verbose=False,
    )
    with caplog.at_level("WARNING"):
        trainer.train((np.ones([8, 3]), np.zeros([8, 1])), steps=1, global_batch=8)

    said = [each.getMessage() for each in caplog.records if "scalar" in each.getMessage()]
    assert len(said) == (num_microbatches > 1)
    assert all(repr(name) in text for text in said)


def check_one_step_is_as_in_keras(model, data):
    """Trains for one step with `fit`'s step and with ours, and compares the weights."""
    plain = model()
    plain.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    plain.train_on_batch(*data)
    trainer = Trainer(
        model=model, optimizer=lambda: keras.optimizers.SGD(0.1), loss_fn="mse", verbose=False
    )
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(len(data[0]), drop_remainder=True)
    trainer.train(dataset, steps=1)

    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("examples", [5, 4])
def test_a_weight_regularizer_of_several_numbers_counts_as_in_keras(examples):
    """Its numbers are summed, also where there are as many as examples."""

    def by_row(kernel):
        return 0.1 * tf.reduce_sum(kernel**2, axis=1)

    def model():
        dense = keras.layers.Dense(3, kernel_initializer="ones", kernel_regularizer=by_row)
        return keras.Sequential([keras.Input([4]), dense])

    data = np.ones([examples, 4], np.float32), np.zeros([examples, 3], np.float32)
    check_one_step_is_as_in_keras(model, data)


@pytest.mark.thorough
@pytest.mark.parametrize("adders", [(1,), (1, 1), (2, 1, 3)])
def test_a_tensor_counts_as_often_as_layers_add_it(adders):
    """In a scope, Keras lists a tensor for every layer that added it, as often as all of them did."""

    class Times(keras.layers.Layer):
        def __init__(self, times):
            super().__init__()
            self.times = times

        def call(self, inputs, loss):
            for _ in range(self.times):
                self.add_loss(loss)
            return inputs

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, kernel_initializer="ones")
            self.times = [Times(times) for times in adders]

        def call(self, inputs):
            outputs = self.dense(inputs)
            loss = 0.1 * tf.reduce_mean(outputs**2)
            for layer in self.times:
                outputs = layer(outputs, loss)
            return outputs

    def model():
        built = Model()
        built(np.zeros([1, 4], np.float32))
        return built

    data = np.ones([5, 4], np.float32), np.zeros([5, 3], np.float32)
    check_one_step_is_as_in_keras(model, data)


@pytest.mark.parametrize("loss_of", [None, lambda inputs: 0.3 * tf.reduce_mean(inputs**2)])
def test_what_layers_add_counts_in_a_model_with_masks(loss_of):
    """The check of the masks calls the model, too, which then forgets what its layers have added."""
    ids = np.array([[1, 2, 0], [3, 1, 2], [2, 0, 0], [1, 1, 1]])

    def model():
        keras.utils.set_random_seed(0)
        regularizer = "l1" if loss_of is None else None
        adding = keras.layers.Dense(4, activity_regularizer=regularizer)
        last = [adding] if loss_of is None else [adding, Adding(loss_of)]
        layers = [keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.GRU(3), *last]
        return keras.Sequential([keras.Input([3], dtype="int32"), *layers, keras.layers.Dense(1)])

    check_one_step_is_as_in_keras(model, (ids, np.ones([4, 1], "float32")))


class InTraining(keras.layers.Layer):
    """Adds a loss in training only, as layers with experts do."""

    def call(self, inputs, training=False):
        """Returns its inputs."""
        if training:
            self.add_loss(tf.reduce_mean(inputs**2))
        return inputs


def once(*_):
    """Only the default loss."""
    return tf.zeros([4])


def twice(trainer, x):
    """The model's outputs for another view, before the default loss calls the model."""
    return trainer.model(2.0 * x, training=True)[:, 0]


def without_training(trainer, x):
    """The same, after that call, which adds nothing."""
    return tf.stop_gradient(trainer.model(x, training=False))[:, 0]


def of_a_teacher(trainer, x):
    """Two calls of another model, whose losses do not count."""
    return (trainer.teacher(x, training=True) + trainer.teacher(2.0 * x, training=True))[:, 0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "other", "warns"),
    [
        (False, once, False),
        (True, twice, True),
        (False, without_training, True),
        (True, of_a_teacher, False),
    ],
)
def test_losses_that_keras_forgets_are_warned_of(caplog, first, other, warns):
    """Of two calls of the model, the second one's losses count, in a loop by hand, too."""
    name = other.__name__

    def model(name=name):
        layers = [keras.layers.Flatten(), InTraining(name=name), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input([2, 3]), *layers])

    class Calling(Trainer):
        def compute_loss(self, batch, training):
            before = other(self, batch[0]) if first else 0.0
            losses, _ = super().compute_loss(batch, training)
            return losses + before if first else losses + other(self, batch[0])

    trainer = Calling(model=model, optimizer="sgd", loss_fn="mse", verbose=False)
    trainer.teacher = model(name="of_the_teacher")
    trainer.teacher.trainable = False
    data = np.ones([4, 2, 3], "float32"), np.ones([4, 1], "float32")
    with caplog.at_level("WARNING"):
        trainer.train(data, 1, global_batch=4)

    said = [text for text in caplog.messages if "adds a loss" in text]
    assert [repr(name) in text for text in said] == [True] * warns
