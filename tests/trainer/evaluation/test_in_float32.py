"""A model of half precision is evaluated in float32, if it can be."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer
from trainer.evaluation.in_float32 import in_float32

X = np.ones([8, 4], np.float32)
DATA = (X, X[:, :1])


class Positions(keras.layers.Layer):
    """Adds a table, which it keeps in its compute dtype."""

    def build(self, shape):
        """Computes the table."""
        self.table = keras.ops.cast(np.arange(shape[-1]) / 7, self.compute_dtype)

    def call(self, x):
        """The sum."""
        return x + self.table


def trainer_of(precision, **arguments):
    """A trainer of a model with such a table."""
    return Trainer(
        model=lambda: keras.Sequential([keras.Input([4]), Positions(), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        precision=precision,
        verbose=False,
        **arguments,
    )


def refused(half):
    """The text of the error."""
    return (
        "`model` must be able to compute in float32, as evaluations do by default; got in "
        f"Positions.call(): Input 'y' of 'AddV2' Op has type {half} that does not match type "
        "float32 of argument 'x'. A layer probably keeps a tensor in the dtype in which it computed "
        "when it was built. Keep it in float32 and cast it in each call, to x.dtype or "
        'self.compute_dtype; or call evaluate() and predict() with precision="train", and train '
        "without eval_data."
    )


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_constant_in_half_precision_is_explained_before_the_first_step(half, tmp_path):
    """The first evaluation may be hours away."""
    trainer = trainer_of(f"mixed_{half}", model_dir=tmp_path)
    with pytest.raises(ValueError, match="float32") as error:
        trainer.train(DATA, steps=4, global_batch=4, eval_data=DATA)
    assert str(error.value) == refused(half)
    assert trainer.totals.attempted == 0

    assert trainer.train(DATA, steps=2, global_batch=4).totals.attempted == 2
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="float32") as error:
            call(DATA, global_batch=4)
        assert str(error.value) == refused(half)
    assert np.isfinite(trainer.evaluate(DATA, global_batch=4, precision="train")["loss"])


def test_in_float32_it_is_evaluated():
    """The table is in float32 then."""
    trained = trainer_of("float32").train(DATA, steps=2, global_batch=4, eval_data=DATA)
    assert trained.totals.applied == 2


@pytest.mark.parametrize("error", [ValueError("float32"), TypeError("x"), KeyError("float16")])
def test_other_errors_are_left_alone(error):
    """Only one that has both dtypes is about a mixture of them."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, dtype="mixed_float16")])
    with pytest.raises(type(error)) as found, in_float32(model):
        raise error
    assert found.value is error


class Failing(Trainer):
    """An evaluation that cannot be traced."""

    def eval_step(self, batch):
        """Fails."""
        raise RuntimeError("no evaluation")


def test_any_error_of_an_evaluation_comes_before_the_first_step():
    """Here one of the user's own."""
    trainer = Failing(
        model=lambda: keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
    )
    with pytest.raises(RuntimeError, match="no evaluation"):
        trainer.train(DATA, steps=2, global_batch=4, eval_data=DATA)
    assert trainer.totals.attempted == 0


def test_an_evaluation_is_traced_once():
    """What comes before the first step is the trace that evaluations use."""
    traces = []

    class Counted(Trainer):
        def eval_step(self, batch):
            traces.append(tf.nest.flatten(batch)[0].shape)
            return super().eval_step(batch)

    trainer = Counted(
        model=lambda: keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
    )
    trainer.train(DATA, steps=4, global_batch=4, eval_data=DATA, eval_interval=2)
    assert len(traces) == 1


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
