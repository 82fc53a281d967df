"""What couples the examples of a batch is named before the first step of a run that divides batches."""

import keras
import pytest
import tensorflow as tf
from helpers import Linear
from plans import keras_model, plan_of

from trainer.run.coupling_check import what_couples

BATCH = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0], [0.5, -2.0]])
DIVIDED = "With 1 replicas x 2 microbatches"


class Counting(keras.layers.Layer):
    """Counts its calls, and keeps the sum of its inputs."""

    def build(self, shape):
        """Creates a counter and a sum."""
        self.calls = self.add_weight(
            name="calls", shape=(), dtype="int32", trainable=False, initializer="zeros"
        )
        self.total = self.add_weight(name="total", shape=(), trainable=False)

    def call(self, inputs):
        """Returns its inputs."""
        self.calls.assign(self.calls + 1)
        self.total.assign(self.total + keras.ops.sum(inputs))
        return inputs


def stacked(*layers):
    """The layers before a dense one."""
    return keras.Sequential([keras.Input([2]), *layers, keras.layers.Dense(1)])


def coupled(plan, batch=BATCH):
    """The sentences about a plan."""
    return what_couples(plan, batch, plan.rule.initial_state())


def contrastive(model):
    """The squared distance of an example's output from the mean output."""

    def compute_loss(batch, training):
        outputs = model(batch, training=training)[:, 0]
        return (outputs - tf.reduce_mean(outputs)) ** 2

    return compute_loss


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (lambda: stacked(keras.layers.Dropout(0.5)), None),
        (lambda: stacked(keras.layers.LayerNormalization()), None),
        (keras_model, "In training, the layers 'batch_normalization"),
        (lambda: stacked(Counting()), "The forward pass assigns 'sequential"),
    ],
    ids=["Dropout", "LayerNormalization", "BatchNormalization", "Counting"],
)
def test_layers_that_couple_are_named(make, start):
    """L8: layers that use or keep statistics of a batch are named; others are not, nor is Dropout."""
    model = make()
    before = [variable.numpy().tobytes() for variable in model.variables]
    found = coupled(plan_of(model, num_microbatches=2))

    assert [text[: len(start or "")] for text in found] == ([start] if start else [])
    assert all(DIVIDED in text for text in found)
    assert [variable.numpy().tobytes() for variable in model.variables] == before


def test_the_sentences():
    """Each sentence says what the division changes, and what to do or to expect."""
    model = stacked(Counting(name="counting"))
    path = model.name
    [text] = coupled(plan_of(model, num_microbatches=2))

    assert text == (
        f"The forward pass assigns '{path}/counting/calls' and '{path}/counting/total'. With "
        "1 replicas x 2 microbatches, a float becomes the mean over the shares of a batch, "
        "weighted by their numbers of examples, and an integer the value of the first share. So "
        "count or sum nothing over examples in the forward pass."
    )
    model = stacked()
    [text] = coupled(plan_of(model, contrastive(model), num_microbatches=2))
    assert text == (
        "The loss of an example depends on the other examples in `compute_loss`. With 1 replicas "
        "x 2 microbatches, each share of a batch is coupled by itself, which is another loss than "
        'on the whole batch. Pass loss_reduction="global" to couple whole batches: on several '
        "replicas by self.all_gather, on one without microbatches."
    )


class Adding(keras.layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, loss_of, **arguments):
        """Keeps the function of the inputs."""
        super().__init__(**arguments)
        self._loss_of = loss_of

    def call(self, inputs):
        """Returns its inputs."""
        self.add_loss(self._loss_of(inputs))
        return inputs


def test_a_scalar_sum_over_the_batch_is_named(mirrored):
    """L8: a layer that adds the sum of a loss over the examples is named, and so is one whose loss
    couples them; a mean, a regularizer and one number per example are not.
    """
    ops = keras.ops
    with mirrored(3).scope():
        model = stacked(
            Adding(lambda x: 0.1 * ops.sum(ops.square(x)), name="total"),
            Adding(lambda x: ops.max(x) * ops.mean(x), name="spread"),
            Adding(ops.mean, name="mean"),
            Adding(lambda x: ops.sum(ops.square(x), axis=-1), name="each"),
            keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l2"),
        )
    batch = tf.ones([12, 2]) * tf.range(12.0)[:, None]
    plan = plan_of(model, strategy=mirrored(3))
    before = [variable.numpy().tobytes() for variable in model.variables]

    assert [text.split(".")[0] for text in coupled(plan, batch)] == [
        "Layer 'total' adds a scalar loss that is a sum over the examples",
        "Layer 'spread' adds a scalar loss that is neither a mean nor a sum over the examples",
    ]
    assert [variable.numpy().tobytes() for variable in model.variables] == before


class InTraining(Adding):
    """Adds its loss in training only, as a router of experts does."""

    def call(self, inputs, training=None):
        """Returns its inputs."""
        return super().call(inputs) if training else inputs


