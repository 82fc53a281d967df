"""Whatever a trainer tries, every bit of its variables is put back."""

import contextlib

import access
import keras
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, assert_same_bits, copies, slopes

from trainer.run.put_back import put_back

pytestmark = pytest.mark.sampled


class WithCounter(Linear):
    """Has momentum, a metric, and a variable and a metric of the user's own."""

    def __init__(self, **arguments):
        """Creates the variable and the metric."""
        super().__init__(verbose=False, **arguments)
        with self.strategy.scope():
            self.counter = tf.Variable(0.0)
            self.own_metric = keras.metrics.Sum()

    def build_optimizer(self):
        """SGD with momentum."""
        return keras.optimizers.SGD(0.5, momentum=0.5)

    def build_metrics(self):
        """The mean slope."""
        return {"mean": keras.metrics.Mean()}

    def update_metrics(self, batch, aux):
        """Takes the slopes of a batch."""
        del aux
        self.metrics["mean"].update_state(batch["slope"])


def metric_variables(trainer):
    """The variables of the metrics of training and evaluation, and of the user's own metric."""
    metrics = [metric for each in access.metrics(trainer) for metric in each.values()]
    metrics.append(trainer.own_metric)
    return [variable for metric in metrics for variable in metric.variables]


def metric_bits(trainer):
    """The bytes of every copy of every metric's variables."""
    return [copy.tobytes() for variable in metric_variables(trainer) for copy in copies(variable)]


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("raises", [False, True])
def test_every_variable_is_put_back(mirrored, replicas, raises):
    """Weights, slots, counts, metrics and a user's variables have their bits again, even after an
    error.
    """
    trainer = WithCounter(strategy=mirrored(replicas) if replicas > 1 else "default")
    data = slopes(*[1.0] * replicas)
    trainer.train(data, steps=1, global_batch=replicas)
    for place, variable in enumerate(metric_variables(trainer)):
        variable.assign(tf.ones_like(variable) * place)
    before, totals, metrics = all_copies(trainer), trainer.totals, metric_bits(trainer)
    expected = pytest.raises(tf.errors.AbortedError) if raises else contextlib.nullcontext()
    with expected, put_back(trainer, trainer._parts):
        access.state(trainer).outcomes.assign_add(tf.ones_like(access.state(trainer).outcomes))
        trainer.counter.assign(7.0)
        changed = [*trainer.model.variables, *trainer.optimizer.variables]
        for variable in [*changed, *metric_variables(trainer)]:
            variable.assign(tf.ones_like(variable) * 3)
        assert trainer.weight == 3.0
        if raises:
            raise tf.errors.AbortedError(None, None, "stop")

    assert_same_bits(before, all_copies(trainer))
    assert trainer.totals == totals
    assert len(set(metrics)) == len(metric_variables(trainer)) == 5
    assert metric_bits(trainer) == metrics
    assert float(trainer.counter.numpy()) == 0.0
