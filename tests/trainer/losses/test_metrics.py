"""`metrics` as in Keras's compile, and the weights with which replicas update them."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model
from keras import ops

from trainer import Action, Trainer
from trainer.losses.metrics import copy_of, weights_for

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[16, 3]).astype("float32")
CLASSES = RANDOM.integers(0, 4, size=[16])
LOSSES = keras.losses
CASES = {
    "binary": ("sigmoid", 1, LOSSES.BinaryCrossentropy(), CLASSES[:, None] % 2),
    "sparse": ("softmax", 4, LOSSES.SparseCategoricalCrossentropy(), CLASSES),
    "sparse logits": (None, 4, LOSSES.SparseCategoricalCrossentropy(from_logits=True), CLASSES),
    "one-hot": ("softmax", 4, "categorical_crossentropy", np.eye(4, dtype="float32")[CLASSES]),
}


def model_of(activation, units):
    """A dense layer whose weights are the same in every model."""
    initializer = keras.initializers.RandomNormal(seed=1)
    dense = keras.layers.Dense(units, activation=activation, kernel_initializer=initializer)
    return keras.Sequential([keras.Input([3]), dense])


def trainer_of(activation, units, loss, metrics):
    """A trainer that only evaluates."""
    return Trainer(
        model=lambda: model_of(activation, units), loss_fn=loss, metrics=metrics, verbose=False
    )


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_metrics_mean_what_they_mean_in_compile(case):
    """Names and objects give the names and values that Keras's `evaluate` gives."""
    activation, units, loss, labels = CASES[case]
    metrics = ["accuracy", "mse", keras.metrics.AUC(name="area")] if units == 1 else ["accuracy"]
    model = model_of(activation, units)
    model.compile(loss=loss, metrics=metrics)
    expected = model.evaluate(X, labels, batch_size=4, verbose=0, return_dict=True)
    trainer = trainer_of(activation, units, loss, metrics)
    results = trainer.evaluate((X, labels), global_batch=4)

    assert results == pytest.approx(expected, abs=1e-6)


def test_accuracy_of_logits_counts_logits():
    """A logit above 0 counts as 1; Keras compares logits with 0.5, which is a probability."""
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    metrics = {"right": "accuracy", "entropy": "crossentropy"}
    trainer = trainer_of(None, 1, loss, metrics)
    labels = CLASSES[:, None] % 2
    results = trainer.evaluate((X, labels), global_batch=8)
    logits = trainer.predict(X, global_batch=8)

    assert results["right"] == np.mean((logits > 0) == labels)
    assert results["entropy"] == pytest.approx(results["loss"])


@pytest.mark.parametrize(
    "metrics",
    [["accuracy"], ["acuracy"], ["mae", keras.metrics.MeanSquaredError(name="mae")]],
)
def test_what_cannot_be_a_metric_is_refused(metrics):
    """With this loss, nothing tells what "accuracy" is; and a name must stand for one metric."""
    with pytest.raises(ValueError, match="`metrics` must"):
        trainer_of(None, 1, "mse", metrics).evaluate((X, X[:, :1]), global_batch=8)


def test_an_output_that_does_not_fit_the_loss_is_refused():
    """Several outputs with a binary cross entropy are classes of their own; Keras would compare the
    largest.
    """
    trainer = trainer_of("sigmoid", 4, "binary_crossentropy", ["accuracy"])
    with pytest.raises(ValueError, match="`metrics` must"):
        trainer.evaluate((X, np.eye(4, dtype="float32")[CLASSES]), global_batch=8)


