"""A perceptron with dropout on MNIST, on a TPU or on whatever there is.

    python examples/mnist.py
    python examples/mnist.py --distribution_strategy=tpu --tpu=local
    python examples/mnist.py --dataset=digits

`auto` takes a TPU where `TPU_NAME` or `--tpu` leads to one (found by `TPUClusterResolver`,
initialised, and handed to a `TPUStrategy`), or else the GPUs, or else the CPU, and says so. On a
TPU, bfloat16 needs no loss scale. MNIST is fetched by `keras.datasets`; scikit-learn's digits,
8 x 8 pixels, are on this machine already.
"""

from trainer import Trainer  # isort: skip  # first: it sets TensorFlow up

import datasets
import keras
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS


class Perceptron(Trainer):
    """Two hidden layers, dropout after each."""

    def build_model(self):
        """Takes images of any size."""
        hidden = [layers.Dense(256, activation="relu"), layers.Dropout(0.2)]
        again = [layers.Dense(256, activation="relu"), layers.Dropout(0.2)]
        first = [keras.Input(datasets.SHAPES[FLAGS.dataset]), layers.Flatten()]
        return keras.Sequential([*first, *hidden, *again, layers.Dense(10)])

    def build_optimizer(self):
        """Adam."""
        return keras.optimizers.Adam(1e-3)

    def compute_loss(self, batch, training):
        """One loss per image, in float32."""
        images, labels = batch
        logits = tf.cast(self.model(images, training=training), tf.float32)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return losses, logits

    def build_metrics(self):
        """Accuracy."""
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}

    def update_metrics(self, batch, aux):
        """Compares the labels with the logits."""
        self.metrics["accuracy"].update_state(batch[1], aux)


def main(_):
    """Trains, and evaluates on images the network has not seen."""
    perceptron = make_trainer(Perceptron)
    results = run_mode(perceptron, *datasets.load_from_flags())
    if results and perceptron.is_chief:
        print(f"held-out accuracy {results['accuracy']:.2%}")


if __name__ == "__main__":
    datasets.define_flags("mnist")
    define_flags(distribution_strategy="auto", precision="mixed_bfloat16", batch_size=128)
    app.run(main)
