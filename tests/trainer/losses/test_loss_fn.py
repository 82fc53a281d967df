"""`loss_fn` means what it means in Keras, on any division of the batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model
from hypothesis import given
from hypothesis import strategies as st

import strategies
from trainer import Monitoring, Trainer
from trainer.losses.loss_fn import (
    element_losses,
    example_losses,
    example_weights,
    global_loss,
    warn_once,
)

pytestmark = pytest.mark.sampled

LOSSES = keras.losses


def one_hot(random, shape):
    """Random labels of three classes, one-hot."""
    return np.eye(3, dtype=np.float32)[random.integers(3, size=shape)]


def between(low, high):
    """Labels and outputs between two numbers."""
    return lambda random, n, t: [
        random.uniform(low, high, [n, t, 3]).astype(np.float32) for _ in range(2)
    ]


def classes(random, n, t):
    """One-hot labels, and probabilities."""
    return one_hot(random, [n, t]), random.dirichlet(np.ones(3), [n, t]).astype(np.float32)


def bits(random, n, t):
    """Labels 0 and 1, and probabilities."""
    return random.integers(2, size=[n, t, 3]), between(0.05, 0.95)(random, n, t)[1]


def signs(random, n, t):
    """Labels -1 and 1, and any numbers."""
    return 2 * random.integers(2, size=[n, t, 3]) - 1, between(-2, 2)(random, n, t)[1]


def sparse(random, n, t):
    """Labels as class numbers, and probabilities."""
    labels, outputs = classes(random, n, t)
    return labels.argmax(-1), outputs


def sparse_without_time(random, n, t):
    """Class numbers, one per example."""
    labels, outputs = sparse(random, n, t)
    return labels[:, 0], outputs[:, 0]


def texts(random, n, t):
    """Labels of up to `t` classes above 0, and logits over a longer time."""
    logits = random.normal(size=[n, 2 * t + 1, 4]).astype(np.float32)
    return random.integers(1, 4, size=[n, t]), logits


# Every loss class of Keras: an instance with the reduction `r`, and random labels and outputs. None
# if no instance can be split into examples.
CLASSES = {
    "BinaryCrossentropy": (lambda r: LOSSES.BinaryCrossentropy(reduction=r), bits),
    "BinaryFocalCrossentropy": (
        lambda r: LOSSES.BinaryFocalCrossentropy(reduction=r, apply_class_balancing=True),
        bits,
    ),
    "CTC": (lambda r: LOSSES.CTC(reduction=r), texts),
    "CategoricalCrossentropy": (
        lambda r: LOSSES.CategoricalCrossentropy(reduction=r, label_smoothing=0.1),
        classes,
    ),
    "CategoricalFocalCrossentropy": (
        lambda r: LOSSES.CategoricalFocalCrossentropy(reduction=r),
        classes,
    ),
    "CategoricalGeneralizedCrossEntropy": (
        lambda r: LOSSES.CategoricalGeneralizedCrossEntropy(reduction=r),
        sparse_without_time,
    ),
    "CategoricalHinge": (lambda r: LOSSES.CategoricalHinge(reduction=r), classes),
    "Circle": None,
    "CosineSimilarity": (lambda r: LOSSES.CosineSimilarity(reduction=r), between(0.1, 1)),
    "Dice": (lambda r: LOSSES.Dice(reduction=r, axis=(1, 2)), bits),
    "Hinge": (lambda r: LOSSES.Hinge(reduction=r), signs),
    "Huber": (lambda r: LOSSES.Huber(reduction=r, delta=0.3), between(-1, 1)),
    "KLDivergence": (lambda r: LOSSES.KLDivergence(reduction=r), classes),
    "LogCosh": (lambda r: LOSSES.LogCosh(reduction=r), between(-1, 1)),
    "MeanAbsoluteError": (lambda r: LOSSES.MeanAbsoluteError(reduction=r), between(-1, 1)),
    "MeanAbsolutePercentageError": (
        lambda r: LOSSES.MeanAbsolutePercentageError(reduction=r),
        between(0.5, 1),
    ),
    "MeanSquaredError": (lambda r: LOSSES.MeanSquaredError(reduction=r), between(-1, 1)),
    "MeanSquaredLogarithmicError": (
        lambda r: LOSSES.MeanSquaredLogarithmicError(reduction=r),
        between(0, 2),
    ),
    "Poisson": (lambda r: LOSSES.Poisson(reduction=r), between(0.1, 2)),
    "SparseCategoricalCrossentropy": (
        lambda r: LOSSES.SparseCategoricalCrossentropy(reduction=r, ignore_class=2),
        sparse,
    ),
    "SquaredHinge": (lambda r: LOSSES.SquaredHinge(reduction=r), signs),
    "Tversky": (lambda r: LOSSES.Tversky(reduction=r, axis=(1, 2), alpha=0.3), bits),
}
SPLIT = sorted(name for name, case in CLASSES.items() if case)


def test_every_loss_of_keras_has_a_case():
    """L21: a loss class that a new Keras brings needs a case here."""
    found = {
        name
        for name, each in vars(keras.losses).items()
        if isinstance(each, type) and issubclass(each, LOSSES.Loss) and each is not LOSSES.Loss
    }

    assert found == set(CLASSES)


def over_shares(loss, y, outputs, weight, parts):
    """The weighted mean over the shares of a batch, and its gradient with regard to the outputs."""
    y, outputs = tf.constant(y), tf.constant(outputs)
    batch = (y, outputs) if weight is None else (y, outputs, tf.constant(weight))
    weights = example_weights(loss, y, *batch[2:] or [None])
    weights = tf.ones([len(y)]) if weights is None else weights
    whole = strategies.whole(batch, weights)
    total = tf.constant(0.0)
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        whole = strategies.whole((y, outputs, *batch[2:]), weights)
        for index in range(parts):
            share = strategies.take(whole, index, parts)
            losses = example_losses(loss, share.batch[0], *share.batch[1:])
            assert losses.shape == share.weights.shape
            total += tf.reduce_sum(losses * share.weights)
        mean = tf.math.divide_no_nan(total, tf.reduce_sum(weights))
    return mean.numpy(), tape.gradient(mean, outputs).numpy()


def in_keras(loss, y, outputs, weight):
    """Keras's loss of a whole batch, and its gradient with regard to the outputs."""
    outputs = tf.constant(outputs)
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        result = loss(y, outputs, sample_weight=weight)
    return result.numpy(), tape.gradient(result, outputs).numpy()