class Above(keras.metrics.Mean):
    """The share of predictions above a threshold, which its configuration leaves out."""

    def __init__(self, threshold=0.5, name="above", **kwargs):
        """Stores the threshold."""
        super().__init__(name=name, **kwargs)
        self.threshold = threshold

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts predictions."""
        super().update_state(keras.ops.cast(y_pred > self.threshold, "float32"), sample_weight)


class Described(Above):
    """The same, with its configuration."""

    def get_config(self):
        """Adds the threshold."""
        return super().get_config() | {"threshold": self.threshold}


def later(metric):
    """The threshold is set after the metric was made."""
    metric.threshold = 0.9
    return metric


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        (lambda: Above(0.9), "threshold"),
        (lambda: later(Above()), "threshold"),
        (lambda: Above(tf.constant(0.9)), "threshold"),
        (lambda: keras.metrics.CosineSimilarity(axis=0), "fn_kwargs"),
    ],
)
def test_a_metric_that_its_configuration_does_not_describe_is_refused(metric, found):
    """The copies for training and evaluation would have the default setting."""
    with pytest.raises(ValueError, match=f"`metrics` must .* without {found}"):
        copy_of(metric())


def test_a_metric_with_its_settings_is_copied():
    """They are the default, or in its configuration, or set later and in its configuration."""
    metrics = [Above(), Described(0.9), later(Described())]

    assert [copy_of(each).threshold for each in metrics] == [0.5, 0.9, 0.9]


@pytest.mark.parametrize(
    "metric", [keras.metrics.F1Score(), keras.metrics.AUC(multi_label=True)], ids=["F1", "AUC"]
)
def test_a_metric_that_was_updated_is_copied(metric):
    """What the first update fills in is no setting."""
    metric.update_state(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32))

    assert copy_of(metric).get_config()["name"] == metric.name


def test_every_metric_of_keras_is_copied():
    """None of them leaves out an argument."""
    needed = {
        "num_classes": 3,
        "recall": 0.5,
        "precision": 0.5,
        "specificity": 0.5,
        "sensitivity": 0.5,
        "target_class_ids": [0],
        "normalizer": [1.0],
        "fn": keras.losses.mean_squared_error,
    }
    copied = []
    for kind in vars(keras.metrics).values():
        if not (isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)):
            continue
        parameters = inspect.signature(kind).parameters
        empty = [name for name, each in parameters.items() if each.default is each.empty]
        made = kind(**{name: needed[name] for name in empty if name in needed})
        if kind is not keras.metrics.Metric:
            copied.append(type(copy_of(made)) is kind)

    assert len(copied) > 40
    assert all(copied)


LAZY = {
    "F1Score": lambda: keras.metrics.F1Score(average="micro", threshold=0.5, name="score"),
    "FBetaScore": lambda: keras.metrics.FBetaScore(average="macro", threshold=0.5, name="score"),
    "R2Score": lambda: keras.metrics.R2Score(name="score"),
    "AUC": lambda: keras.metrics.AUC(multi_label=True, name="score"),
}


def lazy_trainer(metric, **arguments):
    """Returns a trainer that does not move, with a metric that makes its variables when updated."""
    return Trainer(
        model=lambda: keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
        ),
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn="binary_crossentropy",
        metrics=[LAZY[metric]()],
        seed=1,
        verbose=False,
        **arguments,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "replicas"),
    [("F1Score", 2), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in [*LAZY][1:])],
)
def test_metrics_that_make_their_variables_late(metric, replicas, mirrored, tmp_path):
    """Classes that make their variables in their first update work in training on several replicas,
    and a resumed run goes on with their values.
    """
    x = np.random.default_rng(0).normal(size=[24, 3]).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    data = {"global_batch": 8}
    whole = lazy_trainer(metric, strategy=mirrored(replicas), log_interval=3)
    score = whole.train((x, y), 3, **data).history["score"][-1]
    settings = {"strategy": mirrored(replicas), "model_dir": tmp_path, "log_interval": 3}
    stopping = Action(lambda trainer: trainer.stop(), every_steps=2)
    lazy_trainer(metric, callbacks=[stopping], **settings).train((x, y), 3, **data)
    resumed = lazy_trainer(metric, **settings)
    plain = LAZY[metric]()
    plain.update_state(y, whole.predict(x, **data))

    after_predict = lazy_trainer(metric, strategy=mirrored(replicas), log_interval=3)
    after_predict.predict(x, **data)

    assert score == pytest.approx(float(plain.result()), rel=1e-5)
    assert after_predict.train((x, y), 3, **data).history["score"][-1] == score
    assert whole.evaluate((x, y), **data)["score"] == pytest.approx(score, rel=1e-5)
    assert resumed.train((x, y), 3, **data).history["score"][-1] == score


def near(labels, outputs):
    """Which outputs are near their labels."""
    return tf.cast(tf.abs(labels - outputs) < 1.0, tf.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("by_name", [False, True])
def test_functions_are_metrics_as_in_compile(by_name):
    """The weighted mean over the examples; a function of keras.metrics, or of the user's own."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=[10, 2]).astype(np.float32)
    y = generator.normal(size=[10, 3]).astype(np.float32)
    weights = generator.random(10).astype(np.float32)
    functions = [near, keras.metrics.mean_absolute_error, lambda y, p: tf.reduce_max(p - y, axis=1)]
    names = ["near", "mean_absolute_error", "lambda"]
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(3)]),
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn="mse",
        metrics=dict(zip(names, functions, strict=True)) if by_name else functions,
        verbose=False,
    )
    trainer.train((x, y, weights), steps=1, global_batch=4)
    found = trainer.evaluate((x, y, weights), global_batch=4)

    trainer.model.compile("sgd", "mse", weighted_metrics=functions)
    expected = trainer.model.evaluate(
        x, y, sample_weight=weights, batch_size=4, verbose=0, return_dict=True
    )
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


