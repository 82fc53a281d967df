"""Before the first step, its gradients are compared with those of a plain loop."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes
from plans import Pair, keras_model, plan_of

from trainer.run import gradient_check
from trainer.run.gradient_check import (
    IN_FLOAT32,
    IN_HALF,
    Compared,
    check_gradients,
    check_same,
    first_examples,
)

BATCH = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])


def checked(plan, batch=BATCH):
    """The result of the check."""
    return check_gradients(plan, batch, plan.rule.initial_state())


class Once(Linear):
    """Its second forward pass has another gradient than its first, times a factor."""

    def __init__(self, factor, **settings):
        """Counts its calls, which a loss must not do."""
        super().__init__(**settings)
        self.factor, self.calls = factor, 0

    def compute_loss(self, batch, training):
        """The loss of `Linear`, with a factor from the second eager call on."""
        losses = super().compute_loss(batch, training)
        if not tf.executing_eagerly():
            return losses
        self.calls += 1
        return losses if self.calls == 1 else losses * self.factor


@pytest.mark.parametrize("replicas", [1, 3])
def test_equal_gradients_pass_and_nothing_moves(mirrored, replicas):
    """L19: a model with BatchNorm and Dropout has the gradients of a plain loop; the check moves no bit."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras_model()
    plan = plan_of(model, strategy=strategy)
    before = [variable.numpy().tobytes() for variable in model.variables]

    assert checked(plan) == "those of a plain loop"
    assert [variable.numpy().tobytes() for variable in model.variables] == before


@pytest.mark.parametrize("checked_by", ["train", "dry_run"])
def test_another_gradient_is_refused(checked_by):
    """L19: with `check_gradients`, and in a dry run, a step whose gradient is not that of a plain
    loop is refused, and the variable named.
    """
    trainer = Once(1.01, verbose=False, check_gradients=checked_by == "train")
    begin = functools.partial(trainer.train, steps=1) if checked_by == "train" else trainer.dry_run
    with pytest.raises(ValueError, match=r"`compute_loss`.*/kernel'"):
        begin(slopes(1.0, 2.0), global_batch=2)

    assert trainer.totals.attempted == 0


def test_a_run_does_not_check_by_default():
    """By default, a run compares nothing: its loss is called once, when the step is traced."""
    trainer = Once(1.01, verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)

    assert (trainer.totals.applied, trainer.calls) == (1, 0)


@pytest.mark.parametrize(
    ("step", "plain", "tolerance", "accepted"),
    [
        ([1.0, 1.0], [1.0, 1.0005], IN_FLOAT32, True),
        ([1.0, 1.0], [1.0, 1.01], IN_FLOAT32, False),
        ([1.0, 1.0], [1.0, 1.05], IN_HALF, True),
        ([1.0, 1.0], [1.0, 2.0], IN_HALF, False),
        ([np.inf, 1.0], [1.0, 1.0], IN_FLOAT32, True),
        (None, [1.0], IN_HALF, False),
        ([1.0], None, IN_FLOAT32, True),
        (None, None, IN_FLOAT32, True),
        ([1.0], [1.0, 1.0], IN_HALF, False),
    ],
)
def test_tolerance(step, plain, tolerance, accepted):
    """Gradients may differ by rounding; a missing one may not; inf and NaN skip the step anyway."""
    step, plain = (None if each is None else tf.constant(each) for each in (step, plain))
    pairs = [Compared("kernel", step, plain)]

    if accepted:
        check_same(pairs, tolerance)
    else:
        with pytest.raises(ValueError, match="'kernel'"):
            check_same(pairs, tolerance)


def test_noise_is_not_compared():
    """A gradient that is all rounding, beside much larger ones, may differ by more than itself."""
    large = Compared("kernel", tf.constant([1.0]), tf.constant([1.0]))
    noise = Compared("bias", tf.constant([1e-5]), tf.constant([-1e-5]))

    check_same([large, noise], IN_FLOAT32)
    with pytest.raises(ValueError, match="'bias'"):
        check_same([noise], IN_FLOAT32)


def images_of_one_value(seed):
    """A plan of a convolution and BatchNorm, and a batch of images that are all 0.

    The true gradient of the convolution's bias is 0. What is computed is rounding.
    """
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Conv2D(4, 3),
        keras.layers.BatchNormalization(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential([keras.Input([6, 6, 3]), *layers])

    def compute_loss(batch, training):
        images, labels = batch
        return keras.losses.sparse_categorical_crossentropy(
            labels, model(images, training=training), from_logits=True
        )

    return plan_of(model, compute_loss), (tf.zeros([8, 6, 6, 3]), tf.range(8) % 3)


def is_of_head(name):
    """Whether a variable is the last layer's bias."""
    return "dense" in name and name.endswith("/bias")


SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_images_that_are_all_the_same_are_accepted(seed):
    """A trial with zeros is ordinary. BatchNorm magnifies rounding there, in each way of its own."""
    plan, batch = images_of_one_value(seed)
    before = [variable.numpy().tobytes() for variable in plan.model.variables]

    assert checked(plan, batch) == "those of a plain loop"
    assert [variable.numpy().tobytes() for variable in plan.model.variables] == before


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_gradient_is_refused_among_rounding(monkeypatch, seed):
    """Rounding moves the gradients of other variables little."""
    right = gradient_check.compared

    def wrong(*arguments):
        return [
            pair._replace(step=1.01 * pair.step) if is_of_head(pair.name) else pair
            for pair in right(*arguments)
        ]

    monkeypatch.setattr(gradient_check, "compared", wrong)
    with pytest.raises(ValueError, match=r"a different gradient for '.*dense.*/bias'"):
        checked(*images_of_one_value(seed))


def test_a_loss_that_fails_on_a_few_examples_is_not_compared(caplog):
    """The check does not end a run: what it cannot compute, the step itself will meet or not."""
    plan = plan_of(Pair(), lambda batch, training: 1 / 0)  # noqa: ARG005

    assert checked(plan, tf.ones([4])) == "not compared: division by zero"
    assert "The step's gradients were not compared: division by zero" in caplog.text


@pytest.mark.parametrize(("inputs", "expected"), [([2], 8), ([16, 2], 16)])
def test_few_examples_are_enough(inputs, expected):
    """Eight examples are compared, unless the model's inputs have a batch size of their own."""
    shape = keras.Input(inputs) if len(inputs) == 1 else keras.Input(batch_shape=inputs)
    plan = plan_of(keras.Sequential([shape, keras.layers.Dense(1)]))

    assert int(first_examples(tf.ones([16, 2]), plan).examples) == expected
