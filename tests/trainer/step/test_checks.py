"""Bad input raises one clear error, with the argument, the value and what to do, before
any step.
"""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model, needs_multi_optimizer

import scaling
import strategies
from trainer import Trainer, Updates
from trainer.step.checks import check_global_loss, check_weights

pytestmark = pytest.mark.sampled

X = np.ones([8, 1], np.float32)


def make(**arguments):
    """A trainer of (x, y) batches, with overrides from the test."""
    good = {"model": linear_model, "optimizer": keras.optimizers.SGD, "loss_fn": "mse"}
    return Trainer(**good | {"verbose": False} | arguments)


def train(trainer, data=(X, X), **arguments):
    """Trains one step on arrays."""
    return trainer.train(data, **{"steps": 1, "global_batch": 4} | arguments)


def of_layer(**arguments):
    """A function that builds a model of a dense layer."""
    return lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1, **arguments)])


class Centered(keras.optimizers.SGD):
    """Takes the mean off every gradient, where the step does not look."""

    def apply_gradients(self, grads_and_vars):
        """Applies gradients without their mean."""
        return super().apply_gradients((g - tf.reduce_mean(g), v) for g, v in grads_and_vars)


def built():
    """An optimizer that has been built without averages."""
    optimizer = keras.optimizers.SGD()
    optimizer.build([])
    return optimizer


def scaling_optimizer():
    """An optimizer of Keras that scales the loss."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


def later():
    """An optimizer that makes its inner ones when it is built."""
    return keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("model", {"model": None}),
        ("model", {"model": of_layer(dtype="mixed_float16")}),
        ("model", {"model": of_layer(dtype="float32"), "precision": "mixed_float16"}),
        ("model", {"model": of_layer(dtype="float16"), "precision": "mixed_float16"}),
        ("model", {"model": of_layer(trainable=False)}),
        ("loss_fn", {"loss_fn": None}),
        ("optimizer", {"optimizer": Centered}),
        ("optimizer", {"optimizer": scaling_optimizer}),
        ("optimizer", {"optimizer": lambda: keras.optimizers.SGD(loss_scale_factor=8.0)}),
        ("optimizer", {"optimizer": lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)}),
        pytest.param("optimizer", {"optimizer": later}, marks=needs_multi_optimizer),
        ("ema_momentum", {"optimizer": built, "updates": Updates(ema_momentum=0.9)}),
        (
            "ema_momentum",
            {
                "optimizer": lambda: keras.optimizers.SGD(use_ema=True),
                "updates": Updates(ema_momentum=0.9),
            },
        ),
    ],
)
def test_models_and_optimizers_are_refused_before_the_first_step(name, arguments):
    """What only the built model or optimizer shows is refused before any training."""
    with pytest.raises(ValueError, match=f"`{name}` must"):
        train(make(**arguments))


def own_step(*_, **__):
    """A step of a model's own, which no trainer calls."""
    raise AssertionError


def with_own(*names):
    """A linear model whose class has methods of its own in the place of Keras's."""
    inputs = keras.Input([1])
    own = type("Own", (keras.Model,), dict.fromkeys(names, own_step))
    return own(inputs, keras.layers.Dense(1)(inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["train_step", "test_step", "compute_loss", "predict_step"])
def test_steps_that_a_default_would_replace_are_refused(name):
    """With `loss_fn`, and by the default `predict_batch`; another default is not concerned."""
    refused = {
        "train": name in ("train_step", "compute_loss"),
        "evaluate": name in ("test_step", "compute_loss"),
        "predict": name == "predict_step",
    }
    data = {"train": (X, X), "evaluate": (X, X), "predict": X}
    for method, wrong in refused.items():
        trainer = make(model=lambda: with_own(name, "compute_metrics"))
        arguments = {"steps": 1} if method == "train" else {}
        expected = pytest.raises(ValueError, match=f"`model`.* {name} ")
        with expected if wrong else contextlib.nullcontext():
            getattr(trainer, method)(data[method], global_batch=4, **arguments)


def test_complex_weights_are_refused():
    """TensorFlow would cast their gradients to float32, without their imaginary parts."""

    class Phase(tf.Module):
        def __init__(self):
            super().__init__()
            self.phase = tf.Variable([[1j]], name="angle")

        def __call__(self, x):
            return tf.abs(tf.cast(x, tf.complex128) * self.phase)

    with pytest.raises(ValueError, match=r"`model`.*angle"):
        train(make(model=Phase))


def test_variables_of_another_strategy_are_refused(mirrored):
    """A model built outside the scope has one copy of its weights and is refused."""
    with pytest.raises(ValueError, match=r"`model` must.*kernel"):
        train(make(model=linear_model(), strategy=mirrored(2)))


def test_an_optimizer_of_another_strategy_is_refused(mirrored):
    """L10: an optimizer built outside the scope would count every replica's update and
    is refused.
    """
    with pytest.raises(ValueError, match=r"`optimizer`.*iteration"):
        train(make(optimizer=keras.optimizers.Adam(), strategy=mirrored(2)))


class Blind(keras.Model):
    """Contains a Sequential without an input shape."""

    def __init__(self):
        """Embeds ids and returns one number."""
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Embedding(4096, 1)], name="inner")

    def call(self, ids):
        """Looks the ids up."""
        return self.inner(ids)[:, 0]


