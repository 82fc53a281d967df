"""Export of a trained model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer, Updates
from trainer.evaluation.export import export

X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]

# Keras warns when it reads a file with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


class Scaled(keras.layers.Layer):
    """Multiplies by a number that its config leaves out; not registered with Keras."""

    def __init__(self, factor=1.0, **arguments):
        """Keeps the number."""
        super().__init__(**arguments)
        self.factor = factor

    def call(self, x):
        """Multiplies."""
        return x * self.factor


def trained(layer=None, **arguments):
    """Trains a small network for three steps."""

    def model():
        layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), layer or Scaled()]
        return keras.Sequential([keras.Input([1]), *layers, keras.layers.Dense(2, dtype="float32")])

    trainer = Trainer(
        model=model,
        optimizer=lambda: keras.optimizers.Adam(0.05),
        loss_fn="mse",
        precision="mixed_float16",
        seed=1,
        verbose=False,
        **arguments,
    )
    trainer.train((X, np.hstack([X, -X])), steps=3, global_batch=8)
    return trainer


@pytest.fixture(scope="module")
def run():
    """One run, shared by all tests that do not change it."""
    return trained()


def loaded(path):
    """Loads an exported model: returns its function of inputs and its floating-point variables."""
    if path.suffix == ".keras":
        found = keras.saving.load_model(path, custom_objects={"Scaled": Scaled}, compile=False)
        call = found
    else:
        found = tf.saved_model.load(str(path))
        call = found.serve
    real = [each for each in found.variables if tf.as_dtype(each.dtype).is_floating]
    return call, real


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["model.keras", "folder"])
@pytest.mark.parametrize(
    "precision",
    [
        "train",
        "float32",
        pytest.param("float16", marks=pytest.mark.thorough),
        pytest.param("bfloat16", marks=pytest.mark.slow),
    ],
)
def test_what_is_written_predicts_the_same(run, tmp_path, precision, name):
    """In every precision and both formats, the loaded model has weights of the requested dtype, and
    its outputs equal the trained model's up to rounding.
    """
    path = tmp_path / name
    difference = run.export(path, precision=precision, compare_on=X)
    call, real = loaded(path)
    ours, theirs = (np.asarray(tf.cast(each(X), tf.float32)) for each in (run.model, call))
    dtype = "float32" if precision == "train" else precision
    eps = {"float32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]

    assert {tf.as_dtype(each.dtype).name for each in real} == {dtype}
    assert np.abs(ours - theirs).max() / np.abs(ours).max() == pytest.approx(difference, abs=1e-6)
    assert difference <= 8 * eps
    # A SavedModel is a graph: on some processors, TensorFlow has other kernels for it.
    assert difference == 0 or (precision, name) != ("train", "model.keras")
    # Exporting does not change the model itself.
    assert {layer.compute_dtype for layer in run.model.layers[:3]} == {"float16"}


@pytest.mark.slow
def test_a_mirrored_model_is_exported_with_its_average(mirrored, tmp_path):
    """A SavedModel of a mirrored model holds plain variables with the averaged weights."""
    run = trained(strategy=mirrored(2), updates=Updates(ema_momentum=0.5))
    run.export(tmp_path / "average", compare_on=X)
    run.export(tmp_path / "plain", averaged=False, compare_on=X)
    average, plain = (loaded(tmp_path / name)[1] for name in ("average", "plain"))

    assert all(not hasattr(variable, "values") for variable in average)
    assert not np.array_equal(average[0].numpy(), plain[0].numpy())
    assert plain[0].numpy().tobytes() == run.model.variables[0].numpy().tobytes()


@pytest.mark.thorough
def test_a_setting_missing_from_the_config_is_detected(tmp_path):
    """A setting that get_config() leaves out is lost in the file, and `compare_on` detects it."""
    run = trained(Scaled())
    run.model.layers[2].factor = 3.0
    path = tmp_path / "model.keras"
    with pytest.raises(ValueError, match="`path` must"):
        run.export(path, compare_on=X)


def test_an_exported_model_that_overflows_is_detected(tmp_path):
    """In float16, inf - inf is NaN, which is no number within any tolerance. The folder is made."""
    model = keras.Sequential(
        [
            keras.Input([1]),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant(1e3)),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant(1e3)),
            keras.layers.UnitNormalization(),
        ]
    )
    path = tmp_path / "new" / "model.keras"
    with pytest.raises(ValueError, match="`path` must"):
        export(model, path, "float16", X)

    assert export(model, path, "bfloat16", X) <= 32 * 2.0**-7


def test_other_formats_and_precisions_are_refused(run):
    """The suffix and the precision are checked before anything is written."""
    with pytest.raises(ValueError, match="`path` must"):
        run.export("model.h5")
    with pytest.raises(ValueError, match="`precision` must"):
        run.export("model.keras", precision="half")


def quantized(mode):
    """A trainer of two layers, of which Keras quantizes the attention's four or the dense one."""

    def model():
        inputs = keras.Input([4, 8])
        attended = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
        hidden = inputs if mode == "int8" else attended
        made = keras.Model(inputs, keras.layers.Dense(2, name="head")(hidden))
        made.quantize("int8")
        return made

    trainer = Trainer(model=model, precision="mixed_bfloat16", verbose=False)
    trainer.predict(SEQUENCES, global_batch=3)
    return trainer


