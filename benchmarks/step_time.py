"""What a training step costs: ours, `model.fit`'s, a hand-written loop's, and PyTorch's, in turn.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --models=mlp --dtypes=float32,bfloat16 --rounds=5
    python benchmarks/step_time.py --models=  # writes the tables again

Each cell (a model in a dtype) is a process of its own, in which every contender takes its turn,
round after round, in an order left to chance. What counts are ratios of medians. Results go to
benchmarks/step_time.json, and tables into docs/performance.md. PyTorch is left out where it is not
installed (`pip install -e '.[bench]'`).
"""

from trainer import Trainer  # isort: skip  # first: it keeps TensorFlow quiet

import functools
import importlib.util
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.compilation import LONG, settle

FLAGS = flags.FLAGS
flags.DEFINE_list("models", ["mlp", "cnn", "resnet", "transformer"], "Which.")
flags.DEFINE_list("dtypes", ["float32", "bfloat16", "float16"], "In which.")
flags.DEFINE_integer("rounds", 9, "How often each contender has its turn.", lower_bound=3)
flags.DEFINE_float("turn_secs", 1.0, "How long a turn shall be; at least one step.")
flags.DEFINE_float("slow_secs", 2.0, "Whose step takes longer has no turns but that one.")
flags.DEFINE_string("cell", None, "MODEL,DTYPE: for the processes that this one starts.")

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "step_time.json"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- step_time.py writes this -->", "<!-- to here -->"
NAMES = {False: "plain", "elementwise": "elementwise", True: "XLA"}
LOOP = 20  # steps in a call, of those who loop
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
BATCH = {"mlp": 128, "cnn": 64, "resnet": 32, "transformer": 16}
WINDOW, WORDS, WIDTH = 128, 256, 256  # of the transformer


def batch_of(model):
    """Returns (inputs, labels) as NumPy arrays."""
    generator, count = np.random.default_rng(0), BATCH[model]
    if model == "transformer":
        text = generator.integers(WORDS, size=[count, WINDOW + 1]).astype(np.int32)
        return text[:, :-1], text[:, 1:]
    shape = [784] if model == "mlp" else [32, 32, 3]
    return generator.random([count, *shape], np.float32), generator.integers(10, size=count)


def build(model):
    """Returns a Keras model that makes logits, under the policy that is set."""
    if model == "mlp":
        hidden = [layers.Dense(512, activation="relu") for _ in range(2)]
        return keras.Sequential([keras.Input([784]), *hidden, layers.Dense(10)])
    if model == "transformer":
        return build_transformer()
    inputs = keras.Input([32, 32, 3])
    hidden = convolution(inputs, 32)
    if model == "cnn":
        for width in (32, 64, 128):
            hidden = layers.MaxPooling2D()(convolution(hidden, width))
    else:
        for width, blocks in ((32, 3), (64, 3), (128, 3)):
            for block in range(blocks):
                hidden = residual(hidden, width, 2 if block == 0 and width > 32 else 1)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden)))


def convolution(hidden, width, stride=1, *, last=True):
    """Returns a convolution of `hidden`, normalised; and cut off at 0 unless more is added."""
    hidden = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(hidden)
    hidden = layers.BatchNormalization()(hidden)
    return layers.ReLU()(hidden) if last else hidden


def residual(hidden, width, stride):
    """Returns `hidden` and two convolutions of it, added."""
    more = convolution(convolution(hidden, width, stride), width, last=False)
    if hidden.shape[-1] != width or stride > 1:
        hidden = layers.Conv2D(width, 1, stride, use_bias=False)(hidden)
    return layers.ReLU()(hidden + more)


