"""Start-up cost: seconds from the first import to the end of the first step, and peak memory.

    python benchmarks/start_up.py

A trainer and `model.fit` run in turn, each in a process of its own, with a fixed compile mode. The
models are those of `step_time.py`. A table of medians goes to docs/performance.md.
"""

import json
import pathlib
import random
import resource
import statistics
import time

BEGAN = time.perf_counter()

from absl import app, flags  # imported after the clock has started
from turns import machine, printed_by, ratios_of, table, write_between

FLAGS = flags.FLAGS
flags.DEFINE_integer("times", 5, "Number of processes for each contender.", lower_bound=1)
flags.DEFINE_string("one", None, "WHO,MODEL,DTYPE: what to measure; set for subprocesses.")

CELLS = (("mlp", "float32"), ("cnn", "mixed_bfloat16"), ("transformer", "mixed_bfloat16"))
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
STEPS = 20  # until memory has reached its peak


def ours(model, dtype):
    """Takes a first step with a `Trainer`; returns the time of its end, and a function for more
    steps.
    """
    from trainer import Trainer  # isort: skip

    import keras
    from models import loss_of, work_of

    work = work_of(model)
    inputs, labels = work.batch
    trainer = Trainer(
        model=work.build,
        optimizer=lambda: keras.optimizers.Adam(1e-4),
        loss_fn=loss_of,
        precision=dtype,
        jit_compile=False,
        verbose=False,
    )
    data = {"train_data": (inputs, labels), "global_batch": len(inputs)}
    trainer.train(steps=1, **data)
    return time.perf_counter(), lambda: trainer.train(steps=1 + STEPS, **data)


def fit(model, dtype):
    """Does the same with `model.fit`."""
    import keras
    from models import work_of

    work = work_of(model)
    keras.config.set_dtype_policy(dtype)
    network = work.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    inputs, labels = work.batch
    settings = {"batch_size": len(inputs), "verbose": 0}
    network.fit(inputs, labels, **settings)
    return time.perf_counter(), lambda: network.fit(inputs, labels, epochs=STEPS, **settings)


def main(_):
    """Measures one process, or starts all of them in turn."""
    if FLAGS.one:
        who, model, dtype = FLAGS.one.split(",")
        done, go_on = {"ours": ours, "fit": fit}[who](model, dtype)
        go_on()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": done - BEGAN, "MB": memory}))
        return
    cells = {f"{model}, {dtype}": measured(model, dtype) for model, dtype in CELLS}
    text = f"{machine()}; {FLAGS.times} processes each.\n\n{shown(cells)}"
    write_between(PAGE, "start_up.py", text)
    print(text)


def measured(model, dtype):
    """Returns the seconds and MB of every process, by unit and contender."""
    found = {unit: {who: [] for who in ("ours", "fit")} for unit in ("seconds", "MB")}
    for _ in range(FLAGS.times):
        for who in random.sample(["ours", "fit"], 2):
            for unit, value in printed_by(f"--one={who},{model},{dtype}").items():
                found[unit][who].append(value)
    return found


def shown(cells):
    """Returns a table of medians and their ratios."""
    rows = [["model, precision", "ours", "`fit`", "ratio", "ours", "`fit`", "ratio"]]
    for title, found in cells.items():
        row = [title]
        for unit, short in (("seconds", "s"), ("MB", "MB")):
            ours_now, others = (statistics.median(found[unit][who]) for who in ("ours", "fit"))
            ratio = statistics.median(ratios_of(found[unit], "ours", "fit"))
            row += [f"{ours_now:.3g} {short}", f"{others:.3g} {short}", f"{ratio:.2f}"]
        rows.append(row)
    return table(rows)


if __name__ == "__main__":
    app.run(main)
