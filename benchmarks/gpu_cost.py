"""What a step costs on a GPU that is not there, read from the program that XLA compiles for it.

XLA's compiler for GPUs, that of jaxlib, compiles the step of each model for a card that it has only
a description of: `pip install -e '.[gpu-check]'`. The figures are counted: the speed of this
machine does not change them, and none is a time that was measured. Each contender's whole step is
one program:

- `ours`: `Trainer.train_step`, which has no loss scale in float32 and bfloat16;
- `ours, no scale`: the same in float16 without a loss scale, to see what the scale costs;
- `fit`: Keras's `train_step`, as `model.fit` would run it with `jit_compile=True`;
- `by hand`: gradients and Adam, without loss scale, verdict or report;
- `JAX`: the same in JAX: see `in_jax.py`.

Bytes are what the kernels read and write according to their shapes, as if nothing was in a cache.
The roofline's time is the sum of what each kernel takes at least, by the card's bandwidth and its
rate of products. Launching kernels takes time as well, which is not in it.

`--parts` prints how many kernels each part of the step has, and what they move. A kernel belongs to
the last part whose operations it holds. The names of parts are TensorFlow's, not JAX's.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
CHECK = ROOT / "tests" / "gpu_check"
sys.path += [str(ROOT), str(ROOT / "tests"), str(CHECK)]

from cards import card_of
from program import Program, host_reads, launches

MODELS = ("mlp", "cnn", "resnet", "transformer")
DTYPES = ("float32", "bfloat16", "float16")
CONTENDERS = ("ours", "ours, no scale", "fit", "by hand", "JAX")
PARTS = {  # what names of operations contain, from the last part of a step to the first
    "update": r"(^|/)adam/",
    "norm and verdict": r"(^|/)(L2Loss|IsFinite|All)(_\d+)?($|;)",
    "forward and backward pass": r"(^|/|;)(gradient_tape|sequential|functional)(_\d+)?/",
    "loss, metrics and report": r".",
}
COPIES = "copies"  # of what no operation has a name
HEADINGS = {
    "kernels": "{:,}",
    "launches": "{:,}",
    "MB moved": "{:.4g}",
    "GFLOP": "{:.4g}",
    "MB temporary": "{:.4g}",
    "roofline, ms": "{:.3g}",
}


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--card", default="H100", help="A100, H100 or H200")
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, by commas")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="some of them, by commas")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--parts", action="store_true", help="print kernels by part of the step")
    parser.add_argument("--lower", nargs=4, metavar="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lower:
        lower(*arguments.lower)
        return
    headings = [*PARTS, COPIES] if arguments.parts else [*HEADINGS]
    names = ["model, dtype", "contender", *headings]
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    models, dtypes = arguments.models.split(","), arguments.dtypes.split(",")
    for model, dtype, contender in itertools.product(models, dtypes, arguments.contenders):
        if contender == "ours, no scale" and dtype != "float16":
            continue  # no other dtype has one
        program, launched, memory = compiled(model, dtype, contender, arguments.card)
        if arguments.parts:
            found = parts_of(program)
            cells = [f"{found[part][0]:,}: {found[part][1] / 1e6:.4g} MB" for part in headings]
        else:
            found = cost_of(program, launched, memory, card_of(arguments.card), dtype)
            cells = [text.format(found[name]) for name, text in HEADINGS.items()]
        print(f"| {model}, {dtype} | {contender} | {' | '.join(cells)} |", flush=True)


def compiled(model, dtype, contender, card):
    """Returns a contender's program, what the host launches, and the bytes of memory by use."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        run(__file__, "--lower", out, model, dtype, contender)
        run(CHECK / "compiled.py", out, card, 1)
        program = Program((out / "program.txt").read_text())
        launched = launches((out / "thunks.txt").read_text())
        return program, launched, json.loads((out / "memory.json").read_text())