class Counted(keras.metrics.Metric):
    """Counts examples, and returns its variable, as Keras's own example does."""

    def __init__(self, **arguments):
        """Creates the count."""
        super().__init__(**arguments)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the number of examples."""
        del y_pred, sample_weight
        self.count.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self):
        """The variable itself."""
        return self.count


@pytest.mark.slow
def test_a_metric_may_return_its_variable(mirrored):
    """A metric whose result is a variable is read on all replicas, in logs and in evaluations."""
    trainer = Trainer(
        model=linear_model,
        optimizer="sgd",
        loss_fn="mse",
        metrics=lambda: {"count": Counted()},
        strategy=mirrored(3),
        verbose=False,
    )
    data = (np.ones([7, 1], np.float32), np.ones([7, 1], np.float32))
    trainer.train(data, steps=1, global_batch=7)

    assert trainer.evaluate(data, global_batch=7)["count"] == 7.0


@pytest.mark.sampled
@pytest.mark.parametrize("ignored", [0, 255])
@pytest.mark.parametrize("weighted", [False, True])
def test_names_leave_out_the_class_that_the_loss_ignores(mirrored, caplog, ignored, weighted):
    """As the loss does, on replicas too: an ignored label may be the number of no class."""
    random = np.random.default_rng(0)
    x = random.normal(size=[12, 4, 3]).astype(np.float32)
    y = random.integers(1, 4, [12, 4])
    y[:, :2] = ignored
    weights = random.uniform(0.5, 2, 12).astype(np.float32)
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([4, 3]), keras.layers.Dense(4)]),
        loss_fn=LOSSES.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored),
        metrics=["accuracy", "crossentropy"],
        strategy=mirrored(2) if weighted else "default",
        seed=0,
        verbose=False,
    )
    found = trainer.evaluate((x, y, weights) if weighted else (x, y), global_batch=5)
    logits = trainer.predict(x, global_batch=5)[:, 2:].astype(np.float64)
    each = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, y[:, 2:, None], -1)[..., 0]
    of_each = np.repeat((weights if weighted else np.ones(12))[:, None], 2, axis=1)
    hits = np.average(logits.argmax(-1) == y[:, 2:], weights=of_each)

    assert found["accuracy"] == pytest.approx(hits, rel=1e-5)
    assert found["crossentropy"] == pytest.approx(np.average(each, weights=of_each), rel=1e-5)
    assert trainer.metrics["accuracy"].get_config()["ignored"] == ignored
    assert "added up over replicas" not in caplog.text  # which is for metrics of the user's own


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["AUC", "Precision", "Recall", "BinaryAccuracy"])
def test_names_of_binary_metrics_take_logits_if_the_loss_does(name):
    """A threshold of one half would be one of 0.62 in probability."""
    random = np.random.default_rng(1)
    x = random.normal(size=[40, 3]).astype(np.float32)
    y = (x.sum(1, keepdims=True) + random.normal(size=[40, 1]) > 0).astype(np.float32)

    def trainer(activation, loss):
        return trainer_of(activation, 1, loss, [name])

    logits = trainer(None, LOSSES.BinaryCrossentropy(from_logits=True))
    chances = trainer("sigmoid", LOSSES.BinaryCrossentropy())
    found, expected = (each.evaluate((x, y), global_batch=8)[name] for each in (logits, chances))
    assert found == pytest.approx(expected, rel=1e-5)


ROWS, SUMS = RANDOM.normal(size=[13, 4]).astype("float32"), RANDOM.normal(size=[13, 1]).astype("f4")


def summing():
    """A model whose output is the sum of its inputs."""
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1, kernel_initializer="ones")])


def share_error(y, p):
    """The mean error of each example, divided by something that is 0 if there are no examples."""
    return ops.abs(y - p)[:, 0] / ops.max(ops.ones_like(p))


class Deviation(keras.metrics.Metric):
    """Adds up errors; creates its variables in its first update, and fails for no examples."""

    total = None

    def update_state(self, y, p, sample_weight=None):
        """Adds the errors of a batch."""
        if self.total is None:
            self.total, self.count = (self.add_variable((), "zeros", name=name) for name in "tc")
        tf.debugging.assert_positive(tf.shape(p)[0])
        self.total.assign_add(ops.sum(ops.abs(y - p)))
        self.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))

    def result(self):
        """The mean."""
        return self.total / self.count


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("metric", [share_error, Deviation], ids=["function", "object"])
def test_an_empty_share_is_left_out(mirrored, replicas, metric):
    """The last batch has one example, so some shares have none; the result is that of one device."""
    data = tf.data.Dataset.from_tensor_slices((ROWS, SUMS)).batch(4)
    found = []
    for strategy in ("default", mirrored(replicas)):
        trainer = Trainer(
            model=summing,
            optimizer=lambda: keras.optimizers.SGD(0.0),
            loss_fn="mse",
            metrics=[metric] if metric is share_error else lambda: {"m": Deviation(name="m")},
            strategy=strategy,
            verbose=False,
        )
        summary = trainer.train(data, steps=4)
        [name] = set(trainer.evaluate(data)) - {"loss"}
        found.append((trainer.evaluate(data)[name], summary.history[name][-1]))

    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    assert found[0][0] == pytest.approx(np.mean(np.abs(ROWS.sum(1) - SUMS[:, 0])), rel=1e-6)


def rmse(y, p):
    """One number for a batch."""
    return ops.sqrt(ops.mean(ops.square(y - p)))


@pytest.mark.parametrize("in_dict", [False, True])
def test_one_number_for_a_batch_is_refused_on_replicas(mirrored, in_dict):
    """On one device it is the mean over batches, as in Keras."""
    data = (ROWS[:12], {"out": SUMS[:12]} if in_dict else SUMS[:12])
    x = keras.Input([4])
    settings = {"model": summing, "loss_fn": "mse", "metrics": [rmse], "verbose": False}
    if in_dict:
        settings["model"] = lambda: keras.Model(x, {"out": summing()(x)})
        settings["loss_fn"], settings["metrics"] = {"out": "mse"}, {"out": [rmse]}
    one = Trainer(**settings).evaluate(data, global_batch=4)
    batches = (ROWS[:12].sum(1) - SUMS[:12, 0]).reshape(3, 4)
    with pytest.raises(ValueError, match="`metrics` must return one number per example"):
        Trainer(**settings, strategy=mirrored(2)).evaluate(data, global_batch=4)

    name = "out_rmse" if in_dict else "rmse"
    assert one[name] == pytest.approx(np.mean(np.sqrt(np.mean(batches**2, axis=1))), rel=1e-6)


class Largest(Deviation):
    """The largest error: no sum."""


@pytest.mark.parametrize("replicas", [1, 2])
def test_added_states_are_warned_of(mirrored, caplog, replicas):
    """Nothing tells whether a user's metric keeps sums; Keras adds what the replicas keep."""
    Trainer(
        model=summing,
        loss_fn="mse",
        metrics=lambda: {"m": Largest(name="largest")},
        strategy=mirrored(replicas),
        verbose=False,
    ).evaluate((ROWS, SUMS), global_batch=12)

    warned = "The variables of the metric 'largest' are added up over replicas"
    assert (warned in caplog.text) == (replicas > 1)


