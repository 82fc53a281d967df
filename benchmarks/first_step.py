"""The wait for the first step: seconds of CPU from the function that makes the model to its end.

    python benchmarks/first_step.py [--times=1] [--only=bert,ResNet50]

A trainer with default settings, but for `precision`, and `model.fit`, each in processes of its own,
in turn. The clock begins after TensorFlow and Keras are imported, before `trainer` is, and ends
with the first step. A table of medians goes to docs/performance.md. So does one of batches of many
lengths, by default and with `jit_compile=False`.
"""

import json
import pathlib
import random
import statistics
import time

from absl import app, flags
from turns import machine, printed_by, table, write_between

FLAGS = flags.FLAGS
flags.DEFINE_integer("times", 1, "Number of processes for each contender.", lower_bound=1)
flags.DEFINE_list("only", None, "Names of models; by default all.")
flags.DEFINE_string("one", None, "WHO,MODEL: what to measure; set for subprocesses.")
flags.DEFINE_enum("optimizer", "sgd", ["sgd", "adam"], "`fit` traces a step of Adam twice.")
flags.DEFINE_bool("profile", False, "Print the profile of --one.")

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
TITLES = {
    "bert": "BERT, 6 layers",
    "gpt2": "GPT-2, 6 layers",
    "MobileNetV2": "MobileNetV2",
    "ResNet50": "ResNet50",
    "EfficientNetB0": "EfficientNetB0",
    "DenseNet121": "DenseNet121",
    "cnn": "CNN with BatchNormalization",
    "cnn16": "the same in float16",
    "gpt": "small GPT",
    "gpt16": "the same in float16",
}
LENGTHS = range(6, 24)
EPOCHS = 3


def work_of(name):
    """Returns a function that makes a model of logits, and a batch of inputs and labels."""
    import keras
    import numpy as np

    generator = np.random.default_rng(0)
    if name in ("bert", "gpt2"):
        import keras_hub

        sizes = {"num_layers": 6, "num_heads": 4, "hidden_dim": 128, "intermediate_dim": 512}
        ids = generator.integers(1000, size=[8, 64]).astype("int32")
        if name == "gpt2":
            sizes |= {"vocabulary_size": 1000, "max_sequence_length": 64}
            inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}

            def gpt2():
                body = keras_hub.models.GPT2Backbone(**sizes)
                return keras.Model(body.input, body.token_embedding(body.output, reverse=True))

            return gpt2, (inputs, np.roll(ids, -1, 1))
        sizes |= {"vocabulary_size": 1000, "max_sequence_length": 64}
        inputs = {
            "token_ids": ids,
            "segment_ids": np.zeros_like(ids),
            "padding_mask": np.ones_like(ids),
        }

        def bert():
            body = keras_hub.models.BertBackbone(**sizes)
            return keras.Model(
                body.input, keras.layers.Dense(2, dtype="float32")(body.output["pooled_output"])
            )

        return bert, (inputs, generator.integers(2, size=8))
    if name.startswith(("cnn", "gpt")):
        from models import work_of as small

        if name.startswith("gpt"):
            return small("transformer")
        images = generator.random([32, 32, 32, 3], np.float32)
        return small_cnn, (images, generator.integers(10, size=32))
    images = generator.random([4, 96, 96, 3], np.float32)
    make = getattr(keras.applications, name)
    labels = generator.integers(10, size=4)
    settings = {"weights": None, "classes": 10, "classifier_activation": None}
    return (lambda: make(input_shape=[96, 96, 3], **settings)), (images, labels)


def small_cnn():
    """Returns a convolutional network with batch normalization."""
    from keras import Input, Sequential, layers

    hidden = []
    for width in (32, 64, 128):
        hidden += [layers.Conv2D(width, 3, use_bias=False), layers.BatchNormalization()]
        hidden += [layers.ReLU(), layers.MaxPooling2D()]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return Sequential([Input([32, 32, 3]), *hidden, *head])


