"""The contenders: `Trainer`, the train function of `model.fit`, and a hand-written loop.

All use Adam and repeat one batch from a prefetched dataset.
"""

from trainer import Trainer  # isort: skip  # first, because it configures TensorFlow

import contextlib

import keras
import tensorflow as tf
from models import loss_of
from turns import Contender

LOOP = 20  # steps per call, for contenders that loop in the graph


def data_of(work):
    """Returns a dataset that repeats the batch of `work`."""
    return tf.data.Dataset.from_tensors(work.batch).repeat().prefetch(2)


def adam():
    """Returns the optimizer of all contenders."""
    return keras.optimizers.Adam(1e-4)


def trainer_of(work, policy, **settings):
    """Returns a started trainer and its data."""
    settings = {"steps_per_loop": LOOP, "verbose": False} | settings
    trainer = Trainer(
        model=work.build, optimizer=adam, loss_fn=loss_of, precision=policy, **settings
    )
    data = data_of(work)
    trainer._start(next(iter(data)))  # noqa: SLF001  # as `train` does
    return trainer, data


def ours(work, policy, loop=LOOP, **settings):
    """Returns the inner loop of a trainer, whose report is read once per `loop` steps."""
    trainer, data = trainer_of(work, policy, **settings)
    iterator, run_steps = iter(data), trainer._parts.run_steps  # noqa: SLF001

    def take(steps):
        for done in range(0, steps, loop):
            report, _ = run_steps(iterator, tf.constant(min(loop, steps - done)))
            report.loss.numpy()

    return Contender(take)


def fit(work, policy, **settings):
    """Returns the train function of `model.fit`."""
    with dtype_policy(policy):
        network = work.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(adam(), loss, **settings)
    network.make_train_function()
    iterator, train = iter(data_of(work)), network.train_function
    per_call = settings.get("steps_per_execution", 1)

    def take(steps):
        for _ in range(steps // per_call):
            logs = train(iterator)
        float(logs["loss"])

    return Contender(take, multiple=per_call)


def by_hand(work, policy, loop=LOOP, *, jit_compile=False, microbatches=1, strategy=None):
    """Returns the shortest possible loop, without loss scale, verdict or report."""
    strategy = strategy or tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    with strategy.scope(), dtype_policy(policy):
        network, optimizer = work.build(), adam()
        weights = network.trainable_variables
        optimizer.build(weights)
    data = data_of(work)
    if replicas > 1:
        data = data.unbatch().batch(len(work.batch[0]), drop_remainder=True)
        data = strategy.experimental_distribute_dataset(data)
    iterator = iter(data)

    @tf.function(jit_compile=jit_compile)
    def gradients_of(inputs, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, network(inputs, training=True)))
            loss /= replicas * microbatches
        return loss, tape.gradient(loss, weights)

    def step(inputs, labels):
        parts = zip(tf.split(inputs, microbatches), tf.split(labels, microbatches), strict=True)
        found = [gradients_of(*part) for part in parts]
        sums = [tf.add_n(each) for each in zip(*(gradients for _, gradients in found), strict=True)]
        optimizer.apply(sums, weights)
        return tf.add_n([loss for loss, _ in found])

    @tf.function
    def run_steps(steps):
        last = tf.constant(0.0)
        for _ in tf.range(steps):
            losses = strategy.run(step, args=next(iterator))
            last = strategy.reduce("sum", losses, axis=None)
        return last

    def take(steps):
        for done in range(0, steps, loop):
            run_steps(tf.constant(min(loop, steps - done))).numpy()

    return Contender(take)


@contextlib.contextmanager
def dtype_policy(policy):
    """Sets the Keras dtype policy for the block."""
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")
