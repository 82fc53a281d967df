"""Several updates of a critic in each step: WGAN-GP, compared with a plain loop."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import key_source, make_keys
from helpers import attempt, copies, example

from scaling import Cause
from trainer import Checkpoints, Trainer, Updates

STEPS, UPDATES, EXAMPLES = 2, 3, 6


class Players(keras.Model):
    """A critic and a generator of points in the plane, and the source of their noise."""

    def __init__(self):
        """Smooth layers, so that a float32 loop stays close."""
        super().__init__()
        dense = keras.layers.Dense
        self.noise = keras.random.SeedGenerator(4)
        self.critic = keras.Sequential([keras.Input([2]), dense(5, activation="tanh"), dense(1)])
        self.generator = keras.Sequential([keras.Input([2]), dense(4, activation="tanh"), dense(2)])


def wasserstein(model, real):
    """The losses of `examples/wgan_gp.py`, with noise of the model's source."""
    noise = keras.random.normal(tf.shape(real), seed=model.noise)
    mix = keras.random.uniform([tf.shape(real)[0], 1], seed=model.noise)
    return example("wgan_gp").wgan_losses(model, real, noise, mix)


class Wgan(Trainer):
    """`Players`, with plain SGD for both. A batch may spoil the loss of one of them."""

    def build_model(self):
        """Returns both parts."""
        return Players()

    def build_optimizer(self):
        """Returns an optimizer for each; the critic moves first."""
        return {"critic": keras.optimizers.SGD(0.1), "generator": keras.optimizers.SGD(0.2)}

    def compute_loss(self, batch, training):
        """The losses, times the factors in the batch."""
        losses = wasserstein(self.model, batch["real"])
        return {name: losses[name] * batch[name] for name in losses}


def batches(**factors):
    """Random points, and factors of 1 for both losses."""
    random = np.random.default_rng(2)
    ones = np.ones(EXAMPLES, np.float32)
    return [
        {
            "real": random.standard_normal([EXAMPLES, 2]).astype(np.float32) + np.float32([2, 0]),
            **{name: ones * factors.get(name, 1.0) for name in ("critic", "generator")},
        }
        for _ in range(STEPS)
    ]


def plain_loop(model, random_seed, replicas, updates):
    """Trains `model` with tapes and the order written out; returns the last losses of each step, and
    the norms of the last gradients together.

    The numbers of each update are drawn from the keys that replicas of a step have.
    """
    rates, reported = {"critic": 0.1, "generator": 0.2}, []
    turns = ["critic"] * updates + ["generator"]
    for step, batch in enumerate(batches()):
        losses, squares = {}, {}
        for turn, name in enumerate(turns):
            variables = getattr(model, name).trainable_variables
            source = key_source(tf.constant([random_seed, step], tf.int64), turn, len(turns))
            with tf.GradientTape() as tape:
                total = 0.0
                for replica, real in enumerate(np.split(batch["real"], replicas)):
                    model.noise.state.assign(make_keys(source, replica, replicas, 1, 1)[0, 0])
                    total += tf.reduce_sum(wasserstein(model, real)[name]) / EXAMPLES
            gradients = tape.gradient(total, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(rates[name] * gradient)
            losses[name] = total
            squares[name] = tf.linalg.global_norm(gradients) ** 2
        reported.append((float(sum(losses.values())), float(sum(squares.values())) ** 0.5))
    return reported


def trained(strategy, precision="float32", updates=UPDATES, **arguments):
    """Returns a trainer after `STEPS` steps, its initial weights, and the reports."""
    trainer = Wgan(
        strategy=strategy,
        precision=precision,
        loss_scale=1024.0 if precision == "mixed_float16" else None,
        jit_compile=False,
        updates=Updates(alternate_optimizers=True, updates_per_step={"critic": updates}),
        seed=3,
        verbose=False,
        **arguments,
    )
    initial = trainer.model.get_weights()
    return trainer, initial, list(attempt(trainer, batches()))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "precision", "tolerance"),
    [
        pytest.param(1, "float32", 1e-6, marks=pytest.mark.slow),
        pytest.param(3, "float32", 1e-6, marks=pytest.mark.slow),
        (1, "mixed_float16", 1e-2),
        pytest.param(2, "mixed_float16", 1e-2, marks=pytest.mark.slow),
    ],
)
def test_the_critic_is_updated_as_often_as_in_a_plain_loop(
    mirrored, replicas, precision, tolerance
):
    """L8, L10: with n updates of the critic for one of the generator, each with new random numbers,
    the weights are those of a plain loop, on any number of replicas; each optimizer counts its own
    updates, and the loss and the gradient norm are those of each one's last update.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer, initial, reports = trained(strategy, precision)
    reference = Players()
    reference.set_weights(initial)
    seed = int(access.state(trainer).random_seed.numpy())
    losses, norms = zip(*plain_loop(reference, seed, replicas, UPDATES), strict=True)
    once = Players()
    once.set_weights(initial)
    plain_loop(once, seed, replicas, 1)
    weights, expected = trainer.model.get_weights(), reference.get_weights()

    assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) <= tolerance
    apart = [np.abs(a - b).max() for a, b in zip(weights, once.get_weights(), strict=True)]
    assert max(apart) > 10 * tolerance
    assert [report.loss for report in reports] == pytest.approx(losses, abs=10 * tolerance)
    found = [report.gradient_norm for report in reports]
    assert found == pytest.approx(norms, rel=10 * tolerance)
    counts = {name: int(one.iterations.numpy()) for name, one in trainer.optimizer.items()}
    assert counts == {"critic": STEPS * UPDATES, "generator": STEPS}
    if precision == "mixed_float16":
        check_rolled_back(trainer)


def check_rolled_back(trainer):
    """L5, L6, L10: after updates of the critic, an overflow of the generator takes all of them back,
    bit for bit, and no optimizer has counted one.
    """
    slots = [variable for one in trainer.optimizer.values() for variable in one.variables]
    moving = [*trainer.model.variables, *slots]
    before = [copy.tobytes() for variable in moving for copy in copies(variable)]
    reports = list(attempt(trainer, batches(generator=1e7)))

    assert {report.cause for report in reports} == {Cause.BACKWARD}
    assert [copy.tobytes() for variable in moving for copy in copies(variable)] == before


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    """L12: a run that stops after a step of several updates goes on with the same random numbers. With
    another number of updates it is refused, and goes on if that is allowed by name.
    """
    data = {name: np.concatenate([b[name] for b in batches()]) for name in batches()[0]}

    def run(folder, steps, updates=UPDATES, **arguments):
        trainer = Wgan(
            model_dir=tmp_path / folder,
            updates=Updates(alternate_optimizers=True, updates_per_step={"critic": updates}),
            jit_compile=False,
            seed=3,
            verbose=False,
            **arguments,
        )
        trainer.train(data, steps, global_batch=EXAMPLES)
        return trainer.model.get_weights()

    run("stopped", 2)
    with pytest.raises(ValueError, match="`updates_per_step"):
        run("stopped", 4, updates=2)
    stopped, whole = run("stopped", 4), run("whole", 4)

    assert all(np.array_equal(a, b) for a, b in zip(stopped, whole, strict=True))
    run("stopped", 5, updates=2, checkpoints=Checkpoints(allow_changes=("updates_per_step",)))
