"""AutoGraph rewrites user functions and none of the library's own."""

import keras
import pytest
import tensorflow as tf
from helpers import (
    IMAGES,
    LABELS,
    SmallImages,
    adam,
    assert_close,
    printed,
    trained_small,
)


class Branching(SmallImages):
    """Every method that a user may override contains an `if` that depends on a tensor."""

    def example_weights(self, batch):
        """Returns weights of 1 if there are labels above 0."""
        weights = tf.zeros([8])
        if tf.reduce_max(batch[1]) > 0:
            weights += 1.0
        return weights

    def compute_loss(self, batch, training):
        """Halves the losses if they are large."""
        losses = super().compute_loss(batch, training)
        if tf.reduce_mean(losses) > 100.0:
            losses = losses / 2.0
        return losses, losses

    def build_metrics(self):
        """Returns a mean of the losses."""
        return {"mean": keras.metrics.Mean()}

    def update_metrics(self, batch, aux):
        """Updates the mean unless the losses are very large."""
        del batch
        if tf.reduce_max(aux) < 1000.0:
            self.metrics["mean"].update_state(aux)

    def train_step(self, batch):
        """Halves the pixels if they are large."""
        pixels = batch[0]
        if tf.reduce_sum(pixels) > 1e6:
            pixels /= 2.0
        return super().train_step((pixels, batch[1]))

    def predict_batch(self, batch):
        """Halves the pixels if they are large."""
        if tf.reduce_sum(batch) > 1e6:
            batch = batch / 2.0
        return self.model(batch, training=False)


@pytest.mark.thorough
def test_user_functions_may_branch_on_tensors():
    """Python's `if` may depend on a tensor in every user function."""
    trainer = Branching(optimizer=adam, seed=1, verbose=False)
    summary = trainer.train((IMAGES, LABELS), steps=5, global_batch=8, eval_data=(IMAGES, LABELS))

    assert_close(trained_small(), trainer)
    assert summary.totals.applied == 5
    assert trainer.predict(IMAGES, global_batch=8).shape == (8, 3)


COUNT_REWRITES = """
from trainer import Trainer
import keras, numpy as np, sys, tensorflow as tf
from tensorflow.python.autograph.impl import api

rewritten = []
transform = api.PyToTF.transform_ast
def counted(self, node, context):
    rewritten.append(context.info.namespace["__name__"])
    return transform(self, node, context)
api.PyToTF.transform_ast = counted
Trainer(model=keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]), optimizer="sgd",
        loss_fn="mse", verbose=False).train((np.ones([4, 1]), np.ones([4, 1])), steps=1, global_batch=4)
print(sorted(set(rewritten)))
"""


@pytest.mark.slow
def test_our_own_functions_are_not_rewritten(tmp_path):
    """Without any user function, AutoGraph rewrites no function at all."""
    assert printed(["-c", COUNT_REWRITES], tmp_path, 120).splitlines()[-1] == "[]"
