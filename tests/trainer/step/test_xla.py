"""What XLA compiles of a step, by compile mode."""

import re

import access
import keras
import pytest
import tensorflow as tf
from generators import ONE_OF_EACH
from helpers import IMAGES, LABELS, SmallImages, adam, assert_close, trained_small

from trainer import Updates
from trainer.step import attempt
from trainer.step.attempt import apply_or_skip
from trainer.step.xla import (
    COMPILE_MODES,
    WITH_PASSES,
    adds_in_rows,
    compiled_differentiation,
    compiled_functions,
    compiled_update,
    definitions,
    operations_sized_by_values,
    used_nodes,
)

pytestmark = pytest.mark.sampled


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "mode"),
    [
        *[(adam, mode) for mode in COMPILE_MODES if mode is not False],
        (keras.optimizers.Lion, "update"),
        pytest.param(keras.optimizers.Lion, "elementwise", marks=pytest.mark.slow),
        pytest.param(keras.optimizers.Lion, True, marks=pytest.mark.slow),
    ],
)
def test_every_compile_mode_computes_the_same(make, mode):
    """All compile modes give equal results except for rounding."""
    assert_close(trained_small(make=make), trained_small(make=make, jit_compile=mode))


@pytest.mark.parametrize("mode", ["update", "step"])
def test_an_update_of_several_replicas_is_not_compiled(mirrored, mode):
    """The modes that compile the update are refused on several replicas, because Keras updates all
    copies together, outside of what XLA compiles.
    """
    with pytest.raises(ValueError, match="`jit_compile`"):
        SmallImages(jit_compile=mode, strategy=mirrored(3))


def operations(function):
    """A traced function's operations, by whether XLA compiles them."""
    graph = function.get_concrete_function(tf.TensorSpec([2, 2])).graph
    found = {True: set(), False: set()}
    for operation in graph.get_operations():
        compiled = "_XlaCompile" in operation.node_def.attr and operation.get_attr("_XlaCompile")
        found[bool(compiled)].add(operation.type)
    return found


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_what_a_pass_compiles(mode):
    """Mode "elementwise" compiles elementwise operations but no products, True the whole pass, and the
    other modes nothing of it. All return the same.
    """
    run = compiled_differentiation(lambda x: tf.matmul(x, x) + 1.0, mode)
    found = operations(run)

    assert run(tf.ones([2, 2])).numpy().tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert ("AddV2" in found[True]) == (mode == "elementwise")
    assert "MatMul" in found[False]
    assert run._jit_compile == (True if mode is True else None)


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_what_an_update_compiles(mode):
    """Mode "update" compiles the update as one function; the others leave it as it is."""
    weight = tf.Variable(1.0)

    def update(gradient):
        weight.assign_sub(gradient)

    run = compiled_update(update, mode)
    run(tf.constant(0.25))

    assert float(weight) == 0.75
    assert (run is update) == (mode != "update")
    if mode == "update":
        assert run._jit_compile


@pytest.mark.thorough
def test_a_whole_step_is_one_program():
    """In mode "step", everything that the loop computes but the data and its own bookkeeping is in
    one function, which XLA compiles.
    """
    trainer = trained_small(precision="mixed_float16", jit_compile="step")
    [trace] = access.traces(access.steps(trainer))
    definition, library = definitions(trace)
    [program] = compiled_functions(definition, library)
    inside = {node.op for node in used_nodes(library[program], library, set())}
    others = {name: function for name, function in library.items() if name != program}
    outside = {node.op for node in used_nodes(definition, others, set())}
    of_a_step = {"Conv2D", "Conv2DBackpropFilter", "MatMul", "IsFinite", "ResourceApplyAdam"}

    assert of_a_step <= inside
    assert not of_a_step & outside


def turned(outcome, apply, skip):
    """`apply_or_skip` with the branches in the other order."""
    other = outcome._replace(grads_finite=~outcome.grads_finite)
    return apply_or_skip(other, skip, apply)._replace(grads_finite=outcome.grads_finite)


@pytest.mark.thorough
def test_a_step_that_is_one_program_runs_on_the_device_of_its_variables():
    """On a device that is not the default one, too: in `train`, and in `train_on_batch`."""
    other = tf.distribute.OneDeviceStrategy("/device:CPU:1")
    usual, apart = (trained_small(jit_compile="step", strategy=each) for each in ("default", other))
    for trainer in (usual, apart):
        trainer.train_on_batch((IMAGES, LABELS))

    assert "CPU:1" in access.state(apart).halted.device
    assert_close(usual, apart)


@pytest.mark.slow
def test_the_program_copies_no_weight(monkeypatch):
    """The compiled program updates weights where they are. With the branches of the verdict in the
    other order, XLA copies each of them after every step.
    """

    def copied():
        trainer = trained_small(steps=1, precision="mixed_float16", jit_compile="step")
        entry = program_of(trainer)
        shapes = [",".join(map(str, each.shape)) for each in trainer.model.trainable_variables]
        return [f for f in shapes if re.search(rf"= f32\[{f}\]\S* copy\(", entry)]

    assert copied() == []
    monkeypatch.setattr(attempt, "apply_or_skip", turned)
    assert len(copied()) >= 2


