"""The speed of a float32 step with oneDNN's kernels and with TensorFlow's own.

    python benchmarks/onednn.py

Each turn is a process of its own, because TensorFlow chooses its kernels on import. XLA is off. A
table goes to docs/performance.md.
"""

from contenders import ours  # isort: skip  # first, because it configures TensorFlow

import json
import os
import pathlib
import random
import statistics

from absl import app, flags
from models import work_of
from turns import in_turn, machine, printed_by, ratios_of, table, with_interval, write_between

from scaling.base.tensorflow_startup import ONEDNN

FLAGS = flags.FLAGS
flags.DEFINE_list("models", ["mlp", "cnn", "resnet", "transformer"], "Models of step_time.py.")
flags.DEFINE_integer("times", 5, "Number of processes for each kernel library.", lower_bound=1)
flags.DEFINE_string("one", None, "MODEL: the model to measure; set for subprocesses.")

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
OWN, ONE = "TensorFlow's own", "oneDNN's"
VALUES = {OWN: "0", ONE: "1"}


def main(_):
    """Measures one model with the current kernels, or all of them in processes, in turn."""
    if FLAGS.one:
        step = ours(work_of(FLAGS.one), "float32", jit_compile=False)
        found = in_turn({"step": step}, rounds=5, turn_secs=0.5)
        print(json.dumps(statistics.median(found["step"])))
        return
    rows = [["model", OWN, ONE, "ratio (95%)"]]
    for model in FLAGS.models:
        found = {name: [] for name in VALUES}
        for _ in range(FLAGS.times):
            for name in random.sample(list(VALUES), 2):
                os.environ[ONEDNN] = VALUES[name]
                found[name].append(printed_by(f"--one={model}"))
        medians = [f"{statistics.median(found[name]):.3g}" for name in VALUES]
        rows.append([model, *medians, with_interval(ratios_of(found, ONE, OWN))])
    text = f"{machine()}; {FLAGS.times} processes each.\n\n{table(rows)}"
    write_between(PAGE, "onednn.py", text)
    print(text)


if __name__ == "__main__":
    app.run(main)
