"""A perceptron with dropout on MNIST, on a TPU or the best available device.

    python examples/mnist.py
    python examples/mnist.py --strategy=tpu --tpu=local
    python examples/mnist.py --dataset=digits

`auto` uses the TPU that `TPU_NAME` or `--tpu` names (found by `TPUClusterResolver`, initialized,
and passed to a `TPUStrategy`), or else the GPUs, or else the CPU, and prints its choice. On a
TPU, bfloat16 needs no loss scale. `keras.datasets` downloads MNIST; the digits of 8 x 8 pixels
come with scikit-learn.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import datasets
import keras
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS


class Perceptron(Trainer):
    """A perceptron with two hidden layers, each followed by dropout."""

    def build_model(self):
        """Returns the network for images of any size."""
        first = [layers.Dense(256, activation="relu"), layers.Dropout(0.2)]
        second = [layers.Dense(256, activation="relu"), layers.Dropout(0.2)]
        inputs = [keras.Input(datasets.SHAPES[FLAGS.dataset]), layers.Flatten()]
        return keras.Sequential([*inputs, *first, *second, layers.Dense(10)])

    def build_optimizer(self):
        """Returns Adam."""
        return keras.optimizers.Adam(1e-3)

    def compute_loss(self, batch, training):
        """Returns one loss per image, in float32, and the logits."""
        images, labels = batch
        logits = tf.cast(self.model(images, training=training), tf.float32)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return losses, logits

    def build_metrics(self):
        """Returns the accuracy."""
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}

    def update_metrics(self, batch, aux):
        """Updates the accuracy with the labels and the logits."""
        self.metrics["accuracy"].update_state(batch[1], aux)


def main(_):
    """Trains the network and evaluates it on held-out images."""
    perceptron = make_trainer(Perceptron)
    results = run_mode(perceptron, *datasets.load_from_flags())
    if results and perceptron.is_chief:
        print(f"held-out accuracy {results['accuracy']:.2%}")


if __name__ == "__main__":
    datasets.define_flags("mnist")
    define_flags(strategy="auto", precision="mixed_bfloat16", global_batch=128)
    app.run(main)
