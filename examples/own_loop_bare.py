"""own_loop.py in bare TensorFlow: float32, one device.    python examples/own_loop_bare.py

To see what halfstep adds:    diff examples/own_loop_bare.py examples/own_loop.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

# Scans of handwritten digits: 1,437 for training and 360 for testing, in a fixed order.
images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
data = tf.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
data = data.shuffle(1437, seed=0).batch(64, drop_remainder=True).repeat().take(400)


def compute_loss(batch, training):
    """Returns one loss per scan."""
    logits = tf.cast(model(batch[0], training=training), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)


# A small network and its optimizer.
keras.utils.set_random_seed(0)
hidden = keras.layers.Dense(64, activation="relu")
model = keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(3e-3)


@tf.function
def step(batch):
    """Takes one step."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(compute_loss(batch, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


for number, batch in enumerate(data, start=1):
    loss = step(batch)
    if number % 100 == 0:
        print(f"step {number}  loss {loss:.4f}")

# Evaluate on the held-out scans.
correct = tf.argmax(model(images[1437:]), axis=1) == labels[1437:]
print(f"held-out accuracy {tf.reduce_mean(tf.cast(correct, tf.float32)):.2%}")
