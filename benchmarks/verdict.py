"""What a norm of the gradients and a condition on it cost in a step that is one program of XLA.

    python benchmarks/verdict.py
    python benchmarks/verdict.py --models=mlp --dtype=bfloat16

The loops are written by hand: one without a norm, one that returns the norm of all gradients, one
that updates only if the norm is finite, and one that does the same by a loop which runs once or not
at all. `fit` with `jit_compile=True` and 20 steps a call is beside them. Without flags, the table
goes to docs/performance.md.
"""

from contenders import LOOP, adam, data_of, dtype_policy, fit  # isort: skip  # configures TensorFlow

import json
import pathlib
import statistics

import tensorflow as tf
from absl import app, flags
from models import POLICIES, loss_of, work_of
from turns import (
    Contender,
    in_turn,
    machine,
    printed_by,
    ratios_of,
    table,
    with_interval,
    write_between,
)

from trainer.step.verdict import global_norm

FLAGS = flags.FLAGS
MODELS = ["mlp", "small_mlp"]
flags.DEFINE_list("models", MODELS, "Models of step_time.py.")
flags.DEFINE_enum("dtype", "float32", list(POLICIES), "Compute dtype.")
flags.DEFINE_integer("rounds", 40, "Number of turns of each contender.", lower_bound=3)
flags.DEFINE_float(
    "turn_secs", 0.25, "Target duration of a turn, in seconds; a turn has at least one step."
)
flags.DEFINE_string("one", None, "MODEL: the model to measure; set for subprocesses.")

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
PLAIN, FIT = "no norm", "`fit`, both"
NORM, CONDITION, ONCE = "with a norm", "with norm and `tf.cond`", "with norm and `tf.while_loop`"


def loop(work, policy, kind):
    """Returns a loop by hand, of one of the kinds above, whose step is one program of XLA."""
    with dtype_policy(policy):
        network, optimizer = work.build(), adam()
    weights = network.trainable_variables
    optimizer.build(weights)
    iterator = iter(data_of(work))

    def update(gradients):
        optimizer.apply(gradients, weights)
        return False

    @tf.function(jit_compile=True)
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, network(inputs, training=True)))
        gradients = tape.gradient(loss, weights)
        length = tf.constant(0.0) if kind == PLAIN else global_norm(gradients, in_rows=True)
        finite = tf.math.is_finite(length)
        if kind == CONDITION:
            tf.cond(~finite, lambda: False, lambda: update(gradients))
        elif kind == ONCE:
            tf.while_loop(lambda again: again, lambda _: [update(gradients)], [finite])
        else:
            update(gradients)
        return loss, length

    @tf.function
    def run_steps(steps):
        last = tf.constant(0.0), tf.constant(0.0)
        for _ in tf.range(steps):
            last = step(*next(iterator))
        return last

    def take(steps):
        for done in range(0, steps, LOOP):
            loss, _ = run_steps(tf.constant(min(LOOP, steps - done)))
            loss.numpy()

    return Contender(take)


def measure(model):
    """Returns the milliseconds per step of every turn, by contender."""
    work, policy = work_of(model), POLICIES[FLAGS.dtype]
    ready = {
        **{kind: loop(work, policy, kind) for kind in (PLAIN, NORM, CONDITION, ONCE)},
        FIT: fit(work, policy, jit_compile=True, steps_per_execution=LOOP),
    }
    return in_turn(ready, FLAGS.rounds, FLAGS.turn_secs)


def main(_):
    """Measures one model, or each in a process of its own."""
    if FLAGS.one:
        print(json.dumps(measure(FLAGS.one)))
        return
    others = (NORM, CONDITION, ONCE, FIT)
    rows = [["model", f"{PLAIN}, ms", *(f"{name} (95%)" for name in others)]]
    for model in FLAGS.models:
        turns = printed_by(f"--one={model}")
        ratios = [with_interval(ratios_of(turns, name, PLAIN)) for name in others]
        rows.append([model, f"{statistics.median(turns[PLAIN]):.3g}", *ratios])
    text = f"{machine()}; {FLAGS.dtype}, {FLAGS.rounds} turns each.\n\n{table(rows)}"
    if (FLAGS.models, FLAGS.dtype) == (MODELS, "float32"):
        write_between(PAGE, "verdict.py", text)
    print(text)


if __name__ == "__main__":
    app.run(main)
