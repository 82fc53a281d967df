"""Evaluation and prediction: means over all examples, metrics, precision, and what is left as it was."""

import contextlib
import threading

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, linear_model, slopes

from trainer import Action, Checkpoints, Trainer, Updates

pytestmark = pytest.mark.sampled

X = np.random.default_rng(0).standard_normal([11, 5]).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 11)
WEIGHTS = np.random.default_rng(2).random(11).astype(np.float32)


def classifier(**arguments):
    """A classifier of five features into three classes, with accuracy."""
    return Trainer(
        **{
            "model": lambda: keras.Sequential([keras.Input([5]), keras.layers.Dense(3)]),
            "optimizer": "sgd",
            "loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
            "verbose": False,
            "seed": 0,
        }
        | arguments
    )


def reference(logits, weights=None):
    """Returns loss and accuracy, computed with NumPy in float64."""
    logits = logits.astype(np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(Y)), Y]
    hits = logits.argmax(1) == Y
    return np.average(losses, weights=weights), np.average(hits, weights=weights)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("global_batch", [5, 11])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_every_example_counts_once(mirrored, replicas, global_batch, weights):
    """Loss and metrics equal those of the whole data set, with short batches and empty shares too, and
    predictions keep the order of the data.
    """
    trainer = classifier(strategy=mirrored(replicas) if replicas > 1 else "default")
    data = (X, Y) if weights is None else (X, Y, weights)
    results = trainer.evaluate(data, global_batch=global_batch)
    logits = trainer.predict(data, global_batch=global_batch)
    loss, accuracy = reference(X @ trainer.model.get_weights()[0], weights)

    np.testing.assert_allclose(logits, X @ trainer.model.get_weights()[0], atol=1e-6)
    assert results["loss"] == pytest.approx(loss, rel=1e-6)
    assert results["accuracy"] == pytest.approx(accuracy, rel=1e-6)


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_a_half_model_is_evaluated_in_float32(precision):
    """Its predictions equal a float32 model's bit for bit; precision="train" keeps the rounding."""
    half, full = classifier(precision=precision), classifier()
    full.model.set_weights(half.model.get_weights())
    ours = half.predict(X, global_batch=4)
    rounded = half.predict(X, global_batch=4, precision="train")

    np.testing.assert_array_equal(ours, full.predict(X, global_batch=4))
    assert ours.dtype == np.float32
    assert 0 < np.abs(ours - rounded).max() < 0.1
    assert half.evaluate((X, Y), global_batch=4) == full.evaluate((X, Y), global_batch=4)


def test_training_and_evaluation_have_metrics_of_their_own(capsys):
    """Evaluating in the middle of training does not change the training metrics."""
    trainer = classifier(log_interval=6, verbose=True)
    trainer.train(
        (X, Y),
        steps=6,
        global_batch=11,
        eval_data=tf.data.Dataset.from_tensors((X[:2], Y[:2])),
        eval_interval=3,
    )
    out = capsys.readouterr().out

    # 66 examples were trained on, so the accuracy is a multiple of 1/66; only 2 were evaluated.
    accuracy = float(out.split("accuracy ")[2].split()[0])
    assert accuracy * 66 == pytest.approx(round(accuracy * 66), abs=0.01)
    assert out.count("validation at step") == 2


def test_metrics_are_updated_on_applied_steps_only():
    """The examples of a skipped step do not count."""
    trainer = classifier(log_interval=100)
    bad = X.copy()
    bad[3] = np.inf
    data = untuned(tf.data.Dataset.from_tensor_slices((np.stack([X, bad, X]), np.stack([Y] * 3))))
    access.start(trainer, (tf.constant(X), tf.constant(Y)))
    access.steps(trainer)(iter(data), tf.constant(3))

    assert trainer.totals.skipped_by_cause == {"forward": 1}
    assert float(trainer.metrics["accuracy"].count.numpy()) == 22.0


def quantized(mode, precision):
    """Two dense layers, quantized under a precision; with LoRA where Keras has it."""
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input([5]), *layers])
    keras.config.set_dtype_policy(before)
    for layer in layers:
        if mode == "gptq":
            config = keras.quantizers.GPTQConfig(dataset=None, tokenizer=None, group_size=4)
            layer.quantize(mode, config=config)
        elif mode == "awq":
            config = keras.quantizers.AWQConfig(dataset=None, tokenizer=None, group_size=4)
            layer.quantize(mode, config=config)
        else:
            layer.quantize(mode)
        if mode in ("int8", "int4"):
            layer.enable_lora(2)
        if mode in ("gptq", "awq"):  # as the calibration leaves it
            setattr(layer, f"is_{mode}_calibrated", True)
            values = np.random.default_rng(1).integers(0, 200, layer.quantized_kernel.shape)
            layer.quantized_kernel.assign(values.astype(np.uint8))
    return model


