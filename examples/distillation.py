"""Distillation in float16: a small network learns from the outputs of a large one.

    python examples/distillation.py
    python examples/distillation.py --strategy=mirrored --logical_cpus=2

The teacher has seen every label. A student has 100 labels; a second one has these and the teacher's
logits for all images. The teacher never changes, so its logits are computed once, by `predict`,
and become part of the data.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer

FLAGS = flags.FLAGS
TEMPERATURE, KNOWN, PIXELS, CLASSES = 2.0, 100, 64, 10


def network(*widths):
    """Returns a perceptron; the trainer sets the precision."""
    hidden = [layers.Dense(width, activation="relu") for width in widths]
    return keras.Sequential([keras.Input([PIXELS]), *hidden, layers.Dense(CLASSES)])


def distillation_losses(logits, teacher_logits, labels, known):
    """Returns one loss per example (Hinton et al., arXiv:1503.02531).

    Args:
        logits, teacher_logits: shape (examples, classes), float32.
        labels: shape (examples,).
        known: shape (examples,), 1 where the label counts and 0 where only the teacher does.
    """
    soft = tf.nn.softmax(teacher_logits / TEMPERATURE)
    softened = tf.nn.softmax_cross_entropy_with_logits(soft, logits / TEMPERATURE)
    hard = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return TEMPERATURE**2 * softened + known * hard


class Student(Trainer):
    """Learns from labels and a teacher."""

    def compute_loss(self, batch, training):
        """Returns one loss per example."""
        logits = tf.cast(self.model(batch["image"], training=training), tf.float32)
        return distillation_losses(logits, batch["teacher"], batch["label"], batch["known"])


def trained(trainer_class, widths, data, name, **arguments):
    """Returns the trainer of a network of these widths, after --steps steps."""
    trainer = make_trainer(
        trainer_class,
        model=lambda: network(*widths),
        optimizer=lambda: keras.optimizers.Adam(1e-3),
        model_dir=FLAGS.model_dir and f"{FLAGS.model_dir}/{name}",
        **arguments,
    )
    trainer.train(data, FLAGS.steps, global_batch=FLAGS.global_batch)
    return trainer


def main(_):
    """Trains the teacher and both students, and prints their held-out accuracies."""
    from datasets import load

    (images, labels), (held_out, answers) = load("digits")
    images, held_out = images.reshape(-1, PIXELS), held_out.reshape(-1, PIXELS)
    loss = {"loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    teacher = trained(Trainer, [512, 512], (images, labels), "teacher", **loss)
    alone = trained(Trainer, [16], (images[:KNOWN], labels[:KNOWN]), "alone", **loss)
    data = {
        "image": images,
        "label": labels,
        "known": (np.arange(len(images)) < KNOWN).astype(np.float32),
        "teacher": teacher.predict(images, global_batch=FLAGS.global_batch).astype(np.float32),
    }
    student = trained(Student, [16], data, "student")
    right = [
        np.mean(np.argmax(keras.ops.convert_to_numpy(each.model(held_out)), axis=1) == answers)
        for each in (teacher, alone, student)
    ]
    print("held out: teacher {:.1%}, student alone {:.1%}, taught {:.1%}".format(*right))


if __name__ == "__main__":
    define_flags(precision="mixed_float16", steps=500, global_batch=50)
    app.run(main)
