"""The cost of letting every replica cut its share out of the global batch of one plain iterator.

TensorFlow's own method is `experimental_distribute_dataset`, whose iterator cannot be saved. Both
feed the same training step of a small convolutional network on CIFAR's shapes and are measured in
turn. The output is the median of the ratios by round, with a 95% interval.

    python benchmarks/input_path.py --replicas=2 --batch_size=64
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from turns import Contender, in_turn, ratios_of, with_interval

import strategies

FLAGS = flags.FLAGS
flags.DEFINE_integer("replicas", 2, "Number of replicas, each a logical CPU device.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Examples in a global batch.", lower_bound=1)
flags.DEFINE_integer("rounds", 15, "Number of turns of each method.", lower_bound=1)
flags.DEFINE_float(
    "turn_secs", 0.5, "Target duration of a turn, in seconds; a turn has at least one step."
)


def build_model():
    """Returns three convolutions and a dense layer for 10 classes."""
    return keras.Sequential(
        [
            keras.Input([32, 32, 3]),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def dataset(batch_size):
    """Returns random images in memory, batched to the global batch."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=[1024, 32, 32, 3]).astype(np.float32)
    labels = rng.integers(0, 10, size=[1024])
    rows = tf.data.Dataset.range(1024).shuffle(1024, seed=1).repeat().batch(batch_size)
    return rows.map(lambda row: (tf.gather(images, row), tf.gather(labels, row))).prefetch(2)


def make_contenders(strategy, batch_size):
    """Returns both methods, by name."""
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.SGD(1e-3)
        optimizer.build(model.trainable_variables)
    cross_entropy = keras.ops.sparse_categorical_crossentropy

    def learn(images, labels):
        with tf.GradientTape() as tape:
            losses = cross_entropy(labels, model(images, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / batch_size
        optimizer.apply(tape.gradient(loss, model.trainable_variables))

    def learn_from_share(images, labels):
        context = tf.distribute.get_replica_context()
        replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
        with tf.device("/device:CPU:0"):
            batch = strategies.whole((images, labels), tf.ones([batch_size]))
            share = strategies.take(batch, replica, replicas)
        learn(*share.batch)

    @tf.function
    def sliced(iterator, steps):
        for _ in tf.range(steps):
            strategy.run(learn_from_share, args=next(iterator))

    @tf.function
    def distributed(iterator, steps):
        for _ in tf.range(steps):
            strategy.run(learn, args=next(iterator))

    def contender(function, data):
        iterator = iter(data)
        return Contender(lambda steps: function(iterator, tf.constant(steps)))

    data = dataset(batch_size)
    return {
        "sliced": contender(sliced, data),
        "distributed": contender(distributed, strategy.experimental_distribute_dataset(data)),
    }


def main(_):
    """Measures and prints one line."""
    strategies.split_cpu(FLAGS.replicas)
    devices = [f"CPU:{index}" for index in range(FLAGS.replicas)]
    contenders = make_contenders(strategies.create("mirrored", devices), FLAGS.batch_size)
    turns = in_turn(contenders, FLAGS.rounds, FLAGS.turn_secs)
    print(
        f"{FLAGS.replicas} replicas, global batch {FLAGS.batch_size}: sliced / distributed "
        f"{with_interval(ratios_of(turns, 'sliced', 'distributed'))}, {FLAGS.rounds} rounds"
    )


if __name__ == "__main__":
    app.run(main)