# Raised by Keras when it quantizes: NumPy 2 expects another signature of its variables.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("mode", "precision"),
    [
        ("int8", "mixed_bfloat16"),
        ("int4", "mixed_float16"),
        ("float8", "mixed_bfloat16"),
        ("float8", "mixed_float16"),
        ("gptq", "mixed_bfloat16"),
        ("awq", "mixed_float16"),
    ],
)
def test_quantized_layers_stay_quantized_in_float32(mirrored, mode, precision, replicas):
    """L21: evaluation in float32 equals the call of the same quantized model under float32, and
    evaluation in the training precision equals the model's own call, which XLA does not compile.
    """
    trainer = classifier(
        model=lambda: quantized(mode, precision),
        precision=precision,
        jit_compile=False,  # "auto" takes XLA on a CPU without kernels for half precision
        strategy=mirrored(replicas) if replicas > 1 else "default",
    )
    full = quantized(mode, "float32")
    full.set_weights(trainer.model.get_weights())
    own = np.float32(trainer.model(X, training=False))

    np.testing.assert_allclose(trainer.predict(X, global_batch=11), full(X), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(trainer.predict(X, global_batch=11, precision="train"), own)
    assert [layer.quantization_mode for layer in trainer.model.layers] == [mode, mode]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("given", [False, True])
def test_normalization_has_float32_statistics_in_float32(mirrored, given, replicas):
    """L21: the statistics of `Normalization`, given or adapted, are not rounded to half."""
    data = np.random.default_rng(3).normal(1000.3, 0.1, [9, 5]).astype(np.float32)

    def model(policy):
        statistics = {"mean": data.mean(0), "variance": data.var(0)} if given else {}
        layer = keras.layers.Normalization(**statistics, dtype=policy)
        dense = keras.layers.Dense(3, kernel_initializer="ones", dtype=policy)
        made = keras.Sequential([keras.Input([5]), layer, dense])
        if not given:
            layer.adapt(data)
        return made

    trainer = classifier(
        model=lambda: model("mixed_float16"),
        precision="mixed_float16",
        strategy=mirrored(replicas) if replicas > 1 else "default",
    )
    expected = model("float32")(data)

    np.testing.assert_array_equal(trainer.predict(data, global_batch=9), expected)
    assert trainer.model.layers[0].mean.dtype == tf.float16


@pytest.mark.parametrize("traced_before", [False, True])
def test_adapted_statistics_are_those_of_the_checkpoint(tmp_path, traced_before):
    """L21: a `Normalization` layer that was not adapted in this process computes with the statistics
    in the checkpoint, also after an evaluation before there was one.
    """

    def trainer(*, adapted):
        layer = keras.layers.Normalization()
        model = keras.Sequential([keras.Input([5]), layer, keras.layers.Dense(3)])
        if adapted:
            layer.adapt(X + 7.0)
        return classifier(model=lambda: model, model_dir=tmp_path)

    follower = trainer(adapted=False)
    if traced_before:
        follower.predict(X, global_batch=11)
    run = trainer(adapted=True)
    run.train((X, Y), steps=1, global_batch=11)

    np.testing.assert_array_equal(
        follower.predict(X, global_batch=11), run.predict(X, global_batch=11)
    )


@pytest.mark.slow
def test_losses_of_many_batches_are_added_exactly():
    """L21: the mean of 100,000 losses of 0.1, in as many batches, is 0.1 to float32's precision."""

    class Tenth(Linear):
        def compute_loss(self, batch, training):
            return super().compute_loss(batch, training) * 0.0 + 0.1

    one = {"x": np.ones([1, 1], np.float32), "slope": np.ones([1], np.float32)}
    data = tf.data.Dataset.from_tensors(one).repeat(100_000)

    assert Tenth(verbose=False).evaluate(data)["loss"] == pytest.approx(0.1, rel=1e-6)


def frozen():
    """A dense layer that is not trained."""
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(3)])
    model.trainable = False
    return model


