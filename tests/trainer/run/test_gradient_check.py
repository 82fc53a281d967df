"""On request, a step's gradients are compared with those of a plain loop."""

import dataclasses
import functools

import keras
import pytest
import tensorflow as tf
from helpers import Linear, slopes
from plans import Pair, keras_model, plan_of

from trainer import Losses, Monitoring
from trainer.run import gradient_check
from trainer.run.gradient_check import IN_FLOAT32, IN_HALF, check_gradients, differing

BATCH = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0], [0.5, -2.0]])


def checked(plan, batch=BATCH):
    """The result of the check, which moves no variable."""
    before = [variable.numpy().tobytes() for variable in plan.model.variables]
    result = check_gradients(plan, batch, plan.rule.initial_state())
    assert [variable.numpy().tobytes() for variable in plan.model.variables] == before
    return result


@pytest.mark.parametrize("replicas", [1, 3])
def test_equal_gradients_pass_and_nothing_moves(mirrored, replicas):
    """L19: a model with BatchNorm and Dropout has the gradients of a plain loop; the check moves no bit."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras_model()

    assert checked(plan_of(model, strategy=strategy)) == "those of a plain loop"


def wrong_by(monkeypatch, factor, end="kernel"):
    """Multiplies gradients that the step's pass computes, of variables with this end of a name."""
    right = gradient_check.results_of_pass

    def results(*arguments):
        found = right(*arguments)
        return {name: factor * each if name.endswith(end) else each for name, each in found.items()}

    monkeypatch.setattr(gradient_check, "results_of_pass", results)


@pytest.mark.thorough
@pytest.mark.parametrize("checked_by", ["train", "dry_run"])
def test_another_gradient_is_refused(monkeypatch, checked_by):
    """L19: with `check_gradients`, and in a dry run, a step whose gradient is not that of a plain
    loop is refused, and the variable named.
    """
    wrong_by(monkeypatch, 1.01)
    trainer = Linear(verbose=False, monitoring=Monitoring(check_gradients=checked_by == "train"))
    begin = functools.partial(trainer.train, steps=1) if checked_by == "train" else trainer.dry_run
    with pytest.raises(ValueError, match=r"`compute_loss`.*/kernel'"):
        begin(slopes(1.0, 2.0), global_batch=2)

    assert trainer.totals.attempted == 0


@pytest.mark.thorough
def test_a_run_does_not_check_by_default(monkeypatch):
    """By default, a run compares nothing."""
    wrong_by(monkeypatch, 1.01)
    trainer = Linear(verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)

    assert trainer.totals.applied == 1


@pytest.mark.parametrize(
    ("precision", "step", "plain", "accepted"),
    [
        ("float32", [1.0, 1.0], [1.0, 1.0 + 0.5 * IN_FLOAT32], True),
        ("float32", [1.0, 1.0], [1.0, 1.0 + 4 * IN_FLOAT32], False),
        ("mixed_bfloat16", [1.0, 1.0], [1.0, 1.0 + 0.5 * IN_HALF], True),
        ("mixed_bfloat16", [1.0, 1.0], [1.0, 1.0 + 4 * IN_HALF], False),
        ("float32", [float("inf"), 1.0], [1.0, 1.0], True),
        ("float32", None, [1.0], False),
        ("float32", [1.0], None, True),
    ],
)
def test_tolerance(precision, step, plain, accepted):
    """Gradients may differ by rounding; a missing one may not; inf and NaN skip the step anyway."""
    layers = [keras.Input([2]), keras.layers.Dense(1, dtype=precision)]
    step, plain = (None if each is None else tf.constant(each) for each in (step, plain))
    found = differing({"kernel": step}, {"kernel": plain}, plan_of(keras.Sequential(layers)))

    assert found == ([] if accepted else ["kernel"])


def test_noise_is_not_compared():
    """A gradient that is all rounding, beside much larger ones, may differ by more than itself."""
    plan, noise = plan_of(Pair()), ({"bias": tf.constant([1e-5])}, {"bias": tf.constant([-1e-5])})
    large = {"kernel": tf.constant([1.0])}

    assert differing(large | noise[0], large | noise[1], plan) == []
    assert differing(*noise, plan) == ["bias"]


def images_of_one_value(seed):
    """A plan of a convolution and BatchNorm, and a batch of images that are all 0.

    The true gradient of the convolution's bias is 0. What is computed is rounding.
    """
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Conv2D(4, 3),
        keras.layers.BatchNormalization(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, name="head"),
    ]
    model = keras.Sequential([keras.Input([6, 6, 3]), *layers])

    def compute_loss(batch, training):
        images, labels = batch
        return keras.losses.sparse_categorical_crossentropy(
            labels, model(images, training=training), from_logits=True
        )

    return plan_of(model, compute_loss), (tf.zeros([8, 6, 6, 3]), tf.range(8) % 3)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_gradient_is_refused_among_rounding(monkeypatch, seed):
    """A trial with zeros is accepted, where BatchNorm magnifies rounding; an error of 1% is not."""
    plan, batch = images_of_one_value(seed)
    assert checked(plan, batch) == "those of a plain loop"

    wrong_by(monkeypatch, 1.01, "/head/bias")
    with pytest.raises(ValueError, match=r"`compute_loss`.*/head/bias'"):
        checked(plan, batch)


