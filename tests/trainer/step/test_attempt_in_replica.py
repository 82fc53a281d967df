"""The step as a TPU gets it: one program, in which all replicas reach all collectives."""

import dataclasses

import access
import fake_tpu
import keras
import numpy as np
import pytest
import tensorflow as tf

import strategies
from trainer import Trainer, Updates

pytestmark = pytest.mark.sampled

BATCH = 16


class Noisy(Trainer):
    """BatchNorm, Dropout, momentum, a moving average and a metric."""

    def build_model(self):
        """Dense layers with BatchNorm and Dropout."""
        return keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )

    def build_optimizer(self):
        """SGD with momentum."""
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def compute_loss(self, batch, training):
        """Squared errors."""
        x, y = batch
        return tf.square(tf.cast(self.model(x, training=training), tf.float32) - y)[:, 0]


def data():
    """Batches with static shapes."""
    x = np.random.default_rng(0).normal(size=[BATCH, 6]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    return dataset.batch(BATCH, drop_remainder=True)


def traced(**arguments):
    """The graph of the step that `train` would run."""
    trainer = Noisy(strategy=fake_tpu.strategy(), jit_compile=False, seed=1, **arguments)
    dataset = data()
    access.start(trainer, next(iter(dataset)))
    loop = access.steps(trainer).python_function
    assert loop.args[0].__wrapped__.__func__ is Noisy.train_step is Trainer.train_step
    return tf.function(trainer.train_step).get_concrete_function(dataset.element_spec).graph


@pytest.mark.parametrize(
    "arguments",
    [
        {"precision": "mixed_bfloat16"},
        {"precision": "mixed_float16", "updates": Updates(ema_momentum=0.9, global_clipnorm=1.0)},
        {"precision": "mixed_float16", "num_microbatches": 2},
    ],
)
def test_a_step_is_one_program(arguments):
    """A step is one program from the share of the batch to the update, and every replica reaches
    every collective.
    """
    graph = traced(**arguments)

    assert fake_tpu.count(graph, "TPUReplicateMetadata") == 1
    assert fake_tpu.count(graph, "CrossReplicaSum") > 0
    assert fake_tpu.divergent_conditions(graph) == []


@pytest.mark.thorough
def test_deciding_outside_the_replicas_makes_two_programs(monkeypatch):
    """A decision in cross-replica context, as on other strategies, makes two programs, and every
    gradient would leave the first.
    """
    real = strategies.capabilities

    def decided_outside(strategy):
        return dataclasses.replace(real(strategy), decides_in_replica=False)

    monkeypatch.setattr(strategies, "capabilities", decided_outside)
    assert fake_tpu.count(traced(precision="mixed_bfloat16"), "TPUReplicateMetadata") == 2


def test_a_replica_that_decides_alone_is_noticed():
    """The check finds a collective behind a replica's own decision, which is what Keras's loss
    scaling does.
    """
    strategy = fake_tpu.strategy(2)

    @tf.function
    def step():
        def replica():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            mine = tf.cast(index, tf.float32)
            return tf.cond(mine > 0, lambda: strategies.sum_gradients(mine), lambda: mine)

        return strategy.run(replica)

    graph = step.get_concrete_function().graph
    assert len(fake_tpu.divergent_conditions(graph)) == 1
