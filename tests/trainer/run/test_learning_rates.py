"""The learning rates in the log are those that the updates used."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import STEEP, Linear, overflowing, slopes
from plans import Pair, plan_of

from trainer.run.learning_rates import learning_rates


def falling():
    """A schedule that falls by 0.1 with every update."""
    return keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)


@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_the_logged_rate_is_that_of_the_last_update(mirrored, replicas):
    """With plain SGD and a gradient of 1, the weight falls by the logged rates; a rate that a hook
    assigns is logged with the steps that used it.
    """

    class Scheduled(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(falling() if replicas == 1 else 0.5)

        def on_loop_end(self, step):
            if replicas == 3 and step == 2:
                self.optimizer.learning_rate = 0.25

    strategy = "default" if replicas == 1 else mirrored(replicas)
    trainer = Scheduled(strategy=strategy, log_interval=1, verbose=False)
    history = trainer.train(slopes(1.0, 1.0, 1.0), steps=3, global_batch=3).history
    rates = [1.0, 0.9, 0.8] if replicas == 1 else [0.5, 0.5, 0.25]

    np.testing.assert_allclose(history["learning_rate"], rates, rtol=1e-6)
    assert trainer.weight == pytest.approx(1 - sum(rates), abs=1e-6)


def test_a_skipped_step_does_not_move_the_schedule():
    """A schedule counts updates: after three skipped steps the rate is still the first one."""
    trainer = overflowing(log_interval=1, optimizer=None, verbose=False)
    trainer.build_optimizer = lambda: keras.optimizers.SGD(falling())
    history = trainer.train(STEEP, steps=6, global_batch=4).history

    np.testing.assert_allclose(history["learning_rate"], [1, 1, 1, 1, 0.9, 0.8], rtol=1e-6)


def test_several_optimizers_have_a_rate_each():
    """Each optimizer's rate has its name; the parts of a `MultiOptimizer` have their positions."""
    optimizers = {"first": keras.optimizers.SGD(0.5), "second": keras.optimizers.Adam(falling())}
    plan = plan_of(Pair(), optimizer=optimizers)
    assert learning_rates(plan) == {"learning_rate/first": 0.5, "learning_rate/second": 1.0}

    rate = tf.Variable(0.125)
    plan = plan_of(Pair(), optimizer=keras.optimizers.SGD(lambda: rate))
    assert learning_rates(plan) == {"learning_rate": 0.125}


class Harmonic(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as people write it: it computes with floats, and cannot be saved."""

    def __call__(self, step):
        """Returns 1, 1/2, 1/3 ..."""
        return 1.0 / (step + 1.0)


def test_a_schedule_may_compute_with_floats():
    """It gets the variable that counts updates, as in an update, and needs no `get_config`."""
    trainer = Linear(log_interval=1, verbose=False)
    trainer.build_optimizer = lambda: keras.optimizers.SGD(Harmonic())
    summary = trainer.train(slopes(1.0), steps=3, global_batch=1)

    np.testing.assert_allclose(summary.history["learning_rate"], [1.0, 1 / 2, 1 / 3], rtol=1e-6)
    assert access.plan(trainer).has_schedule
