"""Layers that are converted to float8, and runs with them."""

import keras
import numpy as np
import pytest

from scaling.float8 import DelayedScaling
from trainer import Trainer
from trainer.float8.convert import convert_to_float8, product_sizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)

ROWS = np.random.default_rng(3).integers(-8, 9, size=(8, 16)).astype(np.float32) / 4.0


def test_large_and_inner_layers_are_converted():
    """Layers at the ends, small ones, ones of other classes and quantized ones stay as they are."""

    class Own(keras.layers.Dense):
        pass

    inputs = keras.Input([8], dtype="int32")
    x = keras.layers.Embedding(100, 32)(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 16, name="attention")(x, x)
    x = keras.layers.Dense(24, name="small")(x)
    x = keras.layers.Dense(32, name="from_small")(x)
    x = Own(32, name="own")(x)
    x = keras.layers.Dense(64, activation="relu", name="large")(x)
    model = keras.Model(inputs, keras.layers.Dense(32, name="head")(x), name="model")
    assert convert_to_float8(model) == [
        "attention/query",
        "attention/key",
        "attention/value",
        "attention/attention_output",
        "large",
    ]
    assert convert_to_float8(model, lambda layer: layer.name == "head") == ["head"]


def test_sizes_of_a_product():
    """Sizes are those of the kernel as a matrix, also where its labels stand apart."""
    layer = keras.layers.EinsumDense("abc,cde->abde", output_shape=[None, 4, 16])
    layer.build([None, 3, 48])
    assert product_sizes(layer) == (48, 64)
    layer = keras.layers.EinsumDense("...cd,cde->...e", output_shape=[32])
    layer.build([None, 3, 4, 16])
    assert product_sizes(layer) == (64, 32)


def test_a_saved_model_is_one_of_keras(tmp_path):
    """Keras alone loads a converted model, with the same outputs; its class is Keras's own."""
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(16), keras.layers.Dense(16)])
    convert_to_float8(model, lambda _: True, DelayedScaling(history_length=4))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is keras.layers.Dense
    assert loaded.layers[0].quantization_mode == "float8"
    assert loaded.layers[0].inputs_amax_history.shape == (4,)
    np.testing.assert_array_equal(loaded(ROWS), model(ROWS))


@pytest.mark.thorough
def test_a_trainer_in_float8(tmp_path):
    """`precision="mixed_float8"` converts the model, trains it, resumes it, and exports it."""

    def trainer(**settings):
        def model():
            layers = [keras.layers.Dense(16, activation="relu") for _ in range(3)]
            return keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(1)])

        return Trainer(
            **{
                "model": model,
                "optimizer": lambda: keras.optimizers.Adam(0.01),
                "loss_fn": "mse",
                "seed": 1,
                "precision": "mixed_float8",
                "verbose": False,
                "jit_compile": False,
                **settings,
            }
        )

    rows = np.tile(ROWS, (4, 1))
    data = (rows, rows[:, :1])
    whole = trainer()
    whole.train(data, steps=20, global_batch=8)
    trainer(model_dir=tmp_path).train(data, steps=10, global_batch=8)
    resumed = trainer(model_dir=tmp_path)
    resumed.train(data, steps=20, global_batch=8)
    modes = [layer.quantization_mode for layer in resumed.model.layers]
    assert modes == [None, "float8", "float8", None]
    assert {layer.compute_dtype for layer in resumed.model.layers} == {"bfloat16"}
    for ours, theirs in zip(resumed.model.variables, whole.model.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    resumed.export(tmp_path / "model.keras", precision="train")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(rows), resumed.model(rows))


@pytest.mark.slow
def test_the_rule_is_part_of_the_run(tmp_path):
    """A run that is resumed with another float8 rule is refused: its scales mean something else."""

    def trainer(margin):
        def model():
            model = keras.Sequential([keras.Input([16]), keras.layers.Dense(16)])
            convert_to_float8(model, lambda _: True, DelayedScaling(margin=margin))
            return model

        return Trainer(
            model=model,
            optimizer="sgd",
            loss_fn="mse",
            precision="mixed_float8",
            verbose=False,
            model_dir=tmp_path,
        )

    data = (ROWS, ROWS)
    trainer(0).train(data, steps=1, global_batch=8)
    with pytest.raises(ValueError, match="margin"):
        trainer(1).train(data, steps=2, global_batch=8)


def test_a_model_without_float8_layers_is_refused():
    """It would train in bfloat16 without a word; so would one that has not been built."""
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(16, name="one")], name="plain")
    for wrong in (model, keras.Sequential([keras.layers.Dense(16)], name="unbuilt")):
        with pytest.raises(ValueError, match=r"^`layers`"):
            convert_to_float8(wrong)
