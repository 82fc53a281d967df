"""What only a card decides: TensorFlow's own kernels, XLA's choice among several, two GPUs.

Skipped where TensorFlow finds no GPU.
"""

import json
import os
import pathlib
import subprocess
import sys

import access
import keras
import numpy as np
import pytest
import tensorflow as tf

import scaling
from trainer import Trainer
from trainer.step.xla import COMPILE_MODES

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not tf.config.list_physical_devices("GPU"), reason="TensorFlow finds no GPU"
    ),
]
STEPS = 5
PRECISIONS = {"float32": "float32", "mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
# How far a run's move may be from the CPU's in float32, relative to it. Products on a GPU round
# float32 to TensorFloat-32, which has float16's 11 bits: on an H100, 0.0203 to 0.0205 apart with
# convolutions, in every mode.
APART = {"float32": 0.05, "mixed_bfloat16": 0.1, "mixed_float16": 0.05, "mixed_float8": 0.3}


def convolutions():
    """Returns a model with convolutions, both normalizations, and dense layers."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([12, 12, 3]),
            layers.Conv2D(16, 3, padding="same", activation="gelu"),
            layers.BatchNormalization(),
            layers.SeparableConv2D(32, 3, strides=2),
            layers.LayerNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )


def recurrent(use_cudnn=False):
    """Returns a model with an embedding, attention and an LSTM."""
    layers = keras.layers
    words = keras.Input([12], dtype="int32")
    hidden = layers.Embedding(50, 32)(words)
    hidden = hidden + layers.MultiHeadAttention(2, 16)(hidden, hidden)
    return keras.Model(words, layers.Dense(10)(layers.LSTM(32, use_cudnn=use_cudnn)(hidden)))


def in_cudnn():
    """Returns the same model, whose LSTM is cuDNN's on a GPU: Keras's default."""
    return recurrent(use_cudnn="auto")


def dense():
    """Returns a model whose layers all can compute in float8."""
    layers = [keras.Input([32])] + [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


MODELS = {
    "convolutions": convolutions,
    "recurrent": recurrent,
    "cudnn": in_cudnn,
    "dense": dense,
}


def batch_of(name, seed=0):
    """Returns 32 random examples."""
    generator = np.random.default_rng(seed)
    inputs = {
        "convolutions": generator.normal(size=[32, 12, 12, 3]).astype(np.float32),
        "recurrent": generator.integers(50, size=[32, 12]).astype(np.int32),
        "cudnn": generator.integers(50, size=[32, 12]).astype(np.int32),
        "dense": generator.normal(size=[32, 32]).astype(np.float32),
    }
    return inputs[name], generator.integers(10, size=32)


def trainer_of(name, device="GPU:0", **settings):
    """Returns a trainer of a model whose initial weights are always the same."""

    def build():
        keras.utils.set_random_seed(1)
        return MODELS[name]()

    return Trainer(
        model=build,
        optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy=settings.pop("strategy", None) or tf.distribute.OneDeviceStrategy(device),
        verbose=False,
        **settings,
    )


def weights_of(model):
    """Returns a model's trained weights without float8's scales."""
    scales = [each for each in model.trainable_variables if each.overwrite_with_gradient]
    return [each for each in model.trainable_variables if all(each is not one for one in scales)]


def values_of(variables):
    """Returns copies of the values of variables."""
    return [each.numpy().copy() for each in variables]


def moves(name, batch, **settings):
    """Returns by how much `STEPS` steps move each trained weight, in one array."""
    trainer = trainer_of(name, **settings)
    keras.utils.set_random_seed(1)
    before = values_of(weights_of(MODELS[name]()))
    trainer.train(tf.data.Dataset.from_tensors(batch).repeat(), steps=STEPS)
    assert trainer.totals.applied == STEPS
    after = values_of(weights_of(trainer.model))
    return np.concatenate([np.ravel(a - b) for a, b in zip(after, before, strict=True)])


def apart(found, expected):
    """Returns the norm of a difference, relative to what was expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("mode", COMPILE_MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["convolutions", "recurrent"])
def test_a_run_on_the_card_moves_weights_as_one_on_the_cpu(name, precision, mode):
    """In each mode and precision, the weights move as in float32 on the CPU, up to rounding."""
    batch = batch_of(name)
    expected = moves(name, batch, device="CPU:0", jit_compile=False)
    found = moves(name, batch, precision=precision, jit_compile=mode)

    assert apart(found, expected) < APART[precision]


def test_a_short_run_is_one_program():
    """What `jit_compile="auto"` begins with on a GPU."""
    trainer = trainer_of("convolutions", jit_compile="auto")
    trainer.train(tf.data.Dataset.from_tensors(batch_of("convolutions")).repeat(), steps=2)

    assert trainer.jit_compile == "step"


@pytest.mark.parametrize("mode", [False, "update", "elementwise"])
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_an_lstm_of_cudnn_moves_weights_as_one_on_the_cpu(precision, mode):
    """Keras takes cuDNN's LSTM on a GPU, which XLA cannot compile."""
    batch = batch_of("cudnn")
    expected = moves("recurrent", batch, device="CPU:0", jit_compile=False)
    found = moves("cudnn", batch, precision=precision, jit_compile=mode)

    assert apart(found, expected) < APART[precision]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "mixed_bfloat16"}, "that cuDNN computes in bfloat16; got 'lstm"),
        ({"jit_compile": "step"}, "or create LSTM and GRU with use_cudnn=False"),
    ],
)
def test_what_cudnn_cannot_compute_is_refused(settings, message):
    """By name, with what to do."""
    with pytest.raises(ValueError, match=message):
        moves("cudnn", batch_of("cudnn"), **settings)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_gradients_of_cudnn_in_bfloat16_are_wrong(kind):
    """TensorFlow's own, in eager mode. When this fails, nothing has to be refused any more."""
    inputs = tf.constant(np.random.default_rng(0).normal(size=[32, 12, 16]), tf.float32)
    gradients = {}
    for precision in ("mixed_float16", "mixed_bfloat16"):
        for use_cudnn in ("auto", False):
            keras.utils.set_random_seed(1)
            layer = getattr(keras.layers, kind)(32, use_cudnn=use_cudnn, dtype=precision)
            layer.build(inputs.shape)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(layer(inputs, training=True), tf.float32) ** 2)
            found = tape.gradient(loss, [each.value for each in layer.trainable_variables])
            gradients[precision, use_cudnn] = np.concatenate([np.ravel(each) for each in found])
    wrong = {each: apart(gradients[each, "auto"], gradients[each, False]) for each, _ in gradients}

    assert wrong["mixed_float16"] < APART["mixed_float16"]
    assert not wrong["mixed_bfloat16"] < APART["mixed_bfloat16"]


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_float8_on_the_card(mode):
    """In float8, the weights move as in float32, up to float8's rounding."""
    batch = batch_of("dense")
    expected = moves("dense", batch, device="CPU:0", jit_compile=False)
    found = moves("dense", batch, precision="mixed_float8", jit_compile=mode)

    assert apart(found, expected) < APART["mixed_float8"]


