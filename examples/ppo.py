"""Proximal policy optimization in float16: it learns to balance a pole on a cart.

    python examples/ppo.py
    python examples/ppo.py --strategy=mirrored --logical_cpus=2

The data are made during training: the policy plays 32 games for 64 moves, `train` passes over these
moves four times, and the policy plays on. Actor and critic are one model with one optimizer, and
their losses are added.
"""

from trainer import Trainer, Updates  # isort: skip  # import first: it configures TensorFlow

import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer

FLAGS = flags.FLAGS
GAMES, MOVES, PASSES = 32, 64, 4
DISCOUNT, LAMBDA, CLIP = 0.99, 0.95, 0.2


def actor_critic():
    """Returns a model of the state to the logits of both moves and the state's value."""
    state = keras.Input([4])
    actor, critic = (
        layers.Dense(64, activation="tanh")(layers.Dense(64, activation="tanh")(state))
        for _ in range(2)
    )
    return keras.Model(state, (layers.Dense(2)(actor), layers.Dense(1)(critic)))


def ppo_losses(model, batch):
    """Returns one loss per move (Schulman et al., arXiv:1707.06347, equations 7 and 9)."""
    logits, value = (tf.cast(each, tf.float32) for each in model(batch["state"]))
    chances = tf.nn.log_softmax(logits)
    ratio = tf.exp(tf.gather(chances, batch["move"], batch_dims=1) - batch["log_chance"])
    clipped = tf.clip_by_value(ratio, 1 - CLIP, 1 + CLIP)
    gain = tf.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
    entropy = -tf.reduce_sum(tf.exp(chances) * chances, axis=1)
    return 0.5 * (value[:, 0] - batch["return"]) ** 2 - gain - 0.01 * entropy


class Ppo(Trainer):
    """Learns from the moves of its own policy."""

    def compute_loss(self, batch, training):  # noqa: ARG002  # no layer asks for it
        """Returns one loss per move."""
        return ppo_losses(self.model, batch)


class Carts:
    """Poles on carts (Barto et al. 1983), with the constants of Gym's CartPole."""

    def __init__(self, random):
        """Starts all games near the balance."""
        self.random, self.state = random, random.uniform(-0.05, 0.05, [GAMES, 4])

    def move(self, right):
        """Pushes the carts, shape (GAMES,); returns which poles fell; these are set up."""
        speed, angle, spin = self.state.T[1:]
        push = np.where(right, 10.0, -10.0) + 0.05 * spin**2 * np.sin(angle)
        swing = 9.8 * np.sin(angle) - np.cos(angle) * push / 1.1
        swing /= 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        pushed = (push - 0.05 * swing * np.cos(angle)) / 1.1
        self.state = self.state + 0.02 * np.stack([speed, pushed, spin, swing], axis=1)
        fell = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        self.state[fell] = self.random.uniform(-0.05, 0.05, [np.sum(fell), 4])
        return fell


def play(judge, carts, random):
    """Returns moves by name, shapes (MOVES, GAMES, ...), and the values of the last states."""
    names = ("state", "move", "log_chance", "value", "fell")
    moves = {name: [] for name in names}
    for _ in range(MOVES):
        state = carts.state.astype(np.float32)
        logits, value = (np.asarray(each, np.float32) for each in judge(state))
        chances = logits - np.logaddexp(*logits.T)[:, None]
        move = (random.random(GAMES) < np.exp(chances[:, 1])).astype(np.int64)
        chosen = chances[np.arange(GAMES), move]
        for name, each in zip(
            names, (state, move, chosen, value[:, 0], carts.move(move)), strict=True
        ):
            moves[name].append(each)
    moves = {name: np.stack(each) for name, each in moves.items()}
    last = np.asarray(judge(carts.state.astype(np.float32))[1], np.float32)[:, 0]
    return moves, last


def judged(moves, last):
    """Returns the batch of `ppo_losses`: advantages as in Schulman et al., arXiv:1506.02438.

    A move is rewarded with 1 if the pole still stands after it.
    """
    advantage, later = np.zeros([MOVES, GAMES], np.float32), 0.0
    for step in reversed(range(MOVES)):
        goes_on = 1.0 - moves["fell"][step]
        error = goes_on + DISCOUNT * goes_on * last - moves["value"][step]
        later = error + DISCOUNT * LAMBDA * goes_on * later
        advantage[step], last = later, moves["value"][step]
    batch = {name: moves[name] for name in ("state", "move", "log_chance")}
    batch["return"] = advantage + moves["value"]
    batch["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return {name: each.reshape(-1, *each.shape[2:]) for name, each in batch.items()}


def main(_):
    """Plays and trains in turn, and prints how often poles fell at first and at last."""
    ppo = make_trainer(Ppo, model=actor_critic, optimizer=lambda: keras.optimizers.Adam(1e-3))
    random = np.random.default_rng(FLAGS.seed)
    carts, judge, falls = Carts(random), tf.function(ppo.model), []
    steps = max(1, PASSES * GAMES * MOVES // FLAGS.global_batch)  # in each turn
    if FLAGS.steps < steps:
        sys.exit(f"--steps must be at least {steps}, the steps of one turn; got {FLAGS.steps}.")
    for end in range(steps, FLAGS.steps + 1, steps):
        moves, last = play(judge, carts, random)
        falls.append(1000 * np.mean(moves["fell"]))
        ppo.train(judged(moves, last), steps=end, global_batch=FLAGS.global_batch)
    first, final = np.mean(falls[:5]), np.mean(falls[-5:])
    print(f"falls in 1,000 moves: {first:.1f} at first, {final:.1f} at last")


if __name__ == "__main__":
    define_flags(
        precision="mixed_float16",
        steps=1600,
        global_batch=256,
        verbose="quiet",  # a turn takes less than a second
        updates=Updates(global_clipnorm=0.5),
        jit_compile="true",
    )
    app.run(main)