def weightless():
    """A model without weights."""
    return keras.Sequential([keras.Input([5]), keras.layers.Rescaling(0.5)])


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("make", [frozen, weightless])
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_a_model_without_trainable_variables_is_evaluated(mirrored, make, precision, replicas):
    """L21: what cannot be trained can be evaluated, with and without an optimizer."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = Y % 3
    trainer = classifier(model=make, optimizer=None, precision=precision, strategy=strategy)
    given = classifier(model=make, precision=precision, strategy=strategy)
    found = trainer.evaluate((X, labels), global_batch=4)
    full = make()
    full.set_weights(trainer.model.get_weights())

    assert found["loss"] == pytest.approx(float(loss(labels, full(X))), rel=1e-5)
    np.testing.assert_allclose(trainer.predict(X, global_batch=4), full(X), rtol=1e-6)
    assert given.predict(X, global_batch=4).shape == full(X).shape


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "data"), [("predict", X), ("evaluate", (X, Y))])
def test_results_of_a_folder_without_a_checkpoint_are_said_to_be_untrained(
    method, data, tmp_path, caplog
):
    """A wrong path would give the numbers of an untrained model; a trained one says nothing."""

    def said(**settings):
        caplog.clear()
        getattr(classifier(**settings), method)(data, global_batch=11)
        return [line for line in caplog.messages if "checkpoint" in line]

    assert said(model_dir=tmp_path) == [
        f"There is no checkpoint in {tmp_path}: the model has not been trained there."
    ]
    assert said() == []  # nobody asked for a run
    classifier(model_dir=tmp_path).train((X, Y), steps=2, global_batch=11)
    assert said(model_dir=tmp_path) == []
    assert said(model_dir=tmp_path / "new", checkpoints=Checkpoints(init_from=tmp_path)) == []


def test_an_average_without_its_optimizer_is_refused(tmp_path):
    """L21: the raw weights do not silently take the place of the average."""
    Linear(updates=Updates(ema_momentum=0.5), model_dir=tmp_path, verbose=False).train(
        slopes(1.0), steps=3, global_batch=1
    )
    trainer = Trainer(
        model=linear_model, loss_fn=lambda y, p: p[:, 0] * y[:, 0], model_dir=tmp_path
    )
    data = (np.ones([1, 1], np.float32), np.ones([1, 1], np.float32))
    with pytest.raises(ValueError, match="`optimizer`"):
        trainer.evaluate(data, global_batch=1)

    assert trainer.evaluate(data, global_batch=1, averaged=False)["loss"] == -2.0


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_evaluator_follows_a_live_run(mirrored, tmp_path, replicas):
    """A second trainer evaluates the newest checkpoint in every call, reads it once, and leaves the
    files that the run is writing alone.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    data = slopes(*[1.0] * replicas)
    live = Linear(
        model_dir=tmp_path, strategy=strategy, verbose=False, checkpoints=Checkpoints(max_to_keep=1)
    )
    follower = Linear(model_dir=tmp_path, strategy=strategy, verbose=False)
    unfinished = tmp_path / "ckpt-9.tmp"
    found, reads = [], []
    for steps in (1, 2, 4):
        live.train(data, steps=steps, global_batch=replicas)
        unfinished.mkdir(exist_ok=True)
        found += [follower.evaluate(data, global_batch=replicas)["loss"] for _ in range(2)]
        reads.append(access.checkpoints(follower).latest.name)
        unfinished.rmdir()  # an error if the follower had removed it

    assert found == [0.0, 0.0, -1.0, -1.0, -3.0, -3.0]
    assert reads == ["ckpt-1", "ckpt-2", "ckpt-4"]
    assert follower.totals.attempted == 4
    assert not access.checkpoints(follower).follow(clean_up=False)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_several_inputs_and_outputs(mirrored, precision, replicas):
    """L21: inputs in a dict and outputs in a dict or list are predicted and evaluated like the model's
    own call.
    """

    def model(as_list):
        a, b = keras.Input([5], name="a"), keras.Input([5], name="b")
        sum_ = keras.layers.Dense(2, name="sum")(a + b)
        difference = keras.layers.Dense(3, name="difference")(a - b)
        outputs = [sum_, difference] if as_list else {"sum": sum_, "difference": difference}
        return keras.Model({"a": a, "b": b}, outputs)

    strategy = mirrored(replicas) if replicas > 1 else "default"
    inputs = {"a": X, "b": X[::-1].copy()}
    for as_list in (False, True):
        trainer = Trainer(
            model=lambda as_list=as_list: model(as_list),
            precision=precision,
            loss_fn=lambda y, p: tf.reduce_sum(tf.nest.flatten(p)[1], 1) * y,
            strategy=strategy,
            verbose=False,
        )
        full = model(as_list)
        full.set_weights(trainer.model.get_weights())
        expected = full(inputs)
        found = trainer.predict(inputs, global_batch=4)
        loss = np.mean(np.sum(tf.nest.flatten(expected)[1], 1) * Y)

        tf.nest.map_structure(
            lambda ours, own: np.testing.assert_allclose(ours, own, rtol=1e-5, atol=1e-6),
            found,
            expected,
        )
        data = (inputs, Y.astype(np.float32))
        result = trainer.evaluate(data, global_batch=4)["loss"]
        assert result == pytest.approx(loss, rel=1e-4, abs=1e-5)


