"""The cost of a training step: a trainer, `model.fit`, a hand-written loop and PyTorch, in turn.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --models=mlp --dtypes=float32,bfloat16 --rounds=5
    python benchmarks/step_time.py --models=  # writes the tables again

Each cell (a model in a dtype) is a process of its own, in which all contenders are measured in
turn. Then the trainer, the fastest `fit` and the hand-written loop have many more short turns, for
narrower intervals. Results go to benchmarks/step_time.json, and tables to docs/performance.md.
PyTorch is left out if it is not installed (`pip install -e '.[bench]'`).

If TensorFlow finds a GPU, the steps run there. On a machine with many cores, `--jobs=8` traces and
compiles eight cells at once, and measures one at a time. Several processes share a GPU only with
TF_FORCE_GPU_ALLOW_GROWTH=true.
"""

from contenders import by_hand, fit, ours  # isort: skip  # configures TensorFlow

import functools
import importlib.util
import pathlib
import statistics

import tensorflow as tf
from absl import app, flags
from models import POLICIES, WIDTH, WINDOW, WORDS, work_of
from turns import (
    Contender,
    in_turn,
    machine,
    measured,
    measured_into,
    ratios_of,
    ready,
    table,
    with_interval,
    write_between,
)

from trainer.run.compile_mode import has_avx512
from trainer.step.xla import WITH_PASSES

FLAGS = flags.FLAGS
MODELS = ["mlp", "cnn", "resnet", "transformer", "small_mlp", "lstm", "separable", "embedding"]
flags.DEFINE_list("models", MODELS, "Models to measure.")
flags.DEFINE_list("dtypes", ["float32", "bfloat16", "float16"], "Compute dtypes.")
flags.DEFINE_integer("rounds", 15, "Number of turns of each contender.", lower_bound=3)
flags.DEFINE_float(
    "turn_secs", 0.5, "Target duration of a turn, in seconds; a turn has at least one step."
)
flags.DEFINE_integer(
    "pairs", 100, "Number of extra turns of the trainer, the fastest `fit` and the loop by hand."
)
flags.DEFINE_float("pair_secs", 0.25, "Target duration of an extra turn, in seconds.")
flags.DEFINE_float(
    "slow_secs", 2.0, "A contender whose step takes longer, in seconds, has a single turn."
)
flags.DEFINE_boolean("pytorch", True, "Also measure PyTorch, if it is installed.")
flags.DEFINE_integer("jobs", 1, "Number of processes that compile at once.", lower_bound=1)
flags.DEFINE_string("cell", None, "MODEL,DTYPE: the cell to measure; set for subprocesses.")

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "step_time.json"
PAGE = ROOT / "docs" / "performance.md"
NAMES = {
    False: "plain",
    "elementwise": "elementwise",
    "update": "XLA's update",
    True: "XLA",
    "step": "one program",
}
MEASURED = [mode for mode in NAMES if mode != "update"]  # Adam has a kernel of its own
IN_PYTORCH = MODELS[:4]
PAIRS = [("ours, plain", "by hand, plain"), ("ours, XLA", "by hand, XLA")]


def contenders(model, dtype):
    """Returns functions without arguments that build the contenders, by name.

    Where TensorFlow's own kernels are scalar loops, only `fit` and the trainer are run with them.
    """
    on_cpu = not tf.config.list_physical_devices("GPU")
    scalar_loops = on_cpu and (dtype == "float16" or (dtype == "bfloat16" and not has_avx512()))
    cell = (work_of(model), POLICIES[dtype])
    found = {"fit": lambda: fit(*cell)}
    for mode in MEASURED:
        if mode in (False, *WITH_PASSES) or not scalar_loops:
            found[f"ours, {NAMES[mode]}"] = functools.partial(ours, *cell, jit_compile=mode)
    if not scalar_loops:
        found["fit, 20 steps a call"] = lambda: fit(*cell, steps_per_execution=20)
        found["by hand, plain"] = lambda: by_hand(*cell)
    found["fit, XLA"] = lambda: fit(*cell, jit_compile=True)
    found["fit, both"] = lambda: fit(*cell, jit_compile=True, steps_per_execution=20)
    found["by hand, XLA"] = lambda: by_hand(*cell, jit_compile=True)
    if FLAGS.pytorch and importlib.util.find_spec("torch") and model in IN_PYTORCH:
        found["PyTorch"] = lambda: pytorch(model, dtype)
    return found