def build_transformer():
    """Returns four blocks of attention and perceptron, each byte after those before it."""
    text = keras.Input([WINDOW], dtype="int32")
    places = layers.Embedding(WINDOW, WIDTH)(keras.ops.arange(WINDOW))
    hidden = layers.Embedding(WORDS, WIDTH)(text) + places
    for _ in range(4):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(4, WIDTH // 4)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        wide = layers.Dense(4 * WIDTH, activation="relu")(layers.LayerNormalization()(hidden))
        hidden = hidden + layers.Dense(WIDTH)(wide)
    return keras.Model(text, layers.Dense(WORDS)(layers.LayerNormalization()(hidden)))


def loss_of(labels, logits):
    """Returns one loss per example, in float32."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
    return losses if losses.shape.rank == 1 else tf.reduce_mean(losses, axis=1)


def trainer_of(model, dtype, jit_compile):
    """Returns a trainer that has started, and data for it."""
    trainer = Trainer(
        model=lambda: build(model),
        optimizer=lambda: keras.optimizers.Adam(1e-4),
        loss_fn=loss_of,
        precision=POLICIES[dtype],
        jit_compile=jit_compile,
        steps_per_loop=LOOP,
        verbose=False,
    )
    data = tf.data.Dataset.from_tensors(batch_of(model)).repeat().prefetch(2)
    trainer._start(next(iter(data)))  # noqa: SLF001  # as `train` does
    return trainer, data


def ours(model, dtype, jit_compile):
    """Returns what takes so many of our steps."""
    trainer, data = trainer_of(model, dtype, jit_compile)
    iterator, run_steps = iter(data), trainer._parts.run_steps  # noqa: SLF001

    def take(steps):
        report, _ = run_steps(iterator, tf.constant(steps))
        report.loss.numpy()

    return take


def chosen(model, dtype):
    """Returns what jit_compile="auto" comes to in a long run, and the seconds it takes for that."""
    trainer, data = trainer_of(model, dtype, "auto")
    parts, use = trainer._parts, trainer._use  # noqa: SLF001
    choice = settle(trainer, parts, next(iter(data)), LONG, use)
    way = trainer._parts.plan.jit_compile  # noqa: SLF001
    return {"way": f"ours, {NAMES[way]}", "secs": choice.secs if choice else 0.0}


def fit(model, dtype, **settings):
    """Returns what takes so many steps of `model.fit`'s own train function."""
    keras.config.set_dtype_policy(POLICIES[dtype])
    network = build(model)
    keras.config.set_dtype_policy("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(1e-4), loss, **settings)
    data = tf.data.Dataset.from_tensors(batch_of(model)).repeat().prefetch(2)
    network.make_train_function()
    iterator, train = iter(data), network.train_function
    each = settings.get("steps_per_execution", 1)

    def take(steps):
        for _ in range(-(-steps // each)):
            logs = train(iterator)
        float(logs["loss"])

    take.least = each
    return take


def by_hand(model, dtype, jit_compile):
    """Returns what takes so many steps of the shortest loop there is, without loss scaling."""
    keras.config.set_dtype_policy(POLICIES[dtype])
    network = build(model)
    keras.config.set_dtype_policy("float32")
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(network.trainable_variables)
    data = tf.data.Dataset.from_tensors(batch_of(model)).repeat().prefetch(2)
    iterator = iter(data)

    @tf.function(jit_compile=jit_compile)
    def gradients_of(inputs, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, network(inputs, training=True)))
        return loss, tape.gradient(loss, network.trainable_variables)

    @tf.function
    def loop(steps):
        last = tf.constant(0.0)
        for _ in tf.range(steps):
            last, gradients = gradients_of(*next(iterator))
            optimizer.apply(gradients, network.trainable_variables)
        return last

    return lambda steps: loop(tf.constant(steps)).numpy()


def contenders(model, dtype):
    """Returns who takes part, by name: a function without arguments that makes it ready.

    In float16 on a CPU TensorFlow's own kernels take seconds a step: `fit` shows it once.
    """
    half = dtype == "float16"
    found = {"fit": lambda: fit(model, dtype)}
    for way, name in NAMES.items():
        if way is True or not half:
            found[f"ours, {name}"] = functools.partial(ours, model, dtype, way)
    if not half:
        found["fit, 20 steps a call"] = lambda: fit(model, dtype, steps_per_execution=LOOP)
        found["by hand, plain"] = lambda: by_hand(model, dtype, jit_compile=False)
    found["fit, XLA"] = lambda: fit(model, dtype, jit_compile=True)
    found["by hand, XLA"] = lambda: by_hand(model, dtype, jit_compile=True)
    if importlib.util.find_spec("torch"):
        found["PyTorch"] = lambda: pytorch(model, dtype)
    return found


def pytorch(model, dtype):
    """Returns what takes so many eager steps of PyTorch's."""
    import in_pytorch

    network = in_pytorch.build(model, WORDS, WINDOW, WIDTH)
    return in_pytorch.steps_of(network, batch_of(model), dtype)


def measure(model, dtype):
    """Returns milliseconds a step of every turn, by contender; one turn of one that is slow."""
    ready, steps, found = {}, {}, {}
    for name, make in contenders(model, dtype).items():
        take = make()
        least = getattr(take, "least", 1)
        take(least)  # traces and compiles, too
        began = time.perf_counter()
        take(least)
        step = (time.perf_counter() - began) / least
        if step > FLAGS.slow_secs:
            found[name] = [1e3 * step]
            continue
        steps[name] = max(1, round(FLAGS.turn_secs / step / least)) * least
        ready[name], found[name] = take, []
    order = list(ready)
    for _ in range(FLAGS.rounds):
        random.shuffle(order)
        for name in order:
            began = time.perf_counter()
            ready[name](steps[name])
            found[name].append((time.perf_counter() - began) / steps[name] * 1e3)
    return {"millisecs": found, "auto": chosen(model, dtype)}


def machine():
    """Returns what the figures are of."""
    names = [
        line.split(":")[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def table(results):
    """Returns medians, in milliseconds a step: a row a cell."""
    names = ["fit", "fit, 20 steps a call", "fit, XLA", "by hand, plain", "by hand, XLA"]
    names += [f"ours, {name}" for name in NAMES.values()] + ["PyTorch"]
    rows = [["model, dtype", *names], ["---"] * (len(names) + 1)]
    for title, cell in results["cells"].items():
        found = {name: statistics.median(turns) for name, turns in cell["millisecs"].items()}
        rows.append([title, *(f"{found[name]:.3g}" if name in found else "" for name in names)])
    return lines_of(rows)


def ratios(results):
    """Returns ours, as "auto" chose, against the others: a row a cell, and a mean."""
    head = ["model, dtype", "auto chose", "in", "against the best fixed way"]
    head += ["against the best `fit`", "against `fit`", "against PyTorch"]
    head += ["plain, against by hand (95%)"]
    rows, against_best = [head, ["---"] * len(head)], []
    for title, cell in results["cells"].items():
        turns, auto = cell["millisecs"], cell["auto"]

        def best(kind, turns=turns):
            found = {name: each for name, each in turns.items() if name.startswith(kind)}
            return min(found, key=lambda name: statistics.median(found[name]))

        against = [
            statistics.median(ratios_of(turns, auto["way"], other))
            for other in (best("ours"), best("fit"), "fit", "PyTorch")
            if other in turns
        ]
        if "float16" not in title.split():
            against_best.append(against[1])
        chose = auto["way"].removeprefix("ours, ")
        row = [title, chose, f"{auto['secs']:.0f} s", *(f"{ratio:.2f}" for ratio in against)]
        rows.append([*row, overhead(turns)])
    mean = statistics.geometric_mean(against_best) if against_best else float("nan")
    told = f"Against the best `fit`, geometric mean over float32 and bfloat16: {mean:.2f}."
    return f"{lines_of(rows)}\n\n{told}"


def ratios_of(turns, one, other):
    """Returns the ratios of two contenders, round by round: each round has the machine's mood."""
    if len(turns[one]) != len(turns[other]):  # one was too slow for more than a single turn
        return [statistics.median(turns[one]) / statistics.median(turns[other])]
    return [first / second for first, second in zip(turns[one], turns[other], strict=True)]


def overhead(turns):
    """Returns the median of the rounds' ratios of ours to the loop by hand, and an interval."""
    if "by hand, plain" not in turns:
        return ""
    found = ratios_of(turns, "ours, plain", "by hand, plain")
    generator = random.Random(0)  # noqa: S311  # a bootstrap
    drawn = [statistics.median(generator.choices(found, k=len(found))) for _ in range(2000)]
    low, *_, high = statistics.quantiles(drawn, n=40)
    return f"{statistics.median(found):.2f} ({low:.2f} to {high:.2f})"


def lines_of(rows):
    """Returns a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_page(results):
    """Puts both tables between their marks in docs/performance.md."""
    text = PAGE.read_text()
    told = (
        f"{results['machine']}; {FLAGS.rounds} turns each.\n\n{table(results)}\n\n{ratios(results)}"
    )
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + told + "\n" + END + rest.partition(END)[2])


def main(_):
    """Measures one cell, or all of them, each in a process of its own."""
    if FLAGS.cell:
        print(json.dumps(measure(*FLAGS.cell.split(","))))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    results["machine"] = machine()
    for model in FLAGS.models:
        for dtype in FLAGS.dtypes:
            command = [sys.executable, *sys.argv, f"--cell={model},{dtype}"]
            lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
            results["cells"][f"{model}, {dtype}"] = json.loads(lines.splitlines()[-1])
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)
    print(f"{table(results)}\n\n{ratios(results)}")


if __name__ == "__main__":
    app.run(main)
