"""A perceptron with dropout on MNIST, on a TPU or on whatever there is.

    python examples/mnist.py
    python examples/mnist.py --distribution_strategy=tpu --tpu=local
    python examples/mnist.py --dataset=digits

`auto` takes a TPU where `TPU_NAME` or `--tpu` leads to one (found by `TPUClusterResolver`,
initialised, and handed to a `TPUStrategy`), or else the GPUs, or else the CPU, and says so. On a
TPU, bfloat16 needs no loss scale. MNIST is fetched by `keras.datasets`; scikit-learn's digits,
8 x 8 pixels, are on this machine already.
"""

import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer import Trainer
from trainer.flags import define_flags, make_trainer

FLAGS = flags.FLAGS
flags.DEFINE_enum("dataset", "mnist", ["mnist", "digits"], "What to learn.")


class Perceptron(Trainer):
    """Two hidden layers, dropout after each."""

    def build_model(self):
        """Takes images of any size."""
        hidden = [layers.Dense(256, activation="relu"), layers.Dropout(0.2)]
        again = [layers.Dense(256, activation="relu"), layers.Dropout(0.2)]
        side = 28 if FLAGS.dataset == "mnist" else 8
        return keras.Sequential(
            [keras.Input([side, side]), layers.Flatten(), *hidden, *again, layers.Dense(10)]
        )

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


def load_data():
    """Returns (images, labels) for training and for testing."""
    if FLAGS.dataset == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = (images / 16.0).reshape(-1, 8, 8).astype(np.float32)
        order = np.random.default_rng(0).permutation(len(images))
        return [(images[rows], labels[rows]) for rows in (order[:1500], order[1500:])]
    try:
        train, test = keras.datasets.mnist.load_data()
    except Exception as error:  # noqa: BLE001  # Keras raises no other
        sys.exit(f"MNIST could not be fetched: {error}\nTry --dataset=digits, which is here.")
    return [(images.astype(np.float32) / 255, labels) for images, labels in (train, test)]


def main(_):
    """Trains, and evaluates on images the network has not seen."""
    train_data, test_data = load_data()
    perceptron = make_trainer(Perceptron)
    perceptron.train(train_data, FLAGS.train_steps, global_batch=FLAGS.batch_size)
    results = perceptron.evaluate(test_data, global_batch=FLAGS.batch_size)
    print(f"held-out accuracy {results['accuracy']:.2%}")


if __name__ == "__main__":
    define_flags(distribution_strategy="auto", precision="mixed_bfloat16", batch_size=128)
    app.run(main)
