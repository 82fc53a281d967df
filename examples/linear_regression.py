"""A slope and an intercept by gradient descent in float16, in a loop of one's own.

    python examples/linear_regression.py
    python examples/linear_regression.py --loss_scale=1

The y are counted in a unit 4,096 times too large. The gradients are then too small for float16: at
a loss scale of 1 they are all 0, and nothing is learned. `LossScaler` lifts them; its first scale
is too high, and comes down.
"""

import numpy as np
import tensorflow as tf
from absl import app, flags

import scaling

LOSS_SCALE = flags.DEFINE_string(
    "loss_scale", "dynamic:initial_scale=2^40:max_scale=2^40", "What scaling.parse_rule takes."
)
STEPS = flags.DEFINE_integer("steps", 200, "Steps of gradient descent.", lower_bound=1)
UNIT = 2.0**-12


def main(_):
    """Finds y = 3 x + 1 again, from 256 noisy points."""
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
        applies = scaler.update(scaling.all_finite(gradients))
        if applies:
            for variable, gradient in zip([slope, intercept], gradients, strict=True):
                variable.assign_sub(0.5 / UNIT**2 * gradient)
        return loss / UNIT**2, token.loss_scale, applies

    skipped = 0
    for number in range(1, STEPS.value + 1):
        loss, loss_scale, applies = step()
        skipped += not applies
        if number % 50 == 0:
            print(f"step {number}  loss {loss:.4f}  loss_scale 2^{np.log2(loss_scale):.0f}")
    found = f"y = {slope.numpy():.2f} x + {intercept.numpy():.2f}"
    print(f"{found} after {STEPS.value} steps, {skipped} skipped")


if __name__ == "__main__":
    app.run(main)
