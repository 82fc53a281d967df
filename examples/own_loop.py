"""A plain `for` loop over halfstep's step: float16, two replicas.    python examples/own_loop.py

To see what halfstep adds:    diff examples/own_loop_bare.py examples/own_loop.py
"""

from trainer.step import TrainState, attempt_step, plan_step  # isort: skip  # import first: it configures TensorFlow

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import scaling
import strategies

# Scans of handwritten digits: 1,437 for training and 360 for testing, in a fixed order.
images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
strategies.split_cpu(2)  # before TensorFlow initializes a device; leave it out on GPUs
data = tf.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
data = data.shuffle(1437, seed=0).batch(64, drop_remainder=True).repeat().take(400)


def compute_loss(batch, training):
    """Returns one loss per scan."""
    logits = tf.cast(model(batch[0], training=training), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)


# A small network and its optimizer.
keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
strategy, rule = strategies.create("mirrored"), scaling.DynamicLossScale(2.0**22)
with strategy.scope():
    hidden = keras.layers.Dense(64, activation="relu")
    model = keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(3e-3)
    run = TrainState(rule)
    parts = {"strategy": strategy, "model": model, "optimizer": optimizer, "rule": rule}
    plan = plan_step(compute_loss=compute_loss, **parts)


@tf.function
def step(batch):
    """Takes one step, or skips it."""
    return attempt_step(batch, plan, run)


for number, batch in enumerate(data, start=1):
    report = step(batch)
    if number % 100 == 0:
        print(f"step {number}  loss {report.loss:.4f}  scale {report.loss_scale:.0f}")

# Evaluate on the held-out scans.
correct = tf.argmax(model(images[1437:]), axis=1) == labels[1437:]
print(f"held-out accuracy {tf.reduce_mean(tf.cast(correct, tf.float32)):.2%}")