@pytest.mark.parametrize("name", SPLIT)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 6),
    t=st.integers(1, 3),
    parts=st.integers(1, 4),
    weighted=st.booleans(),
    labels=st.sampled_from(["int64", "float64", "float32"]),
)
def test_every_loss_is_keras_s(name, seed, n, t, parts, weighted, labels):
    """L8, L21: for random data, with and without weights of the losses' shape, the weighted mean of
    the example losses over any number of shares, and its gradient, are those of the loss object.
    """
    make, draw = CLASSES[name]
    random = np.random.default_rng(seed)
    y, outputs = draw(random, n, t)
    y = y.astype(labels) if y.dtype.kind == "i" else y
    weight, reduction = None, random.choice(["sum_over_batch_size", "mean"])
    if weighted:
        shape = element_losses(make(None), tf.constant(y), tf.constant(outputs)).shape
        weight = random.choice([0.0, 0.5, 1.0, 3.0], size=shape).astype(np.float32)
        reduction = "mean_with_sample_weight"
    loss = make(reduction)
    expected, gradient = in_keras(loss, y, outputs, weight)
    found, our_gradient = over_shares(loss, y, outputs, weight, parts)

    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    scale = max(np.abs(gradient).max(), 1e-3)
    np.testing.assert_allclose(our_gradient / scale, gradient / scale, rtol=1e-4, atol=1e-5)


