"""LeNet with weights in float16 too, beside the same with float32 master weights.

    python examples/lenet_half.py --dataset=digits
    python examples/lenet_half.py --dataset=digits --learning_rate=0.1

To turn the whole model into half precision, weights and all, is a habit from elsewhere. `Trainer`
refuses such a model, and this is why. Both runs see the same batches, start from the same weights
and scale the loss in the same way, so the gradients are alike. But a float16 weight has 11 bits: an
update of less than 1/4096 of it is rounded away. The table says how many were.
"""

import datasets
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from lenet import lenet

import scaling

FLAGS = flags.FLAGS
STEPS = flags.DEFINE_integer("steps", 2000, "Steps of each run.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch_size", 64, "Images in a batch.", lower_bound=1)
RATE = flags.DEFINE_float("learning_rate", 0.01, "Of plain SGD.", lower_bound=0.0)


def train(policy, train_data):
    """Returns the model, its last loss, and which part of the updates did not move their weight."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = lenet(datasets.SHAPES[FLAGS.dataset])
    scaler = scaling.LossScaler(scaling.DynamicLossScale())

    # XLA: without it a CPU takes float16 convolutions one number at a time.
    @tf.function(jit_compile=True)
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(model, images, labels)
            scaled, token = scaler.scale(loss)
        weights = model.trainable_variables
        gradients = scaler.unscale(tape.gradient(scaled, [w.value for w in weights]), token)
        applies = scaler.update(scaling.all_finite(gradients))
        lost, updates = tf.constant(0), tf.constant(0)
        for weight, gradient in zip(weights, gradients, strict=True):
            update = tf.where(applies, RATE.value * gradient, 0.0)
            # In float32, and rounded once: the kindest way there is.
            moved = tf.cast(tf.cast(weight.value, tf.float32) - update, weight.dtype)
            lost += tf.math.count_nonzero((moved == weight.value) & (update != 0), dtype=tf.int32)
            updates += tf.math.count_nonzero(update, dtype=tf.int32)
            weight.assign(moved)
        return loss, lost, updates

    data = tf.data.Dataset.from_tensor_slices(train_data).shuffle(10_000, seed=0).repeat()
    reports = [step(*batch) for batch in data.batch(BATCH.value).take(STEPS.value)]
    losses, lost, updates = np.array(reports).T
    return model, losses[-20:].mean(), lost.sum() / updates.sum()


def loss_of(model, images, labels):
    """Returns the mean loss, in float32."""
    logits = tf.cast(model(images, training=True), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


@tf.function(jit_compile=True)
def predicted(model, images):
    """Returns the class of each image."""
    return tf.argmax(model(images, training=False), axis=1)


def main(_):
    """Prints a line for each way to keep the weights."""
    train_data, (images, labels) = datasets.load_from_flags()
    print("weights   updates lost   last losses   held-out accuracy")
    for policy, name in (("mixed_float16", "float32"), ("float16", "float16")):
        model, loss, lost = train(policy, train_data)
        right = np.mean(predicted(model, images) == labels)
        print(f"{name}   {lost:12.1%}   {loss:11.4f}   {right:17.2%}")


if __name__ == "__main__":
    datasets.define_flags("mnist")
    app.run(main)
