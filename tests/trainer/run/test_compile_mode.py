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
def test_a_step_that_xla_cannot_compile_runs_without_it(caplog):
    """By default, a layer without XLA is no error, wherever the loss uses it; one line names it."""
    trainer = Augmented(optimizer=adam, precision="mixed_float16", verbose=False)
    assert trainer.jit_compile is True  # where this CPU has only slow kernels
    overfitted = trainer.overfit_one_batch((IMAGES, LABELS), 1, global_batch=8)
    trainer.train((IMAGES, LABELS), steps=1, global_batch=8)

    line = next(text for text in caplog.messages if "XLA" in text)
    assert "'turn_1/ImageProjectiveTransformV3'" in line
    assert len(overfitted.losses) == 1
    assert trainer.totals.attempted == 1
    assert trainer.jit_compile is False


@pytest.mark.thorough
def test_a_step_that_xla_was_asked_to_compile_and_cannot_is_refused():
    """jit_compile=True is an error before the first step, in one line instead of dozens."""
    trainer = Augmented(optimizer=adam, jit_compile=True, verbose=False)
    with pytest.raises(ValueError, match=r"`jit_compile`.*turn"):
        trainer.train((IMAGES, LABELS), steps=1, global_batch=8)

    assert trainer.totals.attempted == 0


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


class Unbounded(SmallImages):
    """Passes the loss through a list for which XLA finds no memory when it compiles the step."""

    def compute_loss(self, batch, training):
        """The loss. The list has no limit, which only its values say."""
        losses = super().compute_loss(batch, training)
        no_limit = -tf.cast(tf.sign(tf.reduce_sum(tf.stop_gradient(losses))), tf.int32)
        empty = tf.raw_ops.EmptyTensorList(
            element_shape=[-1], max_num_elements=no_limit, element_dtype=tf.float32
        )
        held = tf.raw_ops.TensorListPushBack(input_handle=empty, tensor=losses)
        return tf.raw_ops.TensorListPopBack(
            input_handle=held, element_shape=[-1], element_dtype=tf.float32
        ).tensor


def test_a_step_that_xla_fails_to_compile_ends_with_the_way_out(monkeypatch):
    """A failure of the compiler that no operation foretells says what to pass instead."""
    pretend(monkeypatch, on_cpu=False)
    trainer = Unbounded(optimizer=adam, verbose=False)
    with pytest.raises(tf.errors.OpError) as error:
        trainer.train((IMAGES, LABELS), steps=3, global_batch=8)

    assert any("jit_compile=False" in note for note in error.value.__notes__)


@pytest.mark.thorough
def test_operations_without_xla_are_named_on_a_gpu(monkeypatch, caplog):
    """As on a CPU that needs XLA."""
    pretend(monkeypatch, on_cpu=False)
    trainer = Augmented(optimizer=adam, verbose=False)
    trainer.train((IMAGES, LABELS), steps=1, global_batch=8)

    assert trainer.jit_compile is False
    assert len([message for message in caplog.messages if "XLA" in message]) == 1


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
def test_int32_variables_are_out_of_reach_for_xla_on_a_gpu(caplog, monkeypatch):
    """There, True is refused, and "auto" does not use XLA; on a CPU, both compile."""
    settings = {"optimizer": adam, "verbose": False, "precision": "mixed_float16"}
    assert trained(CountingBatches(**settings, jit_compile=True)) is True

    auto = CountingBatches(**settings, jit_compile="auto")
    assert auto.jit_compile is True  # where this CPU has only slow kernels
    pretend(monkeypatch, on_cpu=False)
    caplog.clear()
    assert trained(auto) is False
    assert "int32" in caplog.messages[0]
    with pytest.raises(ValueError, match=r"`jit_compile`.*int32"):
        trained(CountingBatches(**settings, jit_compile=True))


def new_trace(parts):
    """The newest trace of a step."""
    return parts.run_steps._list_all_concrete_functions()[-1]


class CountingSGD(keras.optimizers.SGD):
    """Counts its updates of variables in an int32 variable of its own."""

    def build(self, variables):
        """Creates the variable."""
        super().build(variables)
        self.updates = tf.Variable(0, trainable=False)

    def update_step(self, gradient, variable, learning_rate):
        """Counts an update."""
        self.updates.assign_add(1)
        super().update_step(gradient, variable, learning_rate)


class PrintingSGD(keras.optimizers.SGD):
    """Prints in each update of a variable, which XLA cannot compile."""

    def update_step(self, gradient, variable, learning_rate):
        """Prints."""
        tf.print("an update")
        super().update_step(gradient, variable, learning_rate)