@pytest.mark.parametrize("model", [Blind, lambda: keras.Sequential([keras.layers.Dense(1)])])
def test_a_sequential_must_know_its_input(model):
    """Without an Input, also inside of another model, float16 would turn id 2049 into 2048."""
    with pytest.raises(ValueError, match=r"`model`.*Input"):
        train(make(model=model, precision="mixed_float16"))


def test_weights_written_in_the_forward_pass_are_refused():
    """L13: SpectralNormalization assigns its kernel, which half precision would round, and is
    refused.
    """

    def spectral():
        layer = keras.layers.SpectralNormalization(keras.layers.Dense(1))
        return keras.Sequential([keras.Input([1]), layer])

    trainer = make(model=spectral, precision="mixed_bfloat16")
    with pytest.raises(ValueError, match="`model`"):
        train(trainer)
    assert trainer.totals.attempted == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_layers_that_cudnn_computes_in_bfloat16_are_refused(kind):
    """On a GPU their gradients are wrong there (test_on_card.py). Keras says by `supports_jit` which
    those are; here they are marked by hand.
    """

    def recurrent(*, marked, policy, use_cudnn="auto", **settings):
        def build():
            layer = getattr(keras.layers, kind)(4, name="memory", dtype=policy, **settings)
            layer.supports_jit = not marked
            layer.use_cudnn = use_cudnn  # in `Bidirectional`, it is set after `supports_jit`
            inner = keras.Sequential([keras.Input([1, 1]), layer])
            return keras.Sequential(
                [keras.Input([1]), keras.layers.Reshape([1, 1]), inner, keras.layers.Dense(1)]
            )

        return make(model=build, precision=policy, jit_compile=False)

    allowed = [
        recurrent(marked=True, policy="mixed_float16"),
        recurrent(marked=True, policy="float32"),
        recurrent(marked=False, policy="mixed_bfloat16"),
        recurrent(marked=True, policy="mixed_bfloat16", recurrent_dropout=0.1),
        recurrent(marked=True, policy="mixed_bfloat16", use_cudnn=False),
    ]
    for trainer in allowed:
        assert train(trainer).totals.attempted == 1
    with pytest.raises(ValueError, match="`model`"):
        train(recurrent(marked=True, policy="mixed_bfloat16"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("num_microbatches", {"num_microbatches": 2}),
        ("example_weights", {"example_weights": tf.ones}),
        ("jit_compile", {"jit_compile": True}),
        ("on_stuck", {"float32_after": 100}),
        ("strategy", {}),
    ],
)
def test_what_a_global_loss_cannot_do_is_refused(monkeypatch, mirrored, name, settings):
    """Each is named; on TPUs, nothing was tried."""
    possible = {
        "num_microbatches": 1,
        "example_weights": None,
        "jit_compile": False,
        "float32_after": None,
    }
    check_global_loss(mirrored(2), **possible)
    if name == "strategy":
        capabilities = dataclasses.replace(
            strategies.capabilities(mirrored(2)), decides_in_replica=True
        )
        monkeypatch.setattr(strategies, "capabilities", lambda _: capabilities)
    with pytest.raises(ValueError, match=f"`{name}` must"):
        check_global_loss(mirrored(2), **possible | settings)