def test_a_loss_that_fails_on_a_few_examples_is_not_compared(caplog):
    """The check does not end a run: what it cannot compute, the step itself will meet or not."""
    plan = plan_of(Pair(), lambda batch, training: 1 / 0)  # noqa: ARG005

    assert checked(plan, tf.ones([4])) == "not compared: division by zero"
    assert "division by zero" in caplog.text


def test_a_model_of_one_batch_size_is_compared():
    """A share has the size that the model's inputs ask for."""
    model = keras.Sequential([keras.Input(batch_shape=[16, 2]), keras.layers.Dense(1)])

    assert checked(plan_of(model), tf.ones([16, 2])) == "those of a plain loop"
    assert checked(plan_of(model, num_microbatches=2), tf.ones([32, 2])) == "those of a plain loop"


class Counting(keras.layers.Layer):
    """Counts the examples that it has seen."""

    def build(self, shape):
        """Creates the counter."""
        self.seen = self.add_weight(
            name="seen", shape=(), dtype="int32", trainable=False, initializer="zeros"
        )

    def call(self, inputs):
        """Returns its inputs."""
        self.seen.assign(self.seen + keras.ops.shape(inputs)[0])
        return inputs


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


def stacked(*layers):
    """The layers after a dense one."""
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(2), *layers])


def contrastive(model):
    """The squared distance of an example's output from the mean output."""

    def compute_loss(batch, training):
        outputs = model(batch, training=training)[:, 0]
        return (outputs - tf.reduce_mean(outputs)) ** 2

    return compute_loss


COUPLING = {
    "Dropout": (lambda: stacked(keras.layers.Dropout(0.5)), None),
    "LayerNormalization": (lambda: stacked(keras.layers.LayerNormalization()), None),
    "regularizer": (lambda: stacked(keras.layers.Dense(2, kernel_regularizer="l2")), None),
    "mean": (lambda: stacked(Adding(lambda x: keras.ops.mean(x**2))), None),
    "per example": (lambda: stacked(Adding(lambda x: keras.ops.sum(x**2, axis=-1))), None),
    "sum": (lambda: stacked(Adding(lambda x: keras.ops.sum(x**2))), "/kernel'"),
    "spread": (lambda: stacked(Adding(keras.ops.max)), "/kernel'"),
    "BatchNormalization": (lambda: stacked(keras.layers.BatchNormalization()), "/kernel'"),
    "Counting": (lambda: stacked(Counting()), "/seen'"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", COUPLING)
def test_what_couples_examples_is_named(caplog, name):
    """L8: what a layer computes of several examples at once is named; nothing else is."""
    make, named = COUPLING[name]
    model = make()

    def squares(batch, training):
        return model(batch, training=training)[:, 0] ** 2

    result = checked(plan_of(model, squares, num_microbatches=2))

    assert result.startswith("those of a plain loop")
    assert ("depend on how" in result) == ("depend on how" in caplog.text) == (named is not None)
    assert named is None or named in result


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_loss_that_couples_examples_is_named(mirrored, dropout, replicas):
    """L8: a contrastive loss is another one on shares, and is named, also in a model with Dropout."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    batch = tf.tile(BATCH, [3, 1]) * tf.range(12.0)[:, None]
    with strategy.scope():
        model = stacked(keras.layers.Dropout(dropout))
    plan = plan_of(model, contrastive(model), strategy=strategy)

    assert ("depend on how" in checked(plan, batch)) == (replicas > 1)
    assert "depend on how" in checked(dataclasses.replace(plan, num_microbatches=2), batch)


class Centered(Linear):
    """Its loss is the variance of the outputs over the batch."""

    def __init__(self, right, **arguments):
        """Takes whether the mean is that of the whole batch, or of a replica's share."""
        super().__init__(losses=Losses(reduction="global"), verbose=False, **arguments)
        self.right = right

    def compute_loss(self, batch, training):
        """The variance."""
        own = self.model(batch["x"], training=training)[:, 0]
        outputs = self.all_gather(own)
        return tf.reduce_mean((outputs - tf.reduce_mean(outputs if self.right else own)) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize("right", [False, True])
def test_a_missing_gather_is_found(mirrored, right):
    """L8: a global loss of which a part sees only a replica's share is named in a dry run."""
    batch = {"x": [[1.0], [2.0], [4.0], [7.0], [0.0], [9.0]]}
    data = tf.data.Dataset.from_tensor_slices(batch).batch(6)
    found = Centered(right, strategy=mirrored(3)).dry_run(data)

    assert ("depend on how" in found.gradients) == (not right)
