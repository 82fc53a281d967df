"""Small models, plans and inputs for unit tests of the step's parts."""

import keras
import tensorflow as tf

import scaling
import strategies
from trainer.step import plan_step
from trainer.step.attempt import positions_by_value
from trainer.step.held_back import read_values
from trainer.step.types import GlobalBatchSize, PassInputs

NO_SCALE = scaling.NoLossScale()


class Pair(tf.Module):
    """Two weights, 1 and 2. `first` and `second` are parts for an optimizer each."""

    def __init__(self):
        """Creates the weights."""
        super().__init__()
        self.first, self.second = tf.Module(), tf.Module()
        self.first.weight = tf.Variable(1.0, name="first")
        self.second.weight = tf.Variable(2.0, name="second")


def keras_model():
    """A Keras model with BatchNorm and Dropout between two dense layers."""
    layers = [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    return keras.Sequential([keras.Input([2]), *layers])


def loss_of_pair(model):
    """A loss whose gradients are the batch's mean, and twice that."""

    def compute_loss(batch, training):
        del training
        return (model.first.weight + 2.0 * model.second.weight) * batch

    return compute_loss


def loss_of_keras(model):
    """The model's output, one number per example."""

    def compute_loss(batch, training):
        return model(batch, training=training)[:, 0]

    return compute_loss


def plan_of(model, compute_loss=None, *, strategy=None, rule=NO_SCALE, **arguments):
    """A plan for a model, with SGD at a learning rate of 1 unless another optimizer is given."""
    strategy = strategy or tf.distribute.get_strategy()
    loss_of = loss_of_keras if isinstance(model, keras.Model) else loss_of_pair
    with strategy.scope():
        settings = {"optimizer": keras.optimizers.SGD(1.0)} | arguments
        return plan_step(
            strategy=strategy,
            model=model,
            rule=rule,
            compute_loss=compute_loss or loss_of(model),
            **settings,
        )


def pass_inputs_of(plan, batch, weights=None, *, parts=None, scale=1.0):
    """The inputs of a forward and backward pass over a whole batch.

    Args:
        plan: of the step.
        batch: a tensor of examples.
        weights: of the examples; None weights each by 1.
        parts: number of microbatches of which there are keys; None makes keys of one pass.
        scale: the loss scale.
    """
    weights = tf.ones([batch.shape[0]]) if weights is None else tf.constant(weights)
    leading = [] if parts is None else [parts]
    return PassInputs(
        share=strategies.whole(batch, weights),
        global_batch=GlobalBatchSize(tf.reduce_sum(weights), tf.shape(weights)[0]),
        scale_state=scaling.FixedLossScale(scale).initial_state(),
        values=read_values(plan.held_back, positions_by_value(plan)),
        keys=tf.ones([*leading, len(plan.seeds), 2], tf.int64),
    )
