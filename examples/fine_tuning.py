"""Fine-tuning in two phases, in float16: first a new head on a frozen base, then all of it.

    python examples/fine_tuning.py
    python examples/fine_tuning.py --strategy=mirrored --logical_cpus=2
    python examples/fine_tuning.py --model_dir=runs/tuned

The base learns the digits 0 to 4 from many scans; the tuned model has 10 scans of each digit from
5 to 9. Between two calls of `train`, layers are unfrozen and the learning rate is changed, and the
optimizer goes on. Steps count from the beginning of the run, so a run that was stopped resumes in
its phase.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer

FLAGS = flags.FLAGS
HALF, SHOTS = 5, 10


def base():
    """Returns a convolutional network without a head."""
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ],
        name="base",
    )


def classifier(trained_base=None):
    """Returns a base with a head; a trained base is frozen, and keeps its BatchNorm statistics."""
    images, features = keras.Input([8, 8, 1]), base()
    if trained_base is None:
        return keras.Model(images, layers.Dense(HALF)(features(images)))
    features.set_weights(trained_base)
    features.trainable = False
    # As in Keras's guide: the statistics also stay when the base is unfrozen.
    return keras.Model(images, layers.Dense(HALF)(features(images, training=False)))


def trainer_of(model, model_dir=None):
    """Returns a trainer with Adam."""
    return make_trainer(
        Trainer,
        model=model,
        optimizer=lambda: keras.optimizers.Adam(3e-3),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        model_dir=model_dir,
    )


def few(images, labels):
    """Returns the first SHOTS scans of each digit."""
    rows = np.concatenate([np.flatnonzero(labels == digit)[:SHOTS] for digit in range(HALF)])
    return images[rows], labels[rows]


def main(_):
    """Trains the base, then the head, then everything, and prints the held-out accuracies."""
    from datasets import load

    (images, labels), (held_out, answers) = load("digits")
    old, new, asked = labels < HALF, labels >= HALF, answers >= HALF
    test = held_out[asked], answers[asked] - HALF
    phase = FLAGS.steps // 2

    first = trainer_of(classifier)
    first.train((images[old], labels[old]), phase, global_batch=FLAGS.global_batch)
    weights = first.model.get_layer("base").get_weights()

    tuner = trainer_of(lambda: classifier(weights), FLAGS.model_dir)
    data = few(images[new], labels[new] - HALF)
    tuner.train(data, phase, global_batch=FLAGS.global_batch)
    before = ""
    if tuner.totals.attempted == phase:  # a resumed run may be in its second phase
        frozen = tuner.evaluate(test, global_batch=FLAGS.global_batch)
        before = f"{frozen['accuracy']:.1%} frozen, "
    tuner.model.get_layer("base").trainable = True
    tuner.optimizer.learning_rate = 3e-4
    tuner.train(data, FLAGS.steps, global_batch=FLAGS.global_batch)
    tuned = tuner.evaluate(test, global_batch=FLAGS.global_batch)
    print(f"held out: {before}{tuned['accuracy']:.1%} fine-tuned")


if __name__ == "__main__":
    define_flags(precision="mixed_float16", steps=400, global_batch=50)
    app.run(main)
