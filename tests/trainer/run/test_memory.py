"""The estimate of the memory that a replica needs during a step."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer
from trainer.run.memory import Memory, activation_bytes, memory_of

X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
DATA = (X, (X[:, 0] > 0).astype(np.int32))


def classifier(**arguments):
    """A small network with BatchNorm, dropout and Adam."""

    def model():
        layers = [
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
        ]
        return keras.Sequential([keras.Input([1]), *layers, keras.layers.Dense(2)])

    return Trainer(
        model=model,
        optimizer=lambda: keras.optimizers.Adam(0.05),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        seed=3,
        **{"verbose": False} | arguments,
    )


@pytest.mark.slow
def test_the_memory_is_counted():
    """Memory counts weights and gradients of 4 bytes, Adam's two slots and two counters, and
    activations.
    """
    found = classifier().dry_run(DATA, global_batch=8)
    trainable, fixed = 1 * 16 + 16 + 2 * 16 + 16 * 2 + 2, 2 * 16

    assert found.memory.weights == 4 * (trainable + fixed)
    assert found.memory.gradients == 4 * trainable
    assert 0 <= found.memory.slots - 2 * 4 * trainable <= 16
    # For 8 examples: at least the outputs of the layers, and at most ten times as much.
    outputs = 4 * 8 * (16 + 16 + 2)
    assert outputs <= found.memory.activations <= 10 * outputs
    halved = classifier(num_microbatches=2).dry_run(DATA, global_batch=8)
    assert outputs / 2 <= halved.memory.activations < found.memory.activations


class Dense(Trainer):
    """One dense layer of 3 inputs and 5 outputs, whose loss is the sum of its outputs."""

    def build_model(self):
        """15 weights, and no bias."""
        layer = keras.layers.Dense(5, use_bias=False)
        return keras.Sequential([keras.Input([3]), layer])

    def build_optimizer(self):
        """SGD with momentum: one slot for each weight."""
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def compute_loss(self, batch, training):
        """One sum for each example."""
        return tf.reduce_sum(self.model(batch, training=training), axis=1)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_memory_of_a_dense_layer(mirrored, replicas, num_microbatches):
    """Computed by hand: 4 bytes for each of 15 weights, gradients and slots; and for each example of a
    microbatch, 5 outputs and one sum.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Dense(strategy=strategy, num_microbatches=num_microbatches, verbose=False)
    batch = tf.ones([8, 3])
    access.start(trainer, batch)
    found = memory_of(trainer, batch)
    examples = 8 // (replicas * num_microbatches)

    assert (found.weights, found.gradients) == (4 * 15, 4 * 15)
    # The optimizer also has its step count (8 bytes at most) and its learning rate (4 bytes).
    assert 4 * 15 < found.slots <= 4 * 15 + 12
    assert found.activations == activation_bytes(trainer, batch) == 4 * examples * (5 + 1)


def test_a_last_microbatch_is_rounded_up():
    """With 7 examples in 2 microbatches, the larger one has 4."""
    trainer = Dense(num_microbatches=2, verbose=False)
    access.start(trainer, tf.ones([8, 3]))

    assert activation_bytes(trainer, tf.ones([7, 3])) == 4 * 4 * (5 + 1)


def test_half_precision_halves_activations():
    """Activations in float16 have 2 bytes; casts of inputs and weights are counted as well."""
    trainer = Dense(precision="mixed_float16", verbose=False)
    access.start(trainer, tf.ones([8, 3]))
    casts = 2 * (8 * 3 + 15)

    assert activation_bytes(trainer, tf.ones([8, 3])) == casts + 2 * 8 * (5 + 1)


def test_the_text_of_an_estimate():
    """The sum comes first, then its parts."""
    assert str(Memory(1000, 2000, 1000, 500)) == (
        "about 4.5 kB a replica: weights 1.0 kB, slots 2.0 kB, gradients 1.0 kB, activations 500 B"
    )


@pytest.mark.parametrize("cell", [keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU])
def test_a_loop_counts_as_often_as_it_runs(cell):
    """The estimate is about that of the same layer without a loop, also inside a function."""

    def memory(**settings):
        class Recurrent(Dense):
            def build_model(self):
                layers = [keras.layers.Dense(4), cell(16, **settings)]
                return keras.Sequential([keras.Input([12, 3]), *layers])

            def compute_loss(self, batch, training):
                return tf.function(super().compute_loss)(batch, training)

        trainer = Recurrent(verbose=False, jit_compile=False)
        batch = tf.ones([8, 12, 3])
        access.start(trainer, batch)
        return activation_bytes(trainer, batch)

    assert memory() == pytest.approx(memory(unroll=True), rel=0.1)


def test_a_loop_without_lists_counts_once():
    """How often it runs is not known."""

    class Looping(Dense):
        def compute_loss(self, batch, training):
            outputs = self.model(batch, training=training)
            turns = tf.cast(tf.reduce_sum(batch), tf.int32)
            _, found = tf.while_loop(
                lambda index, _: index < turns,
                lambda index, value: (index + 1, value * 2.0),
                (0, outputs),
            )
            return tf.reduce_sum(found, axis=1)

    trainer = Looping(verbose=False, jit_compile=False)
    batch = tf.ones([8, 3])
    access.start(trainer, batch)
    # The matrix product, one product in the loop, and a sum; and the number of turns.
    assert activation_bytes(trainer, batch) == 4 * 8 * (5 + 5 + 1) + 4


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_quantized_weights_are_weights():
    """Those of LoRA on int8 are nearly all in bytes; seeds and counters are none."""

    class Quantized(Dense):
        def build_model(self):
            model = keras.Sequential([keras.Input([32]), keras.layers.Dense(64, use_bias=False)])
            model.layers[0].enable_lora(2)
            model.layers[0].quantize("int8")
            return model

    trainer = Quantized(verbose=False, jit_compile=False)
    batch = tf.ones([8, 32])
    access.start(trainer, batch)
    floats = 4 * (32 * 2 + 2 * 64 + 64)  # the adapter, and a scale for each column
    assert memory_of(trainer, batch).weights == 32 * 64 + floats
