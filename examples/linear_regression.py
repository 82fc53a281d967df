"""Linear regression by gradient descent in float16, in a hand-written loop.

    python examples/linear_regression.py
    python examples/linear_regression.py --loss_scale=1

The targets are in a unit that is 4,096 times too large, so the gradients are too small for
float16: at a loss scale of 1 they are all 0, and nothing is learned. `LossScaler` multiplies
them; its initial scale is too high and falls.
"""

import numpy as np
import tensorflow as tf
from absl import app, flags

import scaling

LOSS_SCALE = flags.DEFINE_string(
    "loss_scale", "dynamic:initial_scale=2^40:max_scale=2^40", "A rule for scaling.parse_rule."
)
STEPS = flags.DEFINE_integer("steps", 200, "Number of gradient descent steps.", lower_bound=1)
UNIT = 2.0**-12


def main(_):
    """Recovers y = 3 x + 1 from 256 noisy points."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, [256]).astype(np.float32)
    y = UNIT * (3 * x + 1 + 0.01 * random.standard_normal(256).astype(np.float32))
    slope, intercept = tf.Variable(0.0), tf.Variable(0.0)  # float32: the master weights
    scaler = scaling.LossScaler(scaling.parse_rule(LOSS_SCALE.value))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            a, b = tf.cast(slope, tf.float16), tf.cast(intercept, tf.float16)
            predictions = tf.cast(UNIT, tf.float16) * (a * tf.cast(x, tf.float16) + b)
            loss = tf.reduce_mean((tf.cast(predictions, tf.float32) - y) ** 2)
            scaled, token = scaler.scale(loss)
        gradients = scaler.unscale(tape.gradient(scaled, [slope, intercept]), token)
        apply = scaler.update(scaling.all_finite(gradients))
        if apply:
            for variable, gradient in zip([slope, intercept], gradients, strict=True):
                variable.assign_sub(0.5 / UNIT**2 * gradient)
        return loss / UNIT**2, token.loss_scale, apply

    skipped = 0
    for number in range(1, STEPS.value + 1):
        loss, loss_scale, applied = step()
        skipped += not applied
        if number % 50 == 0:
            print(f"step {number}  loss {loss:.4f}  loss_scale 2^{np.log2(loss_scale):.0f}")
    line = f"y = {slope.numpy():.2f} x + {intercept.numpy():.2f}"
    print(f"{line} after {STEPS.value} steps, {skipped} skipped")


if __name__ == "__main__":
    app.run(main)
