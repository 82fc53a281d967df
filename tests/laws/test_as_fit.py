"""Random models end with the weights that Keras's `fit` gives them, with the default loss.

Other tests of random models have losses of their own. Here a `Trainer` makes everything that it makes
for a user who names a loss: masks, weights, and the losses that layers add.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, assume, given, settings
from random_models import Recipe, recipes

from trainer import Trainer

# Keras warns about masks that nobody needs.
pytestmark = pytest.mark.filterwarnings("ignore")

PADDED = Recipe(
    ("padded ids", "padded signal"), (("gru", "activity"), ("add_loss",)), seed=1, size=6
)
DENSE = Recipe(("vector", "image"), (("regularized", "batch_norm"), ("activity",)), seed=2, size=7)


def sgd():
    """An optimizer that shows every error of a gradient."""
    return keras.optimizers.SGD(0.0625)


def check(recipe, **arguments):
    """Compares the weights after two steps with those of `fit`."""
    batches = recipe.batches(2)
    joined = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
    target, weight = joined.pop("target"), joined.pop("weight")
    data = tf.data.Dataset.from_tensor_slices((joined, target, weight)).batch(recipe.size)

    theirs = recipe.build()
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    theirs.compile(sgd(), loss, run_eagerly=True)
    theirs.fit(data, shuffle=False, verbose=0)
    ours = Trainer(
        model=recipe.build,
        optimizer=sgd,
        loss_fn="mse",
        jit_compile=False,
        verbose=False,
        **arguments,
    )
    ours.train(data, steps=2)

    for mine, other in zip(ours.model.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6, err_msg=mine.path)


@pytest.mark.parametrize(
    "recipe", [pytest.param(PADDED, marks=pytest.mark.thorough), DENSE], ids=["padded", "dense"]
)
def test_a_model_is_trained_as_by_fit(recipe):
    """Weights of examples, masks, regularizers of weights and of activities, and `add_loss`."""
    check(recipe)


@pytest.mark.slow
@settings(max_examples=60, phases=[Phase.generate])
@given(recipes(plain=True))
def test_random_models_are_trained_as_by_fit(recipe):
    """The same on random models, whose examples do not see each other, without random numbers."""
    check(recipe)


@pytest.mark.slow
@settings(max_examples=20, phases=[Phase.generate])
@given(recipes(plain=True))
def test_random_models_are_trained_as_by_fit_in_shares(mirrored, recipe):
    """The same with three replicas of two microbatches each, none of which is always empty."""
    assume(recipe.size >= 6)
    check(recipe, strategy=mirrored(3), num_microbatches=2)
