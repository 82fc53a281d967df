"""LeNet with float16 weights, compared with float32 master weights.

    python examples/lenet_half.py --dataset=digits
    python examples/lenet_half.py --dataset=digits --learning_rate=0.1

In other frameworks it is common to convert the whole model to half precision, including its
weights. This script shows why `Trainer` refuses such a model. Both runs see the same batches,
start from the same weights and scale the loss in the same way, so the gradients are similar. But
a float16 weight has 11 bits of precision: an update of less than 1/4096 of the weight is rounded
away. The table shows how many updates are lost.
"""

import datasets
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from lenet import lenet

import scaling

FLAGS = flags.FLAGS
STEPS = flags.DEFINE_integer("steps", 2000, "Number of steps in each run.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch_size", 64, "Number of images in a batch.", lower_bound=1)
RATE = flags.DEFINE_float("learning_rate", 0.01, "Learning rate of plain SGD.", lower_bound=0.0)


def train(policy, train_data):
    """Returns the model, the mean of its last losses, and the share of updates lost to rounding."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = lenet(datasets.SHAPES[FLAGS.dataset])
    scaler = scaling.LossScaler(scaling.DynamicLossScale())

    # Without XLA, float16 convolutions on a CPU are scalar loops.
    @tf.function(jit_compile=True)
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = mean_loss(model, images, labels)
            scaled, token = scaler.scale(loss)
        weights = model.trainable_variables
        gradients = scaler.unscale(tape.gradient(scaled, [w.value for w in weights]), token)
        apply = scaler.update(scaling.all_finite(gradients))
        lost, updates = tf.constant(0), tf.constant(0)
        for weight, gradient in zip(weights, gradients, strict=True):
            update = tf.where(apply, RATE.value * gradient, 0.0)
            # Computed in float32 and rounded once: the most favorable way.
            moved = tf.cast(tf.cast(weight.value, tf.float32) - update, weight.dtype)
            lost += tf.math.count_nonzero((moved == weight.value) & (update != 0), dtype=tf.int32)
            updates += tf.math.count_nonzero(update, dtype=tf.int32)
            weight.assign(moved)
        return loss, lost, updates

    data = tf.data.Dataset.from_tensor_slices(train_data).shuffle(10_000, seed=0).repeat()
    reports = [step(*batch) for batch in data.batch(BATCH.value).take(STEPS.value)]
    losses, lost, updates = np.array(reports).T
    return model, losses[-20:].mean(), lost.sum() / updates.sum()


def mean_loss(model, images, labels):
    """Returns the mean loss, in float32."""
    logits = tf.cast(model(images, training=True), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


@tf.function(jit_compile=True)
def predict(model, images):
    """Returns the class of each image."""
    return tf.argmax(model(images, training=False), axis=1)


def main(_):
    """Prints one line for each dtype of the weights."""
    train_data, (images, labels) = datasets.load_from_flags()
    print("weights   updates lost   last losses   held-out accuracy")
    for policy, name in (("mixed_float16", "float32"), ("float16", "float16")):
        model, loss, lost = train(policy, train_data)
        accuracy = np.mean(predict(model, images) == labels)
        print(f"{name}   {lost:12.1%}   {loss:11.4f}   {accuracy:17.2%}")


if __name__ == "__main__":
    datasets.define_flags("mnist")
    app.run(main)