def test_operations_of_an_optimizer_that_xla_cannot_compile_are_named():
    """Where XLA compiles the update alone, too."""
    with pytest.raises(ValueError, match=r"`jit_compile`.*/PrintV2'"):
        trained(SmallImages(optimizer=PrintingSGD, jit_compile="update", verbose=False))


def test_int32_variables_of_an_optimizer_are_out_of_reach_too(monkeypatch):
    """Where XLA compiles the update alone, what the update counts in is refused on a GPU."""
    trainer = SmallImages(optimizer=CountingSGD, jit_compile="update", verbose=False)
    assert trained(trainer) == "update"
    arguments = (trainer, trainer._parts, new_trace)
    assert compile_mode.compilable_parts(*arguments, auto=False) is trainer._parts
    pretend(monkeypatch, on_cpu=False)
    with pytest.raises(ValueError, match=r"must not be 'update' on a GPU .*\bint32 variables"):
        compile_mode.compilable_parts(*arguments, auto=False)


class Reading(Trainer):
    """Reads numbers from texts, if its batches hold texts; prints, if it is told to."""

    prints = False

    def compute_loss(self, batch, training):
        """The outputs, squared."""
        del training
        inputs = batch["x"]
        if isinstance(inputs, tf.RaggedTensor):
            inputs = inputs.to_tensor(shape=[None, 2])
        if self.prints:
            tf.print(inputs)
        return tf.reduce_sum(self.model(inputs) ** 2, axis=1)


@pytest.mark.parametrize("mode", [True, pytest.param("step", marks=pytest.mark.thorough)])
def test_later_data_that_xla_cannot_compile_are_refused(mode):
    """A later call of `train` may bring batches, or operations, that the first did not have."""
    rows = tf.data.Dataset.from_tensors({"x": tf.ones([4, 2])}).repeat()
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    trainer = Reading(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        verbose=False,
        jit_compile=mode,
    )
    trainer.train(rows, steps=2)
    for _ in range(2):  # the second time too
        with pytest.raises(ValueError, match=r"`jit_compile`.*ragged"):
            trainer.train(tf.data.Dataset.from_tensors({"x": ragged}).repeat(), steps=4)
    trainer.prints = True
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`jit_compile`.*PrintV2"):
            trainer.train(rows, steps=4)
    trainer.prints = False
    assert trainer.train(rows, steps=4).totals.applied == 4


def test_data_that_were_refused_do_not_speak_against_others():
    """Each trace is judged by its own operations: here, only integers are printed."""

    class Printing(Reading):
        def compute_loss(self, batch, training):
            if batch["x"].dtype == tf.int32:
                tf.print(batch["x"])
            return super().compute_loss({"x": tf.cast(batch["x"], tf.float32)}, training)

    def rows(dtype, count):
        return tf.data.Dataset.from_tensors({"x": tf.ones([count, 2], dtype)}).repeat()

    trainer = Printing(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        verbose=False,
        jit_compile=True,
    )
    trainer.train(rows(tf.float32, 4), steps=2)
    with pytest.raises(ValueError, match="PrintV2"):
        trainer.train(rows(tf.int32, 4), steps=4)
    assert trainer.train(rows(tf.int64, 4), steps=4).totals.applied == 4


def test_what_xla_cannot_compile_is_refused_of_single_batches_too():
    """`train_on_batch` traces a step of its own."""
    trainer = Reading(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        verbose=False,
        jit_compile=True,
    )
    trainer.prints = True
    with pytest.raises(ValueError, match="'PrintV2', 'StringFormat'"):
        trainer.train_on_batch({"x": tf.ones([4, 2])})


@pytest.mark.thorough
def test_int32_variables_are_within_reach_on_a_tpu(monkeypatch):
    """A TPU holds int32 variables itself, so True stays allowed there."""
    trainer = CountingBatches(optimizer=adam, verbose=False, jit_compile=True)
    trained(trainer)
    arguments = (trainer, trainer._parts, new_trace)
    pretend(monkeypatch, on_cpu=False)
    with pytest.raises(ValueError, match="on a GPU"):
        compile_mode.compilable_parts(*arguments, auto=False)

    pretend(monkeypatch, on_cpu=False, decides_in_replica=True)
    assert compile_mode.compilable_parts(*arguments, auto=False) is trainer._parts


def trained(trainer):
    """Takes a step; returns the compile mode."""
    trainer.train((IMAGES, LABELS), steps=1, global_batch=8)
    return trainer.jit_compile