@pytest.mark.thorough
def test_a_frozen_half_backbone_with_a_float32_head_is_accepted():
    """The precision of a model is that of all layers with weights, trainable or not."""

    def transfer():
        frozen = keras.layers.Dense(3, trainable=False)
        head = keras.layers.Dense(1, dtype="float32")
        return keras.Sequential([keras.Input([1]), frozen, head])

    assert train(make(model=transfer, precision="mixed_float16")).totals.applied == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ({"loss_scale": 2.0**20}, {"loss_scale": 1024.0}, "loss_scale"),
        (
            {"loss_scale": scaling.DynamicLossScale(2.0**20)},
            {"loss_scale": scaling.DynamicLossScale(max_scale=2.0**16)},
            "loss_scale",
        ),
        ({"loss_scale": None}, {"loss_scale": "dynamic"}, "loss_scale"),
        ({"seed": 0}, {"seed": 1}, "seed"),
        ({}, {"model": lambda: linear_model(units=2)}, "model_dir"),
        ({}, {"optimizer": keras.optimizers.Adam}, "model_dir"),
    ],
)
def test_a_run_resumes_only_with_the_same_settings(tmp_path, first, second, name):
    """L3, L12: resuming with another rule, seed, model or optimizer in the same directory is
    refused.
    """
    train(make(model_dir=tmp_path, **first))
    with pytest.raises(ValueError, match=f"`{name}`"):
        train(make(model_dir=tmp_path, **second), steps=2)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("eval_interval", {"eval_interval": 0, "eval_data": (X, X)}),
        ("eval_data", {"eval_data": tf.data.Dataset.from_tensors((X, X)).repeat()}),
        ("eval_data", {"eval_data": (X[:0], X[:0])}),
    ],
)
def test_evaluation_data_is_checked_before_the_first_step(name, arguments):
    """Evaluation data is checked before the first step, not after the steps up to the first
    evaluation.
    """
    trainer = make()
    with pytest.raises(ValueError, match=f"`{name}` "):
        train(trainer, steps=4, **arguments)
    assert not trainer._started


def test_weights_of_another_number_are_refused_where_the_number_is_known():
    """A trace that knows the size of the batch compares it; float64 weights become float32."""
    batch = {"x": tf.ones([2, 5])}
    assert check_weights([1.0, 0.5], batch).dtype == tf.float32
    assert check_weights(tf.ones([2, 3]), batch).shape == [2, 3]
    for wrong in (np.ones([3]), tf.constant(1.0)):
        with pytest.raises(ValueError, match="`example_weights`"):
            check_weights(wrong, batch)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_weights_that_hide_their_number_are_counted(jit_compile):
    """In every batch, not only in the first; under XLA they are NaN, and the step is skipped."""

    @tf.function(jit_compile=jit_compile)
    def checked(mask):
        return check_weights(tf.boolean_mask(tf.ones([2]), mask), {"x": tf.ones([2, 5])})

    assert checked(tf.constant([True, True])).numpy().tolist() == [1.0, 1.0]
    if jit_compile:
        assert np.isnan(checked(tf.constant([False, True]))).all()
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="one weight per example"):
            checked(tf.constant([False, True]))


DATASET = tf.data.Dataset.from_tensor_slices((X, X))
UNKNOWN = DATASET.batch(4).filter(lambda x, y: True)  # noqa: ARG005


@pytest.mark.parametrize(
    ("data", "arguments", "argument"),
    [
        (DATASET.batch(4).take(0), {"global_batch": None}, "train_data"),
        (UNKNOWN.take(0), {"global_batch": None}, "train_data"),
        ((X[:0], X[:0]), {}, "train_data"),
        (
            tf.data.Dataset.from_tensor_slices((X[:, 0], X[:, 0])),
            {"global_batch": None},
            "train_data",
        ),
        (DATASET.batch(4), {}, "global_batch"),
        ((X, X), {"global_batch": None}, "global_batch"),
        ((X, X[:5]), {}, "train_data"),
        ("digits", {}, "train_data"),
        (X, {}, "train_data"),
        ((X, X), {"steps": None}, "steps"),
        (UNKNOWN, {"steps": None, "epochs": 2, "global_batch": None}, "epochs"),
    ],
)
def test_data_of_another_form_is_refused(data, arguments, argument):
    """Errors that the data alone shows are raised before the first step, and an empty dataset never
    hangs.
    """
    with pytest.raises((ValueError, TypeError), match=f"`{argument}` must"):
        train(make(), data, **arguments)
