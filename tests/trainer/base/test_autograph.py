"""AutoGraph rewrites what a user has written, and nothing of ours."""

import keras
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
    """Everything a user may write has an `if` that depends on a tensor."""

    def example_weights(self, batch):
        """1, if there are labels above 0."""
        weights = tf.zeros([8])
        if tf.reduce_max(batch[1]) > 0:
            weights += 1.0
        return weights

    def compute_loss(self, batch, training):
        """The losses, or their halves."""
        losses = super().compute_loss(batch, training)
        if tf.reduce_mean(losses) > 100.0:
            losses = losses / 2.0
        return losses, losses

    def build_metrics(self):
        """The loss again."""
        return {"mean": keras.metrics.Mean()}

    def update_metrics(self, batch, aux):
        """Counts all but huge ones."""
        del batch
        if tf.reduce_max(aux) < 1000.0:
            self.metrics["mean"].update_state(aux)

    def train_step(self, batch):
        """Looks at the pixels first."""
        pixels = batch[0]
        if tf.reduce_sum(pixels) > 1e6:
            pixels /= 2.0
        return super().train_step((pixels, batch[1]))

    def predict_batch(self, batch):
        """Of pixels that are not too large."""
        if tf.reduce_sum(batch) > 1e6:
            batch = batch / 2.0
        return self.model(batch, training=False)


def test_a_user_may_write_if():
    """Python's `if` may depend on a tensor wherever a user's function is called."""
    trainer = Branching(optimizer=adam, seed=1, verbose=False)
    summary = trainer.train((IMAGES, LABELS), steps=5, global_batch=8, eval_data=(IMAGES, LABELS))

    assert_close(trained_small(), trainer)
    assert summary.totals.applied == 5
    assert trainer.predict(IMAGES, global_batch=8).shape == (8, 3)


OWN = """
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


def test_our_own_functions_are_not_rewritten(tmp_path):
    """With nothing written by a user there is nothing to rewrite."""
    assert printed(["-c", OWN], tmp_path, 120).splitlines()[-1] == "[]"
