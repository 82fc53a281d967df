"""The estimate of the memory that a replica needs during a step."""

import access
import keras
import pytest
import tensorflow as tf

from trainer import Trainer
from trainer.run.memory import activation_bytes, memory_of


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
