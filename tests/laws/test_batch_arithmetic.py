"""L8: the step does not depend on how the batch is divided."""

import keras
import numpy as np
import pytest
from helpers import Linear, attempt

from trainer import Updates

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(1, 3)]


class AddMean(keras.layers.Layer):
    """Adds a tenth of its inputs' mean square to the losses."""

    def call(self, inputs):
        """Returns its inputs."""
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class Everything(Linear):
    """An embedding with repeated ids, kernel L2, an activity regularizer, `add_loss`, weights."""

    def build_model(self):
        """Takes ids and features, returns one number."""
        ids = keras.Input([3], dtype="int32", name="ids")
        features = keras.Input([4], name="features")
        embedded = keras.layers.Embedding(5, 4)(ids)
        joined = keras.layers.Concatenate()([keras.layers.Flatten()(embedded), features])
        hidden = keras.layers.Dense(
            6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1)
        )(joined)
        hidden = AddMean()(hidden)
        outputs = keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.01))(hidden)
        return keras.Model({"ids": ids, "features": features}, outputs)

    def build_optimizer(self):
        """SGD, because Adam would hide a constant factor."""
        return keras.optimizers.SGD(0.1)

    def compute_loss(self, batch, training):
        """Squared error. It does not touch `model.losses`."""
        inputs = {"ids": batch["ids"], "features": batch["features"]}
        return (self.model(inputs, training=training)[:, 0] - batch["target"]) ** 2

    def example_weights(self, batch):
        """The weights in the batch, zeros included."""
        return batch["weight"]


def batches(sizes):
    """Random batches of the given sizes."""
    random = np.random.default_rng(1)
    return [
        {
            "ids": random.integers(0, 5, [size, 3]).astype(np.int32),
            "features": random.standard_normal([size, 4]).astype(np.float32),
            "target": random.standard_normal(size).astype(np.float32),
            "weight": random.choice([0.0, 0.5, 1.0, 3.0], size).astype(np.float32)
            + (np.arange(size) == 0),
        }
        for size in sizes
    ]


# Batches that divide evenly, with a ragged last share, with empty last shares, and one example.
SIZES = [24, 23, 13, 3, 1]


def trained(**arguments):
    """Runs a step on each batch; returns the reports and the weights after each step."""
    trainer = Everything(seed=3, **arguments)
    results = []
    for report in attempt(trainer, batches(SIZES)):
        weights = [variable.numpy() for variable in trainer.model.trainable_variables]
        results.append((report, weights))
    return results


@pytest.fixture(scope="module")
def whole():
    """The result of one device with the whole batch at once."""
    return trained()


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_division_changes_nothing(mirrored, whole, replicas, num_microbatches):
    """L8: R replicas x M microbatches x ragged, empty and single-example batches reach the same SGD
    weights as one device with the whole batch, to 1e-6 of the largest weight, at every step. The
    model has example weights, kernel L2, an activity regularizer, `add_loss` and repeated ids.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    divided = trained(strategy=strategy, num_microbatches=num_microbatches)
    for size, (expected, weights), (actual, ours) in zip(SIZES, whole, divided, strict=True):
        assert expected.examples == actual.examples == size
        for name in ("loss", "regularization_loss", "gradient_norm"):
            assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=1e-6), (
                f"{name} of the batch of {size}"
            )
        theirs, mine = (np.concatenate([w.ravel() for w in ws]) for ws in (weights, ours))
        tolerance = 1e-6 * np.abs(theirs).max()
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance, err_msg=f"batch {size}")


BOUNDS = [{"global_clipnorm": 0.5}, {"clipnorm": 0.2}, {"clipvalue": 0.05}]


@pytest.fixture(scope="module")
def wholes():
    """The results of one device with the whole batch, per bound, with a moving average of the
    weights.
    """
    return [trained_with_average(bound) for bound in BOUNDS]


def trained_with_average(bound, **arguments):
    """Runs a step on each batch; returns the gradient norms, and the weights and their averages."""
    trainer = Everything(seed=3, updates=Updates(ema_momentum=0.7, **bound), **arguments)
    norms = [report.gradient_norm for report in attempt(trainer, batches(SIZES))]
    averages = [v for v in trainer.optimizer.variables if "average" in v.path]
    variables = [*trainer.model.trainable_variables, *averages]
    return norms, [variable.numpy() for variable in variables]


@pytest.mark.slow
@pytest.mark.parametrize("bound", range(len(BOUNDS)), ids=[next(iter(bound)) for bound in BOUNDS])
@pytest.mark.parametrize(("replicas", "num_microbatches"), [(1, 3), (3, 1), (3, 2)])
def test_division_changes_neither_clipping_nor_averages(
    mirrored, wholes, replicas, num_microbatches, bound
):
    """L8, L9: division changes nothing with masked examples (weight 0), each kind of clipping and a
    moving average: the weights and their averages agree to 1e-6 of the largest, and so does the
    norm before clipping, which exceeds the bound.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    divided = trained_with_average(
        BOUNDS[bound], strategy=strategy, num_microbatches=num_microbatches
    )
    (norms, weights), (our_norms, our_weights) = wholes[bound], divided

    assert our_norms == pytest.approx(norms, rel=1e-5)
    assert max(norms) > 0.5
    assert len(our_weights) == 2 * 5
    theirs, ours = (np.concatenate([w.ravel() for w in ws]) for ws in (weights, our_weights))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_whole_batch_agrees_with_keras(whole, jit_compile):
    """L8: on one device, the reported losses equal Keras's own arithmetic, written out."""
    trainer = Everything(seed=3, jit_compile=jit_compile)
    [batch] = batches(SIZES[:1])
    report, *_ = attempt(trainer, [batch])
    fresh = Everything(seed=3)
    inputs = {"ids": batch["ids"], "features": batch["features"]}
    predictions = fresh.model(inputs).numpy()[:, 0]
    expected = np.average((predictions - batch["target"]) ** 2, weights=batch["weight"])

    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert report.regularization_loss == pytest.approx(float(sum(fresh.model.losses)), rel=1e-5)
    assert report.loss == pytest.approx(whole[0][0].loss, rel=1e-6)


def test_an_example_of_weight_0_has_no_part():
    """An example of weight 0 whose loss is NaN neither enters the mean nor skips the step."""

    class Masked(Linear):
        def compute_loss(self, batch, training):
            return super().compute_loss(batch, training) + batch["offset"]

        def example_weights(self, batch):
            return batch["weight"]

    trainer = Masked()
    batch = {
        "x": np.ones([2, 1], np.float32),
        "slope": np.float32([2.0, 1.0]),
        "offset": np.float32([0.0, np.nan]),
        "weight": np.float32([1.0, 0.0]),
    }
    [report] = attempt(trainer, [batch])

    assert (report.loss, report.grads_finite) == (2.0, True)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_of_no_weight_moves_nothing(microbatches):
    """L8: if all weights are 0, the mean loss is 0 and so is the gradient."""

    class Unweighted(Linear):
        def example_weights(self, batch):
            return 0.0 * batch["slope"]

    trainer = Unweighted(num_microbatches=microbatches)
    [report] = attempt(
        trainer, [{"x": np.ones([2, 1], np.float32), "slope": np.ones(2, np.float32)}]
    )

    assert (report.loss, report.gradient_norm, trainer.weight) == (0.0, 0.0, 1.0)