def balance(x):
    """A router's loss: the products of how often, and how probably, an expert is chosen."""
    gates = keras.ops.softmax(x)
    chosen = keras.ops.one_hot(keras.ops.argmax(gates, axis=-1), 2)
    return 2.0 * keras.ops.sum(keras.ops.mean(gates, axis=0) * keras.ops.mean(chosen, axis=0))


@pytest.mark.parametrize("dropout", [False, True])
def test_a_scalar_that_is_added_in_training_only_is_named(dropout):
    """L8: it is compared in training mode. Where random numbers move it, a sum is still named."""
    ops = keras.ops
    model = stacked(
        Adding(ops.mean, name="usual"),
        *([keras.layers.Dropout(0.1)] if dropout else []),
        InTraining(lambda x: 0.1 * ops.sum(ops.square(x)), name="total"),
        InTraining(lambda x: ops.mean(ops.square(x)), name="mean"),
        *([] if dropout else [InTraining(balance, name="router")]),
        keras.layers.Dense(2, kernel_regularizer="l2"),
    )
    batch = tf.stack([tf.linspace(1.0, 2.0, 8), tf.linspace(2.0, 1.0, 8)], axis=1)
    texts = coupled(plan_of(model, num_microbatches=2), tf.tile(batch, [2, 1]))
    expected = [
        "Layer 'total' adds a scalar loss that is a sum over the examples",
        "Layer 'router' adds a scalar loss that is neither a mean nor a sum over the examples",
    ]

    assert [text.split(".")[0] for text in texts] == expected[: 1 if dropout else 2]


def test_a_whole_batch_needs_no_warning():
    """Nothing is said where a batch is one share."""
    model = stacked()
    plan = plan_of(model, contrastive(model))

    assert coupled(plan) == []


def test_replicas_count(mirrored):
    """L8: three replicas divide a batch as microbatches do."""
    strategy = mirrored(3)
    with strategy.scope():
        model = stacked()
    [text] = coupled(
        plan_of(model, contrastive(model), strategy=strategy, num_microbatches=1),
        tf.ones([12, 2]) * tf.range(12.0)[:, None],
    )

    assert "With 3 replicas x 1 microbatches" in text


class Centered(Linear):
    """Its loss is the variance of the outputs over the batch."""

    def __init__(self, right, **arguments):
        """Takes whether the mean is that of the whole batch, or of a replica's share."""
        super().__init__(loss_reduction="global", verbose=False, **arguments)
        self.right = right

    def compute_loss(self, batch, training):
        """The variance."""
        own = self.model(batch["x"], training=training)[:, 0]
        outputs = self.all_gather(own)
        return tf.reduce_mean((outputs - tf.reduce_mean(outputs if self.right else own)) ** 2)


@pytest.mark.thorough
def test_a_missing_gather_is_found(mirrored, caplog):
    """L8: a global loss of which a part sees only a replica's share is named before the first step."""
    batch = {"x": [[1.0], [2.0], [4.0], [7.0], [0.0], [9.0]]}
    data = tf.data.Dataset.from_tensor_slices(batch).batch(6)
    Centered(True, strategy=mirrored(3)).train(data, steps=1)
    assert "compute_loss" not in caplog.text
    Centered(False, strategy=mirrored(3)).train(data, steps=1)

    # The variance is 10.4722. The shares' means are 7/3, 5/3 and 2/3 away from the mean.
    assert "`compute_loss` returns 13.3611 on 3 replicas, and 10.4722 on one." in caplog.text


class Surrogate(Linear):
    """A policy's loss at its first step: the mean of advantages that are 0 in the mean."""

    def compute_loss(self, batch, training):
        """The mean of ratios times advantages, where every ratio is 1."""
        logits = self.all_gather(self.model(batch["x"], training=training)[:, 0])
        values = self.all_gather(batch["x"][:, 0])
        advantages = (values - tf.reduce_mean(values)) / tf.math.reduce_std(values)
        return tf.reduce_mean(tf.exp(logits - tf.stop_gradient(logits)) * advantages)


@pytest.mark.thorough
def test_a_loss_near_zero_trains(mirrored):
    """A right loss that is 0 up to rounding, which differs between divisions, is no error."""
    batch = {"x": [[0.1], [0.7], [0.3], [1.1], [0.6], [0.9]]}
    data = tf.data.Dataset.from_tensor_slices(batch).batch(6)
    trainer = Surrogate(strategy=mirrored(3), loss_reduction="global", verbose=False)

    assert trainer.train(data, steps=1).totals.applied == 1


@pytest.mark.thorough
def test_a_run_says_it_once(caplog):
    """L8: a run logs each sentence before its first step, and not again."""

    class Contrastive(Linear):
        """Its loss couples the examples."""

        def compute_loss(self, batch, training):
            """The squared distance from the mean."""
            return contrastive(self.model)(batch["x"], training)

    trainer = Contrastive(num_microbatches=2, verbose=False)
    batch = {"x": tf.constant([[1.0], [2.0], [4.0], [7.0]]).numpy()}
    for steps in (1, 2):
        trainer.train(batch, steps=steps, global_batch=4)

    assert caplog.text.count("The loss of an example depends on the other examples") == 1
