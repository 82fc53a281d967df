"""Compares all rules on a problem whose float16 gradients underflow.    python examples/rules.py

A linear model learns known weights from large features, with a loss that is multiplied by 2^-30.
At a loss scale of 1, float16 flushes every gradient to zero; from 2^29 on, the gradients
overflow.
"""

import numpy as np
import tensorflow as tf
from absl import app, flags

import scaling

PLOT = flags.DEFINE_string(
    "plot", None, "File for a plot of the scales (pip install halfstep[plot])."
)
STEPS = flags.DEFINE_integer("steps", 300, "Number of steps in each run.", lower_bound=1)
FROM_HIGH = "initial_scale=2^40:max_scale=2^40"
RULES = {
    "fixed, 1": "1",
    "fixed, 2^20": "2^20",
    "dynamic": "dynamic",
    "dynamic, from 2^40": f"dynamic:{FROM_HIGH}",
    "dynamic, grows after 20, from 2^40": f"dynamic:growth_interval=20:{FROM_HIGH}",
    "tolerant, from 2^40": f"tolerant:{FROM_HIGH}",
    "logmax": "logmax",
    "logmax, from 2^40": f"logmax:{FROM_HIGH}",
    "headroom": "headroom",
    "headroom, from 2^40": f"headroom:{FROM_HIGH}",
}
LOSS_WEIGHT = 2.0**-30
ANSWER = np.linspace(-2, 2, 8, dtype=np.float32)[:, None]


def train(rule, dtype):
    """Returns the loss of each step, its loss scale, and whether it was skipped."""
    scaler, weights = scaling.LossScaler(rule), tf.Variable(tf.zeros([8, 1]))
    random = np.random.default_rng(0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            predictions = tf.cast(x, dtype) @ tf.cast(weights, dtype)
            error = tf.cast(predictions, tf.float32) - x @ ANSWER
            loss = LOSS_WEIGHT * tf.reduce_mean(error**2)
            scaled, token = scaler.scale(loss)
        [gradient] = scaler.unscale(tape.gradient(scaled, [weights]), token)
        largest = tf.reduce_max(tf.abs(gradient))
        finite = scaling.all_finite(gradient)
        apply = scaler.update(scaling.Verdict(finite, max_magnitude=largest))
        weights.assign_sub(tf.where(apply, gradient * 2.0**10, 0.0))
        return loss, token.loss_scale, ~apply

    batches = 2.0**8 * random.standard_normal([STEPS.value, 256, 8]).astype(np.float32)
    return tuple(np.array(field) for field in zip(*map(step, batches), strict=True))


def main(_):
    """Prints a line for each rule, and draws the scales if --plot is given."""
    print(f"{'rule':<34}  skipped  last scale  final loss / first")
    runs = {"none, in float32": train(scaling.NoLossScale(), tf.float32)}
    for name, text in RULES.items():
        runs[name] = train(scaling.parse_rule(text), tf.float16)
    for name, (losses, scales, skipped) in runs.items():
        last = f"2^{np.log2(scales[-1]):.0f}"
        print(f"{name:<34}  {skipped.sum():>7}  {last:>10}  {losses[-1] / losses[0]:18.1e}")
    if PLOT.value:
        draw({name: runs[name] for name in list(RULES)[4:10:5]}, PLOT.value)


def draw(runs, path):
    """Draws the loss scale of each run over the steps; a cross marks a skipped step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, (_, scales, skipped) in runs.items():
        steps, exponents = np.arange(1, len(scales) + 1), np.log2(scales)
        [line] = axes.step(steps, exponents, where="post", label=name)
        axes.plot(steps[skipped], exponents[skipped], "x", color=line.get_color())
    axes.set(xlabel="step (a cross is a skipped one)", ylabel="log2 of the loss scale")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    app.run(main)
