"""Before the first step, its gradients are compared with those of a plain loop."""

import re

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
    Tolerance,
    Untrained,
    check_gradients,
    check_same,
    first_examples,
    listed,
)

BATCH = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])
REFUSED = (
    "`compute_loss` must have the same gradients in a training step as under a plain "
    "tf.GradientTape; got {} for {!r}. The variable would be trained wrongly. Compute the loss "
    "from the batch, the model's variables and seeded random numbers alone, or pass "
    "check_gradients=False to train with the step's gradients."
)


def still():
    """Rounding moves nothing."""
    return [0.0]


def checked(plan, batch=BATCH):
    """The variables that training does not change."""
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

    assert checked(plan) == Untrained()
    assert [variable.numpy().tobytes() for variable in model.variables] == before


def test_another_gradient_is_refused():
    """L19: a step whose gradient is not that of a plain loop does not begin, and names the variable."""
    trainer = Once(1.01, verbose=False)
    with pytest.raises(ValueError, match=r"^`compute_loss` must") as error:
        trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)

    name = re.search(r"for ('[^']+')\.", str(error.value))[1]
    assert str(error.value) == REFUSED.format("a different gradient", name.strip("'"))
    assert name.endswith("/kernel'")
    assert trainer.totals.attempted == 0


def test_the_check_can_be_turned_off():
    """check_gradients=False trains with the step's gradients."""
    trainer = Once(1.01, verbose=False, check_gradients=False)
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)

    assert (trainer.totals.applied, trainer.calls) == (1, 0)


def test_a_variable_without_a_gradient_is_named(caplog):
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

    trainer = WithUnused(verbose=False)
    for steps in (1, 2):
        trainer.train(slopes(1.0, 2.0), steps=steps, global_batch=2)
    found = [each.getMessage() for each in caplog.records if "No gradient" in each.getMessage()]

    assert len(found) == 1
    assert re.fullmatch(
        r"No gradient reaches 'sequential(_\d+)?/unused(_\d+)?/idle', so training does not change "
        r"it\. Set trainable=False on the layer if that is intended; otherwise make the loss "
        r"depend on its output\.",
        found[0],
    )
    assert "none for 'sequential" in str(trainer.dry_run(slopes(1.0, 2.0), global_batch=2))


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

    trainer = WithHead(verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)
    found = [
        each.getMessage() for each in caplog.records if "The loss depends" in each.getMessage()
    ]
    expected = (
        "The loss depends on 'head/kernel', but no optimizer updates it: only variables of the "
        "model are trained. Make the layer or variable an attribute of the model to train it; "
        "otherwise set trainable=False on the layer, or create the variable with trainable=False."
    )

    assert found == ([expected] if use == "trained" else [])
    shown = str(trainer.dry_run(slopes(1.0, 2.0), global_batch=2))
    assert ("no optimizer updates 'head/kernel'" in shown) == (use == "trained")


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
        check_same(pairs, tolerance, still)
    else:
        found = "no gradient" if step is None else "a different gradient"
        with pytest.raises(ValueError, match=re.escape(REFUSED.format(found, "kernel"))):
            check_same(pairs, tolerance, still)


def test_noise_is_not_compared():
    """A gradient that is all rounding, beside much larger ones, may differ by more than itself."""
    large = Compared("kernel", tf.constant([1.0]), tf.constant([1.0]))
    noise = Compared("bias", tf.constant([1e-6]), tf.constant([-1e-6]))

    check_same([large, noise], Tolerance(1e-3, 0.01), lambda: pytest.fail("not asked for"))
    with pytest.raises(ValueError, match="'bias'"):
        check_same([noise], Tolerance(1e-3, 0.01), still)


@pytest.mark.parametrize(("moved", "accepted"), [(0.0, False), (0.09, False), (0.11, True)])
def test_what_rounding_moves_may_differ(moved, accepted):
    """A difference of 1 is accepted if changes in the last bits move the gradient by a tenth."""
    pair = Compared("bias", tf.constant([1.0]), tf.constant([2.0]))
    if accepted:
        check_same([pair], IN_FLOAT32, lambda: [moved])
    else:
        with pytest.raises(ValueError, match="a different gradient for 'bias'"):
            check_same([pair], IN_FLOAT32, lambda: [moved])


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


def refused(monkeypatch, rounding):
    """For how many seeds a plan is refused if this multiple of rounding is accepted."""
    monkeypatch.setattr(gradient_check, "ROUNDING", rounding)
    count = 0
    for seed in SEEDS:
        plan, batch = images_of_one_value(seed)
        before = [variable.numpy().tobytes() for variable in plan.model.variables]
        try:
            checked(plan, batch)
        except ValueError:
            count += 1
        assert [variable.numpy().tobytes() for variable in plan.model.variables] == before
    return count


def test_images_that_are_all_the_same_are_accepted(monkeypatch):
    """A trial with zeros is ordinary. BatchNorm magnifies rounding there, in each way of its own."""
    assert refused(monkeypatch, 10.0) == 0
    assert refused(monkeypatch, 0.0) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_gradient_is_refused_among_rounding(monkeypatch, seed):
    """Rounding moves the gradients of other variables little."""
    right = gradient_check.compared

    def wrong(*arguments):
        pairs, outside = right(*arguments)
        return [
            pair._replace(step=1.01 * pair.step) if is_of_head(pair.name) else pair
            for pair in pairs
        ], outside

    monkeypatch.setattr(gradient_check, "compared", wrong)
    with pytest.raises(ValueError, match=r"a different gradient for '.*dense.*/bias'"):
        checked(*images_of_one_value(seed))


def test_a_loss_that_fails_on_a_few_examples_is_not_compared(caplog):
    """The check does not end a run: what it cannot compute, the step itself will meet or not."""
    plan = plan_of(Pair(), lambda batch, training: 1 / 0)  # noqa: ARG005

    assert checked(plan, tf.ones([4])) == Untrained(not_compared="division by zero")
    assert "The step's gradients were not compared: division by zero" in caplog.text


@pytest.mark.parametrize(("inputs", "expected"), [([2], 8), ([16, 2], 16)])
def test_few_examples_are_enough(inputs, expected):
    """Eight examples are compared, unless the model's inputs have a batch size of their own."""
    shape = keras.Input(inputs) if len(inputs) == 1 else keras.Input(batch_shape=inputs)
    plan = plan_of(keras.Sequential([shape, keras.layers.Dense(1)]))

    assert int(first_examples(tf.ones([16, 2]), plan).examples) == expected


def test_listed():
    """A few names are listed, and the others counted."""
    assert listed(["a"]) == "'a'"
    assert listed(["a", "b"]) == "'a' and 'b'"
    assert listed(["a", "b", "c"], shown=2) == "'a', 'b' and 1 more"