@pytest.mark.parametrize("mode", COMPILE_MODES)
@pytest.mark.parametrize("name", ["convolutions", "recurrent"])
def test_a_skipped_step_moves_nothing_on_the_card(name, mode):
    """L6: after an overflow, every variable has the bits that it had, and the scale is halved."""
    inputs, labels = batch_of(name)
    rule = scaling.DynamicLossScale(2.0**10)
    trainer = trainer_of(name, precision="mixed_float16", jit_compile=mode, loss_scale=rule)
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()
    trainer.train(data, steps=2)
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    before = values_of(variables)
    scaler = access.state(trainer).loss_scaler
    scaler.load_state_dict(scaler.state_dict() | {"loss_scale": 2.0**24})  # too high for float16
    trainer.train(data, steps=3)

    assert trainer.totals.skipped == 1
    assert trainer.loss_scale == 2.0**23
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)


TWO_GPUS = """
import json, sys
import tensorflow as tf
[card, *_] = tf.config.list_physical_devices("GPU")
half = tf.config.LogicalDeviceConfiguration(memory_limit=2000)
tf.config.set_logical_device_configuration(card, [half, half])
sys.path[:0] = ["tests", "tests/gpu_check"]
import test_on_card as card
name, precision, mode = json.loads(sys.argv[1])
strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
batch = card.batch_of(name)
expected = card.moves(name, batch, device="CPU:0", jit_compile=False)
found = card.moves(name, batch, strategy=strategy, precision=precision, jit_compile=mode)
print(json.dumps([strategy.num_replicas_in_sync, card.apart(found, expected)]))
"""


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_gpus_move_weights_as_one_cpu(precision, mode):
    """Two logical GPUs on the card, with half of the batch each, train as one device does."""
    arguments = json.dumps(["recurrent", precision, mode])
    done = subprocess.run(  # the program above
        [sys.executable, "-c", TWO_GPUS, arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    replicas, difference = json.loads(done.stdout.splitlines()[-1])
    assert replicas == 2
    assert difference < APART[precision]
