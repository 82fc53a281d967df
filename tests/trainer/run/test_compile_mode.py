"""`jit_compile="auto"` looks up by device, precision, division and data what XLA compiles."""

import dataclasses

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import IMAGES, LABELS, SmallImages, adam

import strategies
from trainer import Trainer
from trainer.run import compile_mode

pytestmark = pytest.mark.sampled


class Counting(SmallImages):
    """Counts the traces of its loss."""

    traced = 0

    def compute_loss(self, batch, training):
        """Counts a trace."""
        self.traced += 1
        return super().compute_loss(batch, training)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_a_run_traces_its_loss_once(precision):
    """L15: by default, a long run traces the loss once too: nothing is tried before its first step."""
    trainer = Counting(optimizer=adam, verbose=False, precision=precision)
    trainer.train((IMAGES, LABELS), steps=1, global_batch=8)
    assert trainer.traced == 1
    trainer.train((IMAGES, LABELS), steps=1000 if precision == "float32" else 20, global_batch=8)

    assert trainer.traced == 1
    assert trainer.jit_compile is (precision == "mixed_float16")


@pytest.mark.thorough
@pytest.mark.parametrize("known", [True, False])
def test_passes_over_several_shapes_are_not_compiled(known):
    """XLA would compile a program for each, also in float16 on a CPU."""
    spec = (tf.TensorSpec([None, 5 if known else None, 3]), tf.TensorSpec([None, 1]))
    batch = (np.ones([4, 5, 3], np.float32), np.ones([4, 1], np.float32))
    data = tf.data.Dataset.from_generator(lambda: [batch, batch], output_signature=spec)
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([None, 3]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn=lambda labels, outputs: tf.reduce_mean((labels[:, None] - outputs) ** 2, [1, 2]),
        precision="mixed_float16",
        verbose=False,
    )
    trainer.train(data, steps=2)

    assert trainer.jit_compile is known
    assert trainer.totals.attempted == 2