SEQUENCES = np.random.default_rng(0).standard_normal([3, 4, 8]).astype(np.float32)
# Raised by Keras for layers that it does not quantize.
QUANTIZING = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")


@QUANTIZING
def test_an_int8_model_is_exported_as_int8(tmp_path):
    """L21: in float32 and bfloat16 the file holds int8 layers; Keras refuses float16."""
    trainer = quantized("int8")
    for precision in ("train", "float32", "bfloat16"):
        path = tmp_path / f"{precision}.keras"
        trainer.export(path, precision=precision, compare_on=SEQUENCES)
        assert keras.saving.load_model(path).get_layer("head").quantization_mode == "int8"
    with pytest.raises(ValueError, match="float16"):
        trainer.export(tmp_path / "float16.keras", precision="float16")

    assert not (tmp_path / "float16.keras").exists()


@pytest.mark.thorough
@QUANTIZING
def test_what_keras_cannot_load_is_not_exported(tmp_path):
    """L21: Keras saves quantized attention without its weights, so nothing is written."""
    trainer = quantized("attention")
    for name in ("model.keras", "folder"):
        with pytest.raises(ValueError, match="could not be loaded"):
            trainer.export(tmp_path / name)

    assert not list(tmp_path.iterdir())


@keras.saving.register_keras_serializable("tests")
class Tagger(keras.Model):
    """A subclassed model, which declares no inputs; they are integers in a dict."""

    def __init__(self, **arguments):
        """Makes the layers."""
        super().__init__(**arguments)
        self.embedding, self.dense = keras.layers.Embedding(300, 4), keras.layers.Dense(2)

    def call(self, inputs):
        """Reads the tokens."""
        return self.dense(self.embedding(inputs["tokens"]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "precision", ["float32", pytest.param("mixed_float16", marks=pytest.mark.slow)]
)
def test_a_subclassed_model_is_exported_with_the_inputs_that_it_had(tmp_path, precision):
    """A SavedModel takes batches of any size, and integers that half precision does not have."""
    tokens = np.arange(64, dtype=np.int32).reshape(16, 4) * 4 + 45
    x = {"tokens": tokens}
    trainer = Trainer(
        model=Tagger, optimizer="sgd", loss_fn="mse", precision=precision, verbose=False
    )
    trainer.train((x, np.ones([16, 4, 2], np.float32)), steps=1, global_batch=8)
    trainer.export(tmp_path / "model", precision="float32", compare_on=x)
    exported = tf.saved_model.load(str(tmp_path / "model"))  # owns the variables
    found = exported.serve({"tokens": tokens[:3]})
    np.testing.assert_allclose(found, trainer.predict(x, global_batch=8)[:3], rtol=1e-5, atol=1e-6)


def test_the_inputs_of_a_subclassed_model_must_be_known(tmp_path):
    """A compute_loss of one's own may have called the model with anything; predict tells it."""

    class Own(Trainer):
        def compute_loss(self, batch, training):
            return tf.reduce_mean(self.model(batch, training=training), axis=[1, 2])

    x = {"tokens": np.ones([4, 3], np.int32)}
    trainer = Own(model=Tagger, optimizer="sgd", verbose=False)
    trainer.train(x, steps=1, global_batch=4)
    with pytest.raises(ValueError, match="`export`"):
        trainer.export(tmp_path / "model")
    trainer.predict(x, global_batch=4)
    trainer.export(tmp_path / "model", compare_on=x)


class Pair(keras.layers.Layer):
    """Multiplies two inputs, given in a dict, after a layer of its own."""

    def __init__(self, units, **arguments):
        """Creates the layer."""
        super().__init__(**arguments)
        self.units = units
        self.dense = keras.layers.Dense(units)

    def build(self, shapes):
        """Builds the layer."""
        self.dense.build(shapes["a"])

    def call(self, inputs):
        """Returns the product."""
        return self.dense(inputs["a"]) * tf.cast(inputs["b"], self.compute_dtype)

    def get_config(self):
        """Returns the number of units."""
        return super().get_config() | {"units": self.units}


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", ["model", "model.keras"])
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_a_layer_is_exported_as_a_model_of_it(tmp_path, name, precision):
    """With the inputs that the default `compute_loss` has called it with."""
    x = {"a": np.float32([[1, 2], [3, 4]] * 4), "b": np.arange(8, dtype=np.int32)[:, None]}
    trainer = Trainer(
        model=lambda: Pair(3), optimizer="sgd", loss_fn="mse", precision=precision, verbose=False
    )
    trainer.train((x, np.ones([8, 3], np.float32)), steps=2, global_batch=8)
    assert trainer.export(tmp_path / name, precision="float32", compare_on=x) < 0.05