def cost_of(program, launched, memory, card, dtype):
    """Returns what a step costs, by the names of `HEADINGS`."""
    return {
        "kernels": sum(1 for _ in program.kernels()),
        "launches": sum(each.depth == 0 for each in launched),
        "host reads": host_reads(program, launched),
        "MB moved": program.moved() / 1e6,
        "GFLOP": sum(program.flops_by(*each) for each in program.kernels()) / 1e9,
        "MB temporary": memory["temp"] / 1e6,
        "roofline, ms": 1e3 * program.roofline(card, dtype),
    }


def parts_of(program):
    """Returns the number of kernels of each part, and the bytes that they move."""
    found = dict.fromkeys((*PARTS, COPIES), (0, 0))
    for computation, kernel in program.kernels():
        part = part_of(program, kernel)
        number, moved = found[part]
        found[part] = number + 1, moved + program.moved_by(computation, kernel)
    return found


def part_of(program, kernel):
    """Returns the last part whose operations a kernel holds."""
    inner = [program.computations[name] for name in kernel.called if kernel.opcode == "fusion"]
    texts = [kernel.text, *(each.text for called in inner for each in called.values())]
    names = [name for text in texts for name in re.findall(r'op_name="([^"]+)"', text)]
    parts = [part for part, words in PARTS.items() if any(re.search(words, name) for name in names)]
    return parts[0] if parts else COPIES


def run(*command):
    """Runs one of the programs, each in a process of its own."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "benchmarks")))
    result = subprocess.run(  # noqa: S603  # the project's own programs
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(result.stderr[-3000:])


def lower(out, model, dtype, contender):
    """Writes the step of a contender as HLO."""
    from contenders import adam, dtype_policy, trainer_of
    from lowered_step import lower_function
    from models import POLICIES, work_of

    work, policy = work_of(model), POLICIES[dtype]
    if contender == "JAX":
        pathlib.Path(out, "step.hlo").write_bytes(lowered_by_jax(work, model, dtype))
        return
    if contender.startswith("ours"):
        settings = {"loss_scale": None} if contender == "ours, no scale" else {}
        trainer, _ = trainer_of(work, policy, jit_compile="step", **settings)
        step = trainer.train_step
    else:
        with dtype_policy(policy):
            network, optimizer = work.build(), adam()
            if contender == "fit":
                step = fit_step(network, optimizer, work.batch)
            else:
                step = hand_step(network, optimizer)
    pathlib.Path(out, "step.hlo").write_bytes(lower_function(step, work.batch))


def lowered_by_jax(work, model, dtype):
    """Returns the step in JAX as HLO. It overwrites its state, as TensorFlow its variables."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # else it looks for a card
    import jax
    import numpy as np
    from in_jax import state_of, step_of

    trained, statistics = weights_of(work, model)
    batch = tuple(np.asarray(each) for each in work.batch)
    step = jax.jit(step_of(model, dtype), donate_argnums=0)
    lowered = step.lower(state_of(trained, statistics), batch)
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


def weights_of(work, model):
    """Returns a Keras model's trained weights and, as arrays, what else `in_jax.py` takes."""
    import tensorflow as tf

    network = work.build()
    trained = [each.numpy() for each in network.trainable_variables]
    if model != "transformer":
        return trained, [each.numpy() for each in network.non_trainable_variables]
    nodes = [node for each in network.operations for node in each._inbound_nodes]  # noqa: SLF001
    given = [each for node in nodes for each in node.arguments.args if isinstance(each, tf.Tensor)]
    return trained, [each.numpy() for each in given]  # what the positions are embedded to


def fit_step(network, optimizer, batch):
    """Returns Keras's step, which scales the loss in float16."""
    import keras
    import tensorflow as tf

    network.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    spec = tf.data.Dataset.from_tensors(batch).element_spec
    tf.function(network.train_step).get_concrete_function(spec)  # makes the variables
    return network.train_step


def hand_step(network, optimizer):
    """Returns the shortest possible step: see `contenders.by_hand`."""
    import tensorflow as tf
    from models import loss_of

    weights = network.trainable_variables
    optimizer.build(weights)

    def step(batch):
        inputs, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, network(inputs, training=True)))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return step


if __name__ == "__main__":
    main()