def program_of(trainer):
    """Returns what XLA makes of a step: the main computation, as text."""

    @tf.function(jit_compile=True, autograph=False)
    def program(*batch):
        found = trainer.train_step(batch)
        return [each for each in found if tf.get_static_value(each) is None]

    lowered = program.experimental_get_compiler_ir(tf.constant(IMAGES[:8]), tf.constant(LABELS[:8]))
    text = lowered(stage="optimized_hlo")
    return text[text.index("\nENTRY") :]


class Wide(SmallImages):
    """Has a matrix of 64 x 100."""

    def build_model(self):
        """One dense layer."""
        layers = [keras.layers.Flatten(), keras.layers.Dense(100), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input(IMAGES.shape[1:]), *layers])


@pytest.mark.slow
def test_the_program_writes_no_squares(monkeypatch):
    """The norm of the gradients reads each of them once, and does not write its squares to memory,
    as the plain sum does.
    """

    def squares():
        trainer = Wide(optimizer=adam, verbose=False, jit_compile="step")
        trainer.train((IMAGES, LABELS), steps=1, global_batch=8)
        sizes = r"(?:64,100|6400|32,200)"
        return re.findall(rf"multiply\S* = f32\[{sizes}\]", program_of(trainer))

    assert attempt.adds_in_rows is adds_in_rows
    assert squares() == []
    monkeypatch.setattr(attempt, "adds_in_rows", lambda *_: False)
    assert squares()


class WrongRows(SmallImages):
    """Returns one row too many: of the losses, or of what goes with them."""

    def __init__(self, where, **arguments):
        """Stores where."""
        super().__init__(optimizer=adam, verbose=False, **arguments)
        self.where = where

    def compute_loss(self, batch, training):
        """The losses, and something for each example."""
        losses = super().compute_loss(batch, training)
        longer = tf.concat([losses, losses[:1]], 0)
        return (longer, losses) if self.where == "losses" else (losses, longer)

    def update_metrics(self, batch, aux):
        """Uses the rows of both."""
        self.metrics["mean"].update_state(aux)

    def build_metrics(self):
        """A mean."""
        return {"mean": keras.metrics.Mean()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "mode", "num_microbatches"),
    [*(("losses", mode, 1) for mode in (False, *WITH_PASSES)), ("aux", False, 2)],
)
def test_a_row_too_many_is_noticed_where_sizes_are_unknown(where, mode, num_microbatches):
    """XLA leaves assertions out. Batches whose sizes the trace does not know are checked by a
    reshape, which XLA refuses when it compiles. Aux is cut only where batches are divided.
    """
    trainer = WrongRows(where, jit_compile=mode, num_microbatches=num_microbatches)
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(8)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?i)compute_loss"):
        trainer.train(data, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "known"), [(8, False), (7, True)])
def test_microbatches_of_a_whole_step_may_have_any_size(size, known):
    """Parts of unknown or different sizes are trained on as without XLA."""
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).repeat()
    data = data.batch(size, drop_remainder=known)
    settings = {"optimizer": adam, "seed": 1, "num_microbatches": 3, "verbose": False}
    trainers = [SmallImages(jit_compile=mode, **settings) for mode in (False, "step")]
    for trainer in trainers:
        trainer.train(data, steps=3)
    assert_close(*trainers)


def test_an_operation_whose_size_depends_on_values_is_named_wherever_it_is_called():
    """XLA compiles it, maybe with wrong numbers. `tf.where` with three arguments is none; unused
    results do not count, and neither does what is not compiled.
    """

    @tf.function
    def inner(x):
        with tf.name_scope("chosen"):
            return tf.reduce_sum(tf.gather(x, tf.where(x > 0)[:, 0]))

    def outer(x):
        tf.unique(x)  # its result is not used
        return tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: tf.where(x > 0, x, 0.0)[0])

    def found(**arguments):
        function = tf.function(outer, **arguments)
        return operations_sized_by_values(function.get_concrete_function(tf.TensorSpec([4])))

    assert found(jit_compile=True) == "'chosen/Where'"
    assert found() == ""


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=lambda rule: type(rule).__name__)
def test_a_step_that_is_one_program_uses_no_int32_variable(rule):
    """So a GPU can run it: neither the loss scale nor the counts, metrics, seeds and averages are
    int32 variables.
    """
    trainer = SmallImages(
        optimizer=keras.optimizers.Adam,
        precision="mixed_float16",
        loss_scale=rule,
        jit_compile="step",
        updates=Updates(ema_momentum=0.9),
        seed=1,
        verbose=False,
    )
    trainer.train((IMAGES, LABELS), steps=1, global_batch=8)

    [trace] = access.traces(access.steps(trainer))
    assert tf.int32 not in {variable.dtype for variable in trace.variables}