def pytorch(model, dtype):
    """Returns PyTorch's eager steps."""
    import in_pytorch
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = in_pytorch.build(model, WORDS, WINDOW, WIDTH).to(device)
    return Contender(in_pytorch.steps_of(network, work_of(model).batch, dtype, device))


def measure(model, dtype):
    """Measures the milliseconds per step of every turn, by contender."""
    found = {name: make() for name, make in contenders(model, dtype).items()}
    for take, multiple in found.values():
        take(multiple)  # traces and compiles
    ready()
    turns = in_turn(found, FLAGS.rounds, FLAGS.turn_secs, FLAGS.slow_secs)
    compared = {*pair_of(found), fastest("ours", turns), fastest("fit", turns)}
    paired = in_turn({name: found[name] for name in compared}, FLAGS.pairs, FLAGS.pair_secs)
    measured({"millisecs": turns, "paired": paired})


def default_on(device, dtype):
    """Returns what jit_compile="auto" looks up; see `trainer.run.compile_mode`."""
    if "NVIDIA" in device:
        return "ours, one program"
    lacking = dtype == "float16" or (dtype == "bfloat16" and "AVX-512" not in device)
    return "ours, XLA" if lacking else "ours, plain"


def pair_of(names):
    """Returns the trainer and the loop by hand in the same mode, if both are measured."""
    return next((pair for pair in PAIRS if names.keys() >= {*pair}), ())


def fastest(kind, turns):
    """Returns the contender with the smallest median among those whose names begin with `kind`."""
    return min(
        (name for name in turns if name.startswith(kind)),
        key=lambda name: statistics.median(turns[name]),
    )


def ratios(device, cells):
    """Returns a table of ratios of the trainer, in its default mode, to the others."""
    head = ["model, dtype", "default", "against our best mode", "against `fit`", "against PyTorch"]
    head += ["against the best `fit` (95%)", "against by hand (95%)"]
    rows, by_cell = [head], {}
    for title, cell in cells.items():
        turns, paired = cell["millisecs"], cell["paired"]
        default = default_on(device, title.split()[-1])
        ours, best = fastest("ours", turns), fastest("fit", turns)
        against = [
            f"{statistics.median(ratios_of(turns, default, other)):.2f}" if other in turns else ""
            for other in (ours, "fit", "PyTorch")
        ]
        to_best = ratios_of(paired if {default, best} <= paired.keys() else turns, default, best)
        by_cell[title] = statistics.median(to_best)
        by_hand_too = ratios_of(paired, *pair_of(paired)) if pair_of(paired) else None
        rows.append(
            [
                title,
                default.removeprefix("ours, "),
                *against,
                with_interval(to_best),
                with_interval(by_hand_too) if by_hand_too else "",
            ]
        )
    averaged = [ratio for title, ratio in by_cell.items() if "float16" not in title.split()]
    mean = statistics.geometric_mean(averaged) if averaged else float("nan")
    whole = [title for title in by_cell if "fit, both" in cells[title]["millisecs"]]
    as_fast = sum(by_cell[title] <= 1.01 for title in whole)
    summary = f"Against the best `fit`, geometric mean over float32 and bfloat16: {mean:.2f}."
    if whole:
        summary += f' At most 1.01 in {as_fast} of the {len(whole)} cells that have "fit, both".'
    return f"{table(rows)}\n\n{summary}"


def device():
    """Returns the name of the GPU that the steps run on, or that of the processor."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return machine()
    details = tf.config.experimental.get_device_details(gpus[0])
    return f"{details['device_name']}, TensorFlow {tf.__version__}"


def main(_):
    """Measures one cell, or all of them in a process each."""
    if FLAGS.cell:
        measure(*FLAGS.cell.split(","))
        return
    cells = [(model, dtype) for model in FLAGS.models for dtype in FLAGS.dtypes]
    by_title = {f"{model}, {dtype}": f"--cell={model},{dtype}" for model, dtype in cells}
    results = measured_into(RESULTS, by_title, device(), FLAGS.jobs)
    text = "\n\n".join(
        f"### {name}\n\n{ratios(name, cells)}" for name, cells in results.items() if cells
    )
    write_between(PAGE, "step_time.py", text)
    print(text)


if __name__ == "__main__":
    app.run(main)
