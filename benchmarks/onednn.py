"""What oneDNN's kernels are worth: a step in float32, with them and with TensorFlow's own.

    python benchmarks/onednn.py

Each turn is a process of its own, since TensorFlow decides when it is imported. XLA compiles
nothing. A table goes into docs/performance.md.
"""

from contenders import ours  # isort: skip  # first: it sets TensorFlow up

import json
import os
import pathlib
import random
import statistics

from absl import app, flags
from models import work_of
from turns import in_turn, machine, printed_by, ratios_of, table, with_interval, write_between

from trainer.base.tensorflow_startup import ONEDNN

FLAGS = flags.FLAGS
flags.DEFINE_list("models", ["mlp", "cnn", "resnet", "transformer"], "Which of step_time.py's.")
flags.DEFINE_integer("times", 5, "How often each has its turn.", lower_bound=1)
flags.DEFINE_string("one", None, "MODEL: for the processes that this one starts.")

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
OWN, ONE = "TensorFlow's own", "oneDNN's"
VALUES = {OWN: "0", ONE: "1"}


def main(_):
    """Measures one model in one way, or has others do it in turn."""
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
    told = f"{machine()}; {FLAGS.times} processes each.\n\n{table(rows)}"
    write_between(PAGE, "onednn.py", told)
    print(told)


if __name__ == "__main__":
    app.run(main)