def first_step(who, name):
    """Returns the seconds of CPU and of the clock that the first step takes, in this process."""
    import keras
    import tensorflow as tf  # noqa: F401  # imported before the clock starts

    build, batch = work_of(name)
    precision = "mixed_float16" if name.endswith("16") else "float32"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    size = len(batch[1])
    cpu, clock = time.process_time(), time.perf_counter()
    if who == "fit":
        keras.config.set_dtype_policy(precision)
        model = build()
        model.compile(FLAGS.optimizer, loss)
        model.fit(*batch, batch_size=size, verbose=0)
    else:
        from trainer import Trainer

        settings = {"optimizer": FLAGS.optimizer, "loss_fn": loss}
        trainer = Trainer(model=build, precision=precision, verbose=False, **settings)
        trainer.train(batch, steps=1, global_batch=size)
    return {"cpu": time.process_time() - cpu, "clock": time.perf_counter() - clock}


def many_lengths(who):
    """Returns the seconds that three epochs of batches of 18 lengths take, in this process."""
    import keras
    import numpy as np
    import tensorflow as tf  # noqa: F401

    generator = np.random.default_rng(0)
    batches = [
        (generator.normal(size=[8, n, 4]).astype("f4"), generator.normal(size=[8, 1]).astype("f4"))
        for n in LENGTHS
    ] * EPOCHS
    layers = keras.layers
    make = lambda: keras.Sequential([keras.Input([None, 4]), layers.LSTM(8), layers.Dense(1)])  # noqa: E731
    cpu, clock = time.process_time(), time.perf_counter()
    from trainer import Trainer

    settings = {"jit_compile": False} if who == "plain" else {}
    trainer = Trainer(
        model=make,
        optimizer="sgd",
        loss_fn="mse",
        precision="mixed_float16",
        verbose=False,
        **settings,
    )
    trainer.train(batches, steps=len(batches))
    return {"cpu": time.process_time() - cpu, "clock": time.perf_counter() - clock}


def main(_):
    """Measures one process, or starts all of them in turn."""
    if FLAGS.one:
        who, name = FLAGS.one.split(",")
        measure = (
            (lambda: many_lengths(who)) if name == "lengths" else lambda: first_step(who, name)
        )
        print(json.dumps(profiled(measure) if FLAGS.profile else measure()))
        return
    names = FLAGS.only or TITLES
    rows = [["model", "ours", "`fit`", "ratio"]]
    for name in names:
        found = measured(("ours", "fit"), name)
        print(name, found, flush=True)
        rows.append([TITLES[name], *row_of(found, "ours", "fit")])
    text = f"{machine()}; seconds of CPU, {FLAGS.times} processes each.\n\n{table(rows)}"
    if not FLAGS.only:
        found = measured(("auto", "plain"), "lengths")
        rows = [["batches", '`"auto"`', "`False`", "ratio"]]
        rows.append([f"{len(LENGTHS)} lengths, float16 LSTM", *row_of(found, "auto", "plain")])
        text += f"\n\n{table(rows)}"
        write_between(PAGE, "first_step.py", text)
    print(text)


def profiled(measure):
    """Returns what a function returns, and prints where it took its time."""
    import cProfile
    import pstats

    profile = cProfile.Profile(time.process_time)
    found = profile.runcall(measure)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(r"(trainer|strategies|scaling)/", 90)
    return found


def measured(contenders, name):
    """Returns the seconds of CPU of every process, by contender."""
    found = {who: [] for who in contenders}
    for _ in range(FLAGS.times):
        for who in random.sample(contenders, len(contenders)):
            found[who].append(printed_by(f"--one={who},{name}")["cpu"])
    return found


def row_of(found, one, other):
    """Returns the medians of two contenders and their ratio, as text."""
    first, second = (statistics.median(found[who]) for who in (one, other))
    return [f"{first:.1f}", f"{second:.1f}", f"{first / second:.2f}"]


if __name__ == "__main__":
    app.run(main)
