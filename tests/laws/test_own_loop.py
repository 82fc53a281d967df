"""The step in a user's own loop: `trainer.step` without a `Trainer`."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned

import scaling
from trainer import Updates
from trainer.step import TrainState, attempt_step, plan_step

pytestmark = pytest.mark.sampled

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PROGRAMS = ["own_loop_bare.py", "own_loop.py"]


def run(script):
    """Runs an example as a program; returns its output lines."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_the_own_loop_learns_as_its_bare_twin_does():
    """In float16 on two replicas, with a scale that starts too high, the loop learns the digits as
    well as plain TensorFlow does in float32 on one device: within 2 points of held-out accuracy.
    """
    bare, own = (run(script) for script in PROGRAMS)
    accuracies = [
        float(re.fullmatch(r"held-out accuracy ([\d.]+)%", lines[-1])[1]) for lines in (bare, own)
    ]
    scales = [float(line.rsplit("scale ", 1)[1]) for line in own[:-1]]

    assert min(accuracies) >= 87.0
    assert abs(accuracies[0] - accuracies[1]) <= 2.0
    assert len(bare) == len(own) == 5
    assert all(1.0 <= scale < 2.0**22 for scale in scales)


def trained(strategy, batches, **arguments):
    """Runs a plain loop over `attempt_step`; returns the report of each batch and the weights after
    it.
    """
    keras.utils.set_random_seed(3)
    rule = scaling.NoLossScale()
    with strategy.scope():
        hidden = keras.layers.Dense(5, activation="tanh")
        model = keras.Sequential([keras.Input([3]), hidden, keras.layers.Dense(1)])

        def compute_loss(batch, training):
            return (model(batch["x"], training=training)[:, 0] - batch["y"]) ** 2

        run = TrainState(rule)
        plan = plan_step(
            strategy=strategy,
            model=model,
            optimizer=keras.optimizers.SGD(0.1),
            compute_loss=compute_loss,
            rule=rule,
            **arguments,
        )
    step = tf.function(lambda batch: attempt_step(batch, plan, run))
    results = []
    for batch in batches:
        report = step(batch)
        results.append((report, np.concatenate([w.ravel() for w in model.get_weights()])))
    assert int(run.step) == len(results)
    return results


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"num_microbatches": 2, "updates": Updates(global_clipnorm=0.5)},
        {"example_weights": lambda batch: batch["weight"]},
    ],
)
def test_replicas_change_nothing_in_a_plain_loop(mirrored, arguments):
    """L8: a `for` loop over a dataset whose last batch does not divide by 3 replicas takes SGD in
    float32 to the same weights under mirrored as under default, to 1e-6, at every step.
    """
    random = np.random.default_rng(1)
    arrays = {
        "x": random.standard_normal([32, 3]).astype(np.float32),
        "y": random.standard_normal(32).astype(np.float32),
        "weight": random.choice([0.0, 0.5, 3.0], 32).astype(np.float32),
    }
    batches = untuned(tf.data.Dataset.from_tensor_slices(arrays).batch(9))
    single = trained(tf.distribute.get_strategy(), batches, **arguments)
    shared = trained(mirrored(3), batches, **arguments)

    assert [int(report.examples) for report, _ in shared] == [9, 9, 9, 5]
    for (expected, theirs), (actual, ours) in zip(single, shared, strict=True):
        assert bool(actual.grads_finite)
        assert float(actual.loss) == pytest.approx(float(expected.loss), rel=1e-6)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert np.abs(single[-1][1] - single[0][1]).max() > 1e-2
