"""Compares optimizers with Keras's own updates from whole batches."""

import functools

import keras
import numpy as np
import tensorflow as tf
from catalogue.models import EXAMPLES, made_by
from helpers import copies

import scaling
from trainer.step import TrainState, attempt_step, plan_step

STEPS = 3
RULE = scaling.NoLossScale()


def model_of_words():
    """An embedding, whose gradients are sparse, and two Dense layers, whose gradients are not."""
    layers = keras.layers

    def fixed(seed):
        return keras.initializers.RandomNormal(stddev=0.5, seed=seed)

    inputs = keras.Input([3], dtype="int32")
    embedded = layers.Flatten()(layers.Embedding(9, 4, embeddings_initializer=fixed(1))(inputs))
    hidden = layers.Dense(5, activation="tanh", kernel_initializer=fixed(2))(embedded)
    return keras.Model(inputs, layers.Dense(2, kernel_initializer=fixed(3))(hidden))


def batches_of(seed):
    """Batches of ids, some repeated, and targets."""
    random = np.random.default_rng(seed)
    for _ in range(STEPS):
        ids = random.integers(8, size=[EXAMPLES, 3]).astype(np.int32)
        yield tf.constant(ids), tf.constant(random.standard_normal([EXAMPLES, 2]), tf.float32)


def losses(model, batch, training):
    """The mean square of each example's errors."""
    return tf.reduce_mean((model(batch[0], training=training) - batch[1]) ** 2, -1)


class OwnOptimizer(keras.optimizers.Optimizer):
    """An optimizer of one's own: moves against the sign."""

    def update_step(self, gradient, variable, learning_rate):
        """One update."""
        self.assign_sub(variable, learning_rate * tf.sign(gradient))


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of one's own."""

    def __call__(self, step):
        """Falls with the number of updates."""
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


def optimizer_of(case, model):
    """The optimizer of a case, or SGD with its schedule."""
    del model
    if issubclass(case.cls, keras.optimizers.schedules.LearningRateSchedule):
        return keras.optimizers.SGD(made_by(case))
    make = case.row.make or case.cls
    return make(learning_rate=0.01, **case.arguments)


def check_optimizer(case, configuration, strategy):
    """Three steps move weights and slots to where Keras's own `apply` moves them, and a skipped
    step before them moves nothing.

    Args:
        case: the optimizer or schedule.
        configuration: its precision is not used: an optimizer sees float32 gradients only.
        strategy: of the configuration's number of replicas.
    """
    make, seed = functools.partial(optimizer_of, case), case.seed
    with strategy.scope():
        model = model_of_words()
        optimizer = make(model)
        run = TrainState(RULE, seed=1)
        plan = plan_step(
            strategy=strategy,
            model=model,
            optimizer=optimizer,
            compute_loss=lambda batch, training: losses(model, batch, training),
            rule=RULE,
            num_microbatches=configuration.num_microbatches,
            jit_compile=configuration.jit_compile,
        )
    step = tf.function(lambda batch: attempt_step(batch, plan, run), autograph=False)
    plain = model_of_words()
    theirs = make(plain)
    theirs.build(plain.trainable_variables)
    ours = [*model.variables, *optimizer.variables]
    before = [[copy.copy() for copy in copies(v)] for v in ours]
    ids, targets = next(batches_of(seed))
    assert not step((ids, targets * np.inf)).grads_finite
    for variable, values in zip(ours, before, strict=True):
        for old, new in zip(values, copies(variable), strict=True):
            assert old.tobytes() == new.tobytes(), f"{variable.path} moved in a skipped step"

    for batch in batches_of(seed):
        assert step(batch).grads_finite
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(plain, batch, training=True))
        # Dense: Keras squares the parts of a sparse gradient whose ids repeat, and not their sum.
        gradients = tape.gradient(loss, plain.trainable_variables)
        dense = [tf.convert_to_tensor(each) for each in gradients]
        theirs.apply(dense, plain.trainable_variables)
    for mine, expected in zip(ours, [*plain.variables, *theirs.variables], strict=True):
        value = np.asarray(expected.value)
        for replica, copy in enumerate(copies(mine)):
            np.testing.assert_allclose(
                copy,
                value,
                rtol=1e-4,
                atol=1e-5 * max(1e-3, float(np.abs(value).max(initial=0.0))),
                err_msg=f"{expected.path} on replica {replica}",
            )