FLOATS = (X, X[:, :1])


@pytest.mark.parametrize("error", [None, RuntimeError("no evaluation")])
def test_an_evaluation_is_traced_once_before_the_first_step(error):
    """The trace is the one that evaluations use; an error in it comes before any step."""
    traces = []

    class Traced(Trainer):
        def eval_step(self, batch):
            traces.append(batch)
            if error:
                raise error
            return super().eval_step(batch)

    trainer = Traced(
        model=lambda: keras.Sequential([keras.Input([5]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
    )
    raised = pytest.raises(RuntimeError, match="no") if error else contextlib.nullcontext()
    with raised:
        trainer.train(FLOATS, steps=4, global_batch=4, eval_data=FLOATS, eval_interval=2)

    assert len(traces) == 1
    assert trainer.totals.attempted == (0 if error else 4)


def behind_a_hidden_layer():
    """The part of a model behind its first layer, whose inputs Keras casts to half precision."""
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4, "tanh")(inputs)
    whole = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    return keras.Model(hidden, whole.output)


def around_a_blind_sequential():
    """A functional model around a `Sequential` without an input."""
    inputs = keras.Input([4])
    dense = keras.layers.Dense(1, use_bias=True)
    return keras.Model(inputs, keras.Sequential([dense])(inputs))


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("make", [behind_a_hidden_layer, around_a_blind_sequential])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_inputs_are_not_rounded(make, half, tmp_path):
    """L21: neither in evaluations in float32 nor in a model exported in float32."""
    x = np.float32([60000, 60001, 60002, 70000])[:, None] * np.ones([4], np.float32)
    trainer = Trainer(model=make, precision=f"mixed_{half}", seed=0, verbose=False)
    kernel, bias = trainer.model.get_weights()
    expected = x.astype(np.float64) @ kernel + bias

    np.testing.assert_allclose(trainer.predict(x, global_batch=4), expected, rtol=1e-6)
    trainer.export(tmp_path / "model.keras", precision="float32")
    written = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(written.predict(x, verbose=0), expected, rtol=1e-6)
    declared = [tensor.dtype for layer in trainer.model.layers for tensor in [layer.output]]
    assert half in declared  # the trained model itself stays as it was


@pytest.mark.parametrize("replicas", [1, 3])
def test_dropout_in_prediction_draws_anew(mirrored, replicas):
    """Monte Carlo dropout draws other masks in every replica, batch and call, and the same program
    draws the same masks again.
    """

    class MonteCarlo(Trainer):
        def predict_batch(self, batch):
            return self.model(batch, training=True)

    def trainer():
        return MonteCarlo(
            model=lambda: keras.Sequential(
                [keras.Input([64]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            ),
            optimizer="sgd",
            loss_fn="mse",
            seed=3,
            verbose=False,
            strategy=mirrored(replicas) if replicas > 1 else "default",
        )

    first, second = trainer(), trainer()
    x = np.ones([2 * replicas, 64], np.float32)
    draws = [first.predict(x, global_batch=replicas) for _ in range(2)]

    assert len(np.unique(draws)) == 4 * replicas
    for draw in draws:
        np.testing.assert_array_equal(second.predict(x, global_batch=replicas), draw)
    first.model.layers[-1].trainable = False  # the parts are made again
    third = first.predict(x, global_batch=replicas)
    assert len(np.unique([*draws, third])) == 6 * replicas


def test_a_prediction_needs_neither_optimizer_nor_loss(tmp_path):
    """L21: a trainer of a model alone predicts from a checkpoint; training asks for the rest."""
    first = classifier(model_dir=tmp_path)
    first.train((X, Y), steps=2, global_batch=11)
    model = lambda: keras.Sequential([keras.Input([5]), keras.layers.Dense(3)])  # noqa: E731
    second = Trainer(model=model, model_dir=tmp_path, verbose=False)
    expected = first.predict(X, global_batch=11)

    np.testing.assert_array_equal(second.predict(X, global_batch=11), expected)
    assert second.totals.attempted == 2
    with pytest.raises(ValueError, match="`optimizer` must be given"):
        second.train((X, Y), steps=3, global_batch=11)


@pytest.mark.parametrize(
    "result",
    [
        lambda outputs: tf.reduce_mean(outputs, axis=0),
        tf.reduce_mean,
        lambda outputs: {"a": outputs, "b": None},
    ],
    ids=["mean", "scalar", "none"],
)
def test_predictions_have_one_row_for_each_example(result):
    """Rows of replicas and batches are joined, so a mean over a batch would pass for a prediction."""
    trainer = classifier()
    trainer.predict_batch = lambda x: result(trainer.model(x))
    with pytest.raises(ValueError, match="`predict_batch` must"):
        trainer.predict(X, global_batch=11)


def test_a_number_of_rows_that_is_known_late_is_checked():
    """Rows that are chosen by their values are missing in the result, which would go unnoticed."""
    trainer = classifier()
    trainer.predict_batch = lambda x: tf.boolean_mask(
        trainer.model(x), x[:, 0] > np.median(X[:, 0])
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="`predict_batch` must"):
        trainer.predict(X, global_batch=11)

    trainer = classifier()
    trainer.predict_batch = lambda x: tf.boolean_mask(trainer.model(x), x[:, 0] < np.inf)
    assert len(trainer.predict(X, global_batch=4)) == len(X)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_predictions_may_be_sparse(mirrored, replicas):
    """A model that returns a sparse tensor predicts one with the rows of all batches."""
    trainer = classifier(strategy=mirrored(replicas) if replicas > 1 else "default")
    trainer.predict_batch = lambda x: tf.sparse.from_dense(tf.nn.relu(trainer.model(x)))
    found = trainer.predict(X, global_batch=4)
    assert found.shape == (len(X), 3)
    outputs = trainer.model(X).numpy()
    np.testing.assert_allclose(tf.sparse.to_dense(found), np.maximum(outputs, 0), rtol=1e-5)


class Doubling(tf.Module):
    """A weight that only training moves; it computes in evaluation exactly as in training."""

    def __init__(self):
        """Begins with 2."""
        super().__init__()
        self.factor = tf.Variable(2.0)

    def __call__(self, x):
        """Multiplies."""
        return self.factor * x


def test_a_module_predicts_as_it_trains():
    """Without Keras there are no layers whose precision could change."""
    trainer = Trainer(model=Doubling, optimizer="sgd", loss_fn="mse", verbose=False)

    np.testing.assert_array_equal(trainer.predict(X, global_batch=4), 2 * X)


@pytest.mark.thorough
def test_a_prediction_in_another_thread_undoes_no_step():
    """It begins before a step of `train` and ends after ten others: nothing is restored."""
    x = np.ones([4, 1], np.float32)
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        yield x
        yield x  # the first two are read before the prediction begins
        begun.set()
        assert go_on.wait(30)
        yield x

    def trained(*actions):
        trainer = Trainer(
            model=Doubling,
            optimizer=lambda: keras.optimizers.SGD(0.01),
            loss_fn="mse",
            steps_per_loop=1,
            callbacks=actions,
            verbose=False,
        )
        trainer.predict(x, global_batch=4)
        trainer.train((x, 0 * x), steps=20, global_batch=4)
        return trainer.model.factor.numpy()

    threads = []

    def start(trainer):
        if not threads:
            threads.append(threading.Thread(target=lambda: trainer.predict(slow)))
            threads[0].start()
            assert begun.wait(30)

    def end(_):
        go_on.set()
        threads[0].join(30)

    actions = Action(start, every_steps=5), Action(end, every_steps=15)
    assert trained(*actions) == trained()
    assert not threads[0].is_alive()