def test_losses_without_outputs_have_no_metrics():
    """Metrics of `compute_loss` that returns losses alone are refused before the first step."""

    class LossesAlone(Trainer):
        def compute_loss(self, batch, training):
            return super().compute_loss(batch, training)[0]

    trainer = LossesAlone(
        model=summing, optimizer="sgd", loss_fn="mse", metrics=["mae"], verbose=False
    )
    with pytest.raises(ValueError, match="`compute_loss` must return"):
        trainer.train((ROWS, SUMS), steps=1, global_batch=13)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("metric", "one_hot"),
    [
        (lambda: keras.metrics.MeanIoU(3, name="iou", dtype="float32", sparse_y_pred=False), False),
        (lambda: keras.metrics.OneHotIoU(3, [0, 2], name="iou", dtype="float32"), True),
        (lambda: keras.metrics.BinaryIoU([0, 1], name="iou", dtype="float32"), True),
    ],
    ids=["mean", "one-hot", "binary"],
)
def test_weights_of_examples_weight_intersections(metric, one_hot):
    """Keras's IoU metrics take a weight for each label; examples of weight 0 do not count."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4, 2)).astype(np.float32)
    labels = rng.integers(0, 3, size=(8, 4))
    y = np.eye(3, dtype=np.float32)[labels] if one_hot else labels
    keep = np.arange(8) % 2 == 0

    def result(*batch):
        trainer = Trainer(
            model=lambda: keras.Sequential(
                [
                    keras.Input([4, 2]),
                    keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(1)),
                ]
            ),
            loss_fn="mse" if one_hot else keras.losses.SparseCategoricalCrossentropy(True),
            metrics=[metric()],
            verbose=False,
        )
        return trainer.evaluate(batch, global_batch=4)

    found = result(x, y, keep.astype(np.float32))
    assert found == pytest.approx(result(x[keep], y[keep]), rel=1e-5)


@pytest.mark.parametrize("average", [None, "micro", "macro"])
def test_weights_of_f_scores_may_have_a_last_dimension_of_one(average):
    """Keras would compare each example with the weights of all others."""
    labels, outputs = tf.eye(3)[:2], tf.constant([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    weights = tf.constant([[0.25], [1.0]])
    metric, expected = keras.metrics.F1Score(average), keras.metrics.F1Score(average)
    metric.update_state(labels, outputs, sample_weight=weights_for(metric, labels, weights))
    expected.update_state(labels, outputs, sample_weight=weights[:, 0])

    np.testing.assert_array_equal(metric.result(), expected.result())


@pytest.mark.parametrize(
    ("metric", "weights"),
    [
        (keras.metrics.F1Score(), tf.ones([2, 3])),  # would be summed with those of the outputs
        (keras.metrics.BinaryIoU(), tf.constant([0.9, 0.9])),  # would be made integers
    ],
)
def test_weights_that_a_metric_would_change_are_refused(metric, weights):
    """The result would be a wrong number."""
    with pytest.raises(ValueError, match="`metrics` must"):
        weights_for(metric, tf.zeros([2, 3]), weights)


PADDED = {
    "precision": keras.metrics.Precision,
    "recall": keras.metrics.Recall,
    "auc": keras.metrics.AUC,
    "missed": keras.metrics.FalseNegatives,
    "iou": keras.metrics.BinaryIoU,
    "accuracy": keras.metrics.BinaryAccuracy,
}


@pytest.mark.thorough
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_padding_that_keras_masks_counts_in_no_metric(mirrored, replicas, weighted):
    """Keras's own metrics that are no means leave the mask out, and count padding."""
    random = np.random.default_rng(0)
    x = random.integers(1, 9, [10, 6])
    x[:, 3:] = 0
    y = random.integers(0, 2, [10, 6, 1])
    weights = random.integers(1, 3, 10) if weighted else np.ones(10, int)

    def model():
        return keras.Sequential(
            [
                keras.Input([6], dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )

    dtype = {"iou": {"dtype": "float32"}} if weighted else {}
    trainer = Trainer(
        model=model,
        loss_fn="binary_crossentropy",
        metrics=lambda: {name: kind(**dtype.get(name, {})) for name, kind in PADDED.items()},
        strategy=mirrored(replicas) if replicas > 1 else "default",
        seed=0,
        verbose=False,
    )
    found = trainer.evaluate((x, y, weights) if weighted else (x, y), global_batch=4)
    outputs = trainer.predict(x, global_batch=4)[:, :3]
    for name, kind in PADDED.items():
        metric = kind(dtype="float32")
        of_each = np.repeat(weights[:, None], 3, axis=1)
        metric.update_state(y[:, :3].ravel(), outputs.ravel(), sample_weight=of_each.ravel())
        assert found[name] == pytest.approx(float(metric.result()), rel=1e-5), name