@pytest.mark.parametrize("precision", ["float32", "float64", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("avx512", [True, False])
def test_half_precision_that_the_cpu_lacks_is_compiled(monkeypatch, avx512, precision):
    """TensorFlow computes float16, and bfloat16 without AVX-512, in scalar loops."""
    monkeypatch.setattr(compile_mode, "has_avx512", lambda: avx512)
    lacking = precision == "mixed_float16" or (precision == "mixed_bfloat16" and not avx512)

    assert Trainer(precision=precision, verbose=False).jit_compile is lacking


class Augmented(SmallImages):
    """Turns images at random with a layer that is no part of the model."""

    def __init__(self, **arguments):
        """Makes the layer."""
        super().__init__(**arguments)
        self.turn = keras.layers.RandomRotation(0.1, name="turn")

    def compute_loss(self, batch, training):
        """The loss of turned images."""
        images, labels = batch
        return super().compute_loss((self.turn(images, training=training), labels), training)


@pytest.mark.thorough
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_that_xla_cannot_compile_runs_without_it(monkeypatch, caplog, on_gpu):
    """By default, a layer without XLA is no error, wherever the loss uses it; one line names it."""
    if on_gpu:
        pretend(monkeypatch, on_cpu=False)
    trainer = Augmented(optimizer=adam, precision="mixed_float16", verbose=False)
    trainer.train((IMAGES, LABELS), steps=1, global_batch=8)

    [line] = [text for text in caplog.messages if "XLA" in text] or [""]
    assert ("'turn' (RandomRotation)" in line) != on_gpu
    assert trainer.totals.attempted == 1
    assert trainer.jit_compile is False


@pytest.mark.thorough
def test_a_step_that_xla_was_asked_to_compile_and_cannot_ends_with_the_way_out():
    """TensorFlow's error has a note that says what to pass instead."""
    trainer = Augmented(optimizer=adam, jit_compile=True, verbose=False)
    with pytest.raises(tf.errors.OpError) as error:
        trainer.train((IMAGES, LABELS), steps=1, global_batch=8)

    assert any("jit_compile=False" in note for note in error.value.__notes__)


class Sparse(SmallImages):
    """Computes the losses of some examples only."""

    def compute_loss(self, batch, training):
        """Doubles the losses of examples of class 1."""
        losses = super().compute_loss(batch, training)
        rows = tf.where(batch[1] == 1)
        chosen = tf.gather(losses, rows[:, 0])
        return losses + tf.scatter_nd(rows, chosen, tf.shape(losses, tf.int64))


@pytest.mark.thorough  # takes seconds
def test_sizes_that_depend_on_values_are_left_to_tensorflow(caplog):
    """XLA may compute wrong numbers behind them: "auto" does not choose it, and True warns."""
    for mode, kept in (("auto", False), (True, True)):
        caplog.clear()
        trainer = Sparse(optimizer=adam, verbose=False, jit_compile=mode, precision="mixed_float16")
        trainer.train((IMAGES, LABELS), 1, global_batch=8)
        assert trainer.jit_compile is kept
        assert "wrong numbers" in caplog.messages[0]


def padded(batch):
    """Adds to images an axis whose size the element spec does not give."""
    return batch.map(lambda images, labels: (tf.repeat(images, tf.size(labels) // 8, -1), labels))


def as_strings(batch):
    """Returns labels as strings beside the images and labels."""
    return batch.map(lambda images, labels: (images, labels, tf.strings.as_string(labels)))


@pytest.mark.parametrize(
    ("settings", "change", "mode"),
    [
        ({}, None, "step"),
        ({"precision": "mixed_float16"}, None, "step"),
        ({"num_microbatches": 2}, None, False),
        ({}, padded, False),
        ({}, as_strings, False),
    ],
)
def test_what_a_run_on_a_gpu_begins_with(monkeypatch, caplog, settings, change, mode):
    """The whole step as one program, unless batches may have several shapes, or are not numbers,
    which a warning says.
    """
    pretend(monkeypatch, on_cpu=False)
    trainer = SmallImages(optimizer=adam, verbose=False, **settings)
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(8)
    dataset = change(dataset) if change else dataset
    trainer.train(dataset, steps=2)

    assert trainer.jit_compile == access.plan(trainer).jit_compile == mode
    assert trainer.totals.attempted == 2
    assert len([each for each in caplog.messages if "XLA" in each]) == bool(change)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["dry_run", "overfit_one_batch"])
def test_what_comes_before_a_run_on_a_gpu_takes_its_mode(monkeypatch, method):
    """It tries the program that a run would begin with. What comes after it chooses for itself."""
    pretend(monkeypatch, on_cpu=False)
    several = padded(tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(8))
    calls = [
        (lambda trainer: trainer.train((IMAGES, LABELS), steps=1, global_batch=8), "step"),
        (lambda trainer: trainer.train_on_batch((IMAGES, LABELS)), False),
        (lambda trainer: trainer.train(several, steps=1), False),
    ]
    for call, mode in calls:
        trainer = SmallImages(optimizer=adam, verbose=False)
        getattr(trainer, method)((IMAGES, LABELS), global_batch=8)
        assert access.plan(trainer).jit_compile == "step"
        call(trainer)
        assert trainer.jit_compile == access.plan(trainer).jit_compile == mode


def test_batches_that_are_passed_one_by_one_are_not_compiled(monkeypatch):
    """Their shapes may change with each call, and XLA would compile each."""
    pretend(monkeypatch, on_cpu=False)
    trainer = SmallImages(optimizer=adam, verbose=False)
    trainer.train_on_batch((IMAGES, LABELS))

    assert trainer.jit_compile is False


def pretend(monkeypatch, **capabilities_to_show):
    """Lets all strategies say of themselves what they are not, such as `on_cpu=False`."""
    capabilities = strategies.capabilities
    monkeypatch.setattr(
        strategies,
        "capabilities",
        lambda each: dataclasses.replace(capabilities(each), **capabilities_to_show),
    )


class CountingBatches(SmallImages):
    """Counts its batches in an int32 variable, which TensorFlow keeps on the host."""

    def __init__(self, **settings):
        """Creates the variable."""
        super().__init__(**settings)
        with self.strategy.scope():
            self.count = tf.Variable(0, trainable=False)

    def compute_loss(self, batch, training):
        """Counts a batch."""
        self.count.assign_add(1)
        return super().compute_loss(batch, training)


@pytest.mark.thorough
def test_int32_variables_are_out_of_reach_for_xla_on_a_gpu(monkeypatch):
    """There, "auto" does not use XLA; on a CPU it does."""
    for on_cpu in (True, False):
        if not on_cpu:
            pretend(monkeypatch, on_cpu=False)
        trainer = CountingBatches(optimizer=adam, verbose=False, precision="mixed_float16")
        trainer.train((IMAGES, LABELS), steps=1, global_batch=8)
        assert trainer.jit_compile is on_cpu
