"""Vanishing float16 gradients, and the cure.    python examples/vanishing.py [--loss_scale=1]"""

import tensorflow as tf
from absl import app, flags

import scaling

LOSS_SCALE = flags.DEFINE_string("loss_scale", "dynamic", '"dynamic", or a power of two.')


def main(_):
    """Learns that a weight is 3 from gradients below 2^-25, which float16 rounds to 0."""
    rule = scaling.DynamicLossScale(initial_scale=2.0**30, max_scale=2.0**30)  # too high at first
    if LOSS_SCALE.value != "dynamic":
        rule = scaling.FixedLossScale(float(LOSS_SCALE.value))
    x, weight, state = tf.constant(2.0**-14, tf.float16), tf.Variable(0.0), rule.initial_state()
    for step in range(1, 15):
        with tf.GradientTape() as tape:
            error = tf.cast(tf.cast(weight, tf.float16) * x, tf.float32) - 3 * 2.0**-14
            scaled_loss = scaling.scale_loss(error**2, state)
        gradient = scaling.unscale_gradients(tape.gradient(scaled_loss, weight), state)
        finite = scaling.all_finite(gradient)
        weight.assign_sub(2.0**26 * gradient if finite else 0.0)
        line = f"step {step:2}  loss_scale {state.loss_scale:13,.0f}  gradient {gradient:8.1e}"
        print(f"{line}  {'applied' if finite else 'skipped'}  weight {weight.numpy():.3f}")
        state = rule.advance(state, finite)


app.run(main)