FUNCTIONS = [
    "mean_squared_error",
    "sparse_categorical_crossentropy",
    "huber",
    "binary_crossentropy",
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shapes", ["(n,) (n,1)", "(n,1) (n,)", "(n,t) (n,t,1)", "(n,t,1) (n,t)"])
def test_keras_s_functions_align_labels_and_outputs(name, shapes):
    """L21: a function of `keras.losses` gets labels and outputs of the same rank, as in `compile`."""
    if name.startswith("sparse") and shapes != "(n,t,1) (n,t)":
        pytest.skip("there must be classes")
    random = np.random.default_rng(0)
    sizes = [{"(n,)": [4], "(n,1)": [4, 1], "(n,t)": [4, 3], "(n,t,1)": [4, 3, 1]}[each]
             for each in shapes.split()]  # fmt: skip
    y = random.integers(2, size=sizes[0])
    outputs = random.uniform(0.1, 0.9, size=sizes[1]).astype(np.float32)
    if name.startswith("sparse"):
        y = y[:, :1, 0]
    model = keras.Sequential([keras.layers.Identity()])
    model.compile(loss=name)
    expected = model.evaluate(outputs, y, verbose=0)
    function = getattr(keras.losses, name)

    assert over_shares(function, y, outputs, None, 3)[0] == pytest.approx(expected, rel=1e-5)


class Raw(keras.losses.Loss):
    """Written with TensorFlow's operations, which do not cast."""

    def call(self, y_true, y_pred):
        """Squared error, one per element."""
        return tf.square(y_true - y_pred)


@pytest.mark.parametrize("dtype", ["int32", "bool", "float64", "float16"])
@pytest.mark.parametrize("half", [False, True])
def test_labels_and_outputs_are_cast(dtype, half):
    """L21: labels and outputs of any dtype reach a `Loss` in its own dtype."""
    y = np.array([[0, 1], [1, 1]]).astype(dtype)
    outputs = np.array([[0.5, 0.25], [2.0, 1.0]], "float16" if half else "float32")

    assert over_shares(Raw(), y, outputs, None, 2)[0] == Raw()(y, outputs).numpy() == 0.453125


def test_a_function_gets_labels_as_they_are():
    """A function of one's own gets integers as integers, all floats in float32, and all outputs."""
    seen = []

    def loss_fn(y, outputs):
        seen.append([each.dtype.name for each in (*y, *outputs.values())])
        return outputs["b"]

    y = (tf.constant([1]), tf.constant([1.0], tf.float64))
    example_losses(loss_fn, y, {"a": tf.ones([1], tf.float16), "b": tf.ones([1])})

    assert seen == [["int32", "float32", "float32", "float32"]]


def test_weights_of_examples_weight_whole_sequences():
    """Weights of shape (examples,) or (examples, 1) weight sequences, whose elements weigh the same."""
    random = np.random.default_rng(0)
    y, outputs = (random.normal(size=[3, 3, 2]).astype(np.float32) for _ in range(2))
    weight = np.float32([1, 0, 3])
    expected = np.average(((y - outputs) ** 2).mean((1, 2)), weights=weight)

    for given_weight in (weight, weight[:, None], weight[:, None].astype(np.float16)):
        for parts in (1, 2):
            found, _ = over_shares(LOSSES.MeanSquaredError(), y, outputs, given_weight, parts)
            assert found == pytest.approx(expected, rel=1e-6)


def test_ignored_labels_and_weights_of_examples_combine():
    """With `ignore_class` and weights of shape (examples,), each counted label has its example's
    weight.
    """
    y, outputs = sparse(np.random.default_rng(0), 4, 3)
    weight = np.float32([1, 0, 3, 2])
    loss = LOSSES.SparseCategoricalCrossentropy(ignore_class=2)
    tokens = -np.log(np.take_along_axis(outputs, y[..., None], -1))[..., 0]
    expected = np.average(tokens, weights=(y != 2) * weight[:, None])

    assert over_shares(loss, y, outputs, weight, 3)[0] == pytest.approx(expected, rel=1e-5)


class Calling(keras.losses.MeanSquaredError):
    """Adds 1 outside `call`."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Keras's loss plus 1."""
        return super().__call__(y_true, y_pred, sample_weight) + 1.0


@pytest.mark.parametrize(
    "loss",
    [
        LOSSES.MeanSquaredError(reduction="sum"),
        Calling(),
        LOSSES.Circle(),
        LOSSES.circle,
        LOSSES.Dice(),
        LOSSES.tversky,
        LOSSES.Tversky(axis=(0, 1)),
        LOSSES.CosineSimilarity(axis=0),
    ],
)
def test_losses_of_a_whole_batch_are_refused(loss):
    """L21: what cannot be split into examples is refused when the trainer is made."""
    with pytest.raises(ValueError, match="`loss_fn` must"):
        Trainer(loss_fn=loss)


def test_no_reduction_is_warned_of(caplog):
    """`reduction=None` is taken as a mean, with a warning, since `fit` differentiates the sum."""
    warn_once.cache_clear()
    with caplog.at_level("WARNING"):
        Trainer(loss_fn=LOSSES.LogCosh(reduction="none"))

    [record] = caplog.records
    assert "loss_fn=LogCosh has reduction=None" in record.getMessage()


def masked(tensor):
    """A tensor with a Keras mask, as `Masking` leaves it."""
    return keras.layers.Masking()(tensor)


def own_mask(y, outputs):
    """A loss function that sets a mask."""
    return LOSSES.sparse_categorical_crossentropy(tf.cast(y, tf.float32), outputs, ignore_class=2)


def mean_of_batch(y, outputs):
    """A function that reduces."""
    return tf.reduce_mean((y - outputs) ** 2)


def all_pairs(y, outputs):
    """A function that aligns nothing."""
    return tf.reduce_mean((y - outputs) ** 2, axis=-1)


ONE, PAIR = tf.ones([4]), tf.ones([4, 3])


@pytest.mark.parametrize(
    ("loss", "y", "outputs", "weight"),
    [
        (mean_of_batch, ONE, ONE, None),
        (LOSSES.Dice(axis=(-2, -1)), PAIR, PAIR, None),
        (own_mask, tf.constant([0, 1, 2, 0]), tf.fill([4, 3], 1 / 3), None),
        (all_pairs, ONE, ONE[:, None], None),
        (Raw(), ONE, ONE[:, None], None),
        (LOSSES.MeanSquaredError(), {"a": ONE}, {"a": ONE}, None),
        (LOSSES.MeanSquaredError(), [ONE, ONE], [ONE, ONE], None),
        (LOSSES.MeanSquaredError(), PAIR, PAIR, PAIR),
    ],
)
def test_what_a_share_cannot_tell_is_refused(loss, y, outputs, weight):
    """L21: what is known only when the loss is called is refused in the first trace."""
    with pytest.raises(ValueError, match="`loss_fn` must"):
        example_losses(loss, y, outputs, weight)


def test_a_mask_on_the_outputs_weights_the_elements():
    """L21: the loss of outputs with a Keras mask is Keras's; weights of elements count as well."""
    random = np.random.default_rng(0)
    y, outputs = (random.normal(size=[4, 3, 2]).astype(np.float32) for _ in range(2))
    keep = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
    outputs[~keep] = 0.0
    with_mask, loss = masked(tf.constant(outputs)), LOSSES.MeanSquaredError()
    squares = np.mean((y - outputs) ** 2, axis=-1)
    for weight in (None, np.float32([1, 2, 0, 3]), random.uniform(size=[4, 3]).astype(np.float32)):
        given = None if weight is None else tf.constant(weight)
        losses = example_losses(loss, y, with_mask, given)
        weights = example_weights(loss, y, given, tf.constant(keep))
        ours = np.average(losses, weights=weights)
        by_element = keep * (1.0 if weight is None else weight.reshape([4, -1]))

        assert ours == pytest.approx(np.average(squares, weights=by_element), rel=1e-6)
        assert float(global_loss(loss, y, with_mask, given, tf.constant(keep))) == pytest.approx(
            ours, rel=1e-6
        )
        if weight is None:
            assert ours == pytest.approx(loss(y, with_mask).numpy(), rel=1e-6)


def mean_of_tokens(y, outputs):
    """One loss per example, in which masked tokens have part."""
    return tf.reduce_mean((y - outputs) ** 2, axis=[1, 2])


def test_masks_that_do_not_fit_are_refused():
    """A mask needs losses of its elements, and a single output."""
    y = tf.zeros([4, 3, 2])
    for outputs in (masked(y), {"one": masked(y), "other": y}):
        with pytest.raises(ValueError, match=r"`loss_fn` must .* Keras mask"):
            example_losses(mean_of_tokens, y, outputs)


def sequence_model():
    """Logits of three classes, with a bias, for sequences of two numbers."""
    initializer = keras.initializers.GlorotUniform(seed=1)
    layer = keras.layers.Dense(3, activation="sigmoid", kernel_initializer=initializer)
    return keras.Sequential([keras.Input([None, 2]), layer])


# The losses that a step is trained with by default: labels of one class ignored, and a plain mean.
STEPS = [
    pytest.param(name, marks=() if name.startswith("SparseC") else pytest.mark.slow)
    for name in SPLIT
    if name not in {"CTC", "CategoricalGeneralizedCrossEntropy"}  # other shapes
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_keras_s(mirrored, name, weighted):
    """L8, L21: `evaluate` and one SGD step on 3 replicas x 2 microbatches give the loss and the weights of
    Keras's `evaluate` and `train_on_batch` on one device.
    """
    make, draw = CLASSES[name]
    random = np.random.default_rng(3)
    y, _ = draw(random, 8, 4)
    x = random.normal(size=[8, 4, 2]).astype(np.float32)
    weight = random.choice([0.0, 0.5, 2.0], [8, 4]).astype(np.float32)
    weight = weight[:, 0] if name in {"Dice", "Tversky"} else weight
    weights = [weight] if weighted else []
    reduction = "mean_with_sample_weight" if weighted else "sum_over_batch_size"
    model = sequence_model()
    model.compile(keras.optimizers.SGD(0.5), loss=make(reduction))
    expected = model.test_on_batch(x, y, *weights)
    model.train_on_batch(x, y, *weights)
    trainer = Trainer(
        model=sequence_model,
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn=make("sum_over_batch_size"),
        strategy=mirrored(3),
        num_microbatches=2,
        jit_compile=False,
        verbose=False,
    )
    found = trainer.evaluate((x, y, *weights), global_batch=8)["loss"]
    trainer.train((x, y, *weights), steps=1, global_batch=8)

    assert found == pytest.approx(float(expected), rel=1e-5)
    for theirs, ours in zip(model.get_weights(), trainer.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["mse", "MeanSquaredError", LOSSES.mean_squared_error])
def test_a_loss_by_name_works_on_sequences(loss):
    """L21: a loss by name or function is averaged over time, as in Keras."""
    y = np.random.default_rng(3).standard_normal([6, 4, 3]).astype(np.float32)
    trainer = Trainer(model=sequence_model, optimizer="sgd", loss_fn=loss, verbose=False)
    expected = np.mean((trainer.model(y[..., :2]).numpy() - y) ** 2)

    assert trainer.evaluate((y[..., :2], y), global_batch=4)["loss"] == pytest.approx(
        expected, rel=1e-5
    )


def test_labels_of_one_dimension_meet_outputs_of_two():
    """L21: labels (examples,) against outputs (examples, 1) mean one difference per example, not all
    pairs; a function that takes care of it itself is not refused.
    """
    x = np.arange(6, dtype=np.float32)[:, None]
    y = np.float32([3, 1, 4, 1, 5, 9])
    for loss in ("mse", LOSSES.MeanSquaredError(), lambda y, p: (y - p[:, 0]) ** 2):
        trainer = Trainer(model=linear_model, optimizer="sgd", loss_fn=loss, verbose=False)
        found = trainer.evaluate((x, y), global_batch=3)["loss"]
        assert found == pytest.approx(np.mean((x[:, 0] - y) ** 2), rel=1e-6)


def poisson_deviance(y, predictions):
    """NaN for labels of 0, which data need not have."""
    rate = predictions[:, 0]
    return 2.0 * (y * tf.math.log(y / rate) - (y - rate))


def noisy(y, predictions):
    """Draws another number in each call."""
    return (y - predictions[:, 0] + tf.random.normal([])) ** 2


@pytest.mark.parametrize("loss", [poisson_deviance, noisy])
def test_a_loss_that_is_nan_or_random_on_trial_is_not_refused(loss):
    """Labels (examples,) and outputs (examples, 1) are tried on two examples of our own."""
    losses = example_losses(loss, tf.constant([1.0, 2.0, 4.0]), tf.ones([3, 1]), None)

    assert losses.shape == [3]


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.mean_squared_error,
        keras.losses.Huber(),
        keras.losses.BinaryCrossentropy(from_logits=True),
    ],
)
def test_outputs_without_a_last_dimension_are_refused(loss):
    """Keras would take the mean, or a softmax, over the examples."""
    with pytest.raises(ValueError, match="`loss_fn` must"):
        example_losses(loss, tf.ones([3]), tf.zeros([3]))


class Counting(keras.losses.Loss):
    """Counts the calls of its function, as a loss whose weight rises from step to step does."""

    def __init__(self):
        """Has counted none."""
        super().__init__()
        self.count = tf.Variable(0.0)

    def call(self, y_true, y_pred):
        """Squared errors, of labels without a last dimension."""
        self.count.assign_add(1.0)
        return tf.square(y_true - y_pred[:, 0])


def test_trying_a_loss_does_not_move_its_variables():
    """Whether it pairs labels and predictions is found by calling it; a step counts one call."""
    loss = Counting()
    trainer = Trainer(
        model=linear_model,
        optimizer="sgd",
        loss_fn=loss,
        monitoring=Monitoring(check_gradients=False),
        jit_compile=False,
        verbose=False,
    )
    trainer.train((np.ones([4, 1], np.float32), np.ones([4], np.float32)), steps=3, global_batch=4)
    assert float(loss.count) == 3.0
