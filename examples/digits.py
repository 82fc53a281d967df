"""Handwritten digits in float16: a small convolutional network with dynamic loss scaling.

    python examples/digits.py
    python examples/digits.py --precision=float32
    python examples/digits.py --strategy=mirrored --logical_cpus=2

The data are scikit-learn's 1,797 real scans of 8 x 8 pixels; nothing is downloaded. The loss
scale starts at 2^24, far too high for this network, so the first steps overflow and are skipped.
Watch the scale fall until the gradients fit.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import datasets
import keras
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS


class Digits(Trainer):
    """A convolutional network for 8 x 8 images of ten digits."""

    def build_model(self):
        """Returns two convolutions and a classifier; the trainer sets the precision."""
        return keras.Sequential(
            [
                keras.Input([8, 8, 1]),
                layers.Conv2D(32, 3, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.SpatialDropout2D(0.3),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dropout(0.5),
                layers.Dense(10),
            ]
        )

    def build_optimizer(self):
        """Returns Adam; its schedule counts updates, so a skipped step does not advance it."""
        decay = keras.optimizers.schedules.CosineDecay(2e-3, FLAGS.steps)
        return keras.optimizers.Adam(decay)

    def compute_loss(self, batch, training):
        """Returns one loss per scan, in float32, and the logits."""
        images, labels = batch
        logits = tf.cast(self.model(images, training=training), tf.float32)
        return keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        ), logits

    def build_metrics(self):
        """Returns the accuracy."""
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}

    def update_metrics(self, batch, aux):
        """Updates the accuracy with the labels and the logits."""
        self.metrics["accuracy"].update_state(batch[1], aux)


def main(_):
    """Trains the network and evaluates it on held-out scans."""
    digits = make_trainer(Digits)
    results = run_mode(digits, *datasets.load("digits"))
    if results and digits.is_chief:
        print(f"held-out accuracy {results['accuracy']:.2%}, loss {results['loss']:.4f}")


if __name__ == "__main__":
    define_flags(precision="mixed_float16", loss_scale="dynamic:initial_scale=2^24", steps=600)
    app.run(main)
