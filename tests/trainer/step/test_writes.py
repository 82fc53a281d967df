"""What a skip could not undo is refused while the step is traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import copies
from holders import HOLDERS
from plans import NO_SCALE, Pair, keras_model, loss_of_keras, loss_of_pair, plan_of

from trainer.step import TrainState, attempt_step
from trainer.step.writes import PASSES, WRITERS, writes_since

pytestmark = pytest.mark.sampled

READERS = {
    "ResourceGather",
    "ResourceGatherNd",
    "ResourceConditionalAccumulator",
    "LookupTableExportV2",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "StatefulPartitionedCall",
    "QueueCloseV2",
    "QueueIsClosedV2",
    "QueueSizeV2",
}


HIDDEN = {}  # a global, which no walk over a function's closure finds


def strategy_of(replicas, mirrored):
    """A strategy with a number of replicas."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


def parts_of(kind, touch):
    """A model, and a loss that calls a function before it calls the model."""
    model = keras_model() if kind == "keras" else Pair()
    loss = loss_of_keras(model) if kind == "keras" else loss_of_pair(model)

    def compute_loss(batch, training):
        touch()
        return loss(batch, training)

    return model, compute_loss


def batch_of(kind, *, bad):
    """Six examples; the last one, on the last replica, may be infinite."""
    batch = np.ones([6, 2] if kind == "keras" else [6], np.float32)
    batch[-1] = np.inf if bad else 1.0
    return tf.constant(batch)


def stepped(plan, run, batch):
    """Whether a step was applied."""
    step = tf.function(lambda: attempt_step(batch, plan, run), autograph=False)
    return bool(step().grads_finite)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["keras", "module"])
def test_a_skip_restores_what_any_holder_holds(mirrored, replicas, kind):
    """L6: after a skip because of the last replica, every copy of the variables of TensorFlow and Keras
    has its bits again, whatever Python object holds them and whoever passed it to `plan_step`; an
    applied step keeps what the loss assigned.
    """
    strategy = strategy_of(replicas, mirrored)
    with strategy.scope():
        every = [keras.Variable(0.1, trainable=False) for _ in HOLDERS]
        every += [tf.Variable(0.1, trainable=False) for _ in HOLDERS]
        HIDDEN["every"] = every

        def touch():
            for variable in HIDDEN["every"]:
                variable.assign(variable * 3.0)

        model, compute_loss = parts_of(kind, touch)
    others = [hold(one) for hold, one in zip([*HOLDERS.values()] * 2, every, strict=True)]
    plan = plan_of(model, compute_loss, strategy=strategy, others=others)
    with strategy.scope():
        run = TrainState(NO_SCALE)
    before = [copies(variable) for variable in every]
    applied_bad = stepped(plan, run, batch_of(kind, bad=True))
    after = [copies(variable) for variable in every]
    applied = stepped(plan, run, batch_of(kind, bad=False))
    moved = [copies(variable) for variable in every]

    assert not applied_bad
    assert all(len(each) == replicas for each in before)
    assert np.array(after).tobytes() == np.array(before).tobytes()
    assert applied
    np.testing.assert_allclose(np.array(moved), 0.3, rtol=1e-6)


NOT_HELD = (
    "`compute_loss` must assign only variables that a skipped step can restore; got an assignment "
    "to {name!r} ({kind}). When the step was built, the model, the trainer and the closures of its "
    "methods did not hold this variable, or it belongs to a keras.Variable whose value was "
    "assigned directly. Hold it as an attribute of the model or the trainer before the first step, "
    "or in others= of plan_step(); assign a keras.Variable itself, not its value."
)
NO_VARIABLE = (
    "`compute_loss` must not change what a skipped step cannot restore; got {kind}. Only variables "
    "can go back to an earlier state, not lookup tables, queues or iterators. Write a table or a "
    "queue in update_metrics(), which runs on applied steps only, and zip further data into "
    "train_data."
)
IN_WEIGHTS = (
    "`example_weights` must not change anything; got {what}. The weights are computed once, before "
    "the attempts of a step, so a skipped step could not undo the change. Change it in "
    "compute_loss, or in update_metrics(), which runs on applied steps only."
)


@tf.custom_gradient
def writing_backward(loss):
    """Passes a loss on; its gradient assigns a variable."""

    def gradient(upstream):
        HIDDEN["variable"].assign_add(1.0)
        return upstream

    return loss, gradient


def insert():
    """Writes to the hidden table."""
    HIDDEN["table"].insert(tf.constant([1], tf.int64), [1.0])


def write_compiled():
    """Assigns the hidden variable in a function that XLA compiles."""
    tf.function(lambda: HIDDEN["variable"].assign(1.0), jit_compile=True)()


WRITE = {
    "a global": (lambda: HIDDEN["variable"].assign_add(1.0), "AssignAddVariableOp"),
    "in a branch": (
        lambda: tf.cond(
            HIDDEN["variable"] > 0, lambda: HIDDEN["variable"].assign(1.0), lambda: 0.0
        ),
        "AssignVariableOp",
    ),
    "compiled": (
        write_compiled,
        "AssignVariableOp",
    ),
    "raw": (lambda: HIDDEN["raw"].value.assign(HIDDEN["raw"].value * 2.0), "AssignVariableOp"),
    "table": (insert, "LookupTableInsertV2"),
    "iterator": (lambda: next(HIDDEN["iterator"]), "IteratorGetNext"),
    "queue": (lambda: HIDDEN["queue"].enqueue(1.0), "QueueEnqueueV2"),
}


def hide():
    """Fills the globals."""
    HIDDEN["variable"] = tf.Variable(0.0, name="hidden")
    HIDDEN["table"] = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    HIDDEN["iterator"] = iter(tf.data.Dataset.range(3))
    HIDDEN["queue"] = tf.queue.FIFOQueue(3, tf.float32)


def refusal(plan, batch):
    """The error with which a step is refused, without the names of operations."""
    with pytest.raises(ValueError, match="must") as caught:
        stepped(plan, TrainState(NO_SCALE), batch)
    return str(caught.value)


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("kind", ["keras", "module"])
def test_writes_that_a_skip_cannot_undo_are_refused(name, kind):
    """L6: an assignment to a variable that nobody reaches, to a Keras variable behind its back, to a
    table, a queue or an iterator is found in the traced graph, however deeply it is nested.
    """
    hide()
    write, operation = WRITE[name]
    model, compute_loss = parts_of(kind, write)
    raw = model.trainable_variables[1] if kind == "keras" else keras.Variable([0.0], name="raw")
    HIDDEN["raw"] = raw if name != "raw" or kind == "keras" else keras.Variable([0.0], name="raw")
    found = refusal(plan_of(model, compute_loss), batch_of(kind, bad=False))
    place = f"{operation} at {found.split(' at ')[1].split(chr(39))[1]!r}"
    text = NO_VARIABLE if name in ("table", "iterator", "queue") else NOT_HELD
    variable = HIDDEN["raw"].value if name == "raw" else HIDDEN["variable"]
    assert found == text.format(name=variable.name, kind=place)


@pytest.mark.parametrize("kind", ["keras", "module"])
def test_a_write_in_the_backward_pass_is_refused(kind):
    """L6: a custom gradient that assigns a variable is found, too."""
    hide()
    model, loss = parts_of(kind, lambda: None)
    plan = plan_of(model, lambda batch, training: writing_backward(loss(batch, training)))

    assert "got an assignment to 'hidden:0' (" in refusal(plan, batch_of(kind, bad=False))


@pytest.mark.parametrize("kind", ["keras", "module"])
@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda: HIDDEN["variable"].assign_add(1.0), "AssignAddVariableOp on 'hidden:0'"),
        (lambda: HIDDEN["keras"].assign(1.0), "an assignment to 'kept'"),
        (insert, "LookupTableInsertV2 on a table, a queue or an iterator"),
    ],
)
def test_example_weights_change_nothing(kind, write, what):
    """L6: `example_weights` runs before the copies are read, so whatever it changes is refused, held by
    the trainer or not.
    """
    hide()
    HIDDEN["keras"] = keras.Variable(0.0, name="kept")
    model, compute_loss = parts_of(kind, lambda: None)

    def example_weights(batch):
        write()
        return tf.ones(tf.shape(batch)[:1])

    plan = plan_of(
        model,
        compute_loss,
        example_weights=example_weights,
        others=[HIDDEN["keras"], HIDDEN["variable"]],
    )
    assert refusal(plan, batch_of(kind, bad=False)) == IN_WEIGHTS.format(what=what)


def test_every_writer_of_tensorflow_is_known():
    """Every operation of TensorFlow that may change a variable, a table or a queue counts as a write;
    one that a new version adds appears here.
    """
    prefixes = ("Resource", "Stateful", "LookupTable", "InitializeTable", "Rng", "Queue")
    names = [name for name in dir(tf.raw_ops) if name.startswith(prefixes)]
    names += [name for name in dir(tf.raw_ops) if name.startswith("Assign") and "Variable" in name]
    older = {name for name in names if f"{name}V2" in names and "Apply" not in name}
    unknown = {name for name in names if not WRITERS.fullmatch(name)}

    assert unknown - older == READERS
    assert not [name for name in names if PASSES.fullmatch(name)]


def test_writes_are_found_through_calls():
    """A write is found in branches, loops, cases, mapped, compiled and recomputed functions, each time
    as a write to the resource that was captured; reads are not found.
    """
    variable, other = tf.Variable(1.0), tf.Variable(2.0)
    plain = tf.function(lambda x: variable.assign(x) + other)
    compiled = tf.function(variable.assign_add, jit_compile=True)

    def passed_on(x):
        handles = tf.raw_ops.IdentityN(input=[other.handle, variable.handle])
        tf.raw_ops.AssignVariableOp(resource=handles[1], value=x)
        return x

    ways = {
        "branch": lambda x: tf.cond(x > 0, lambda: plain(x), lambda: compiled(x)),
        "case": lambda x: tf.switch_case(
            tf.cast(x, tf.int32), [lambda: plain(x), lambda: compiled(x)]
        ),
        "loop": lambda x: tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, plain(y)), (tf.constant(0), x)
        )[1],
        "mapped": lambda x: tf.map_fn(plain, x[None])[0],
        "recomputed": tf.recompute_grad(plain),
        "passed on": passed_on,
        "passed on, called": tf.function(passed_on, autograph=False),
        "nested": tf.function(lambda y: ways["branch"](ways["loop"](y))),
        "none": lambda x: x + other,
    }
    found = {}

    def trace(name, x):
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        result = ways[name](x)
        found[name] = {id(write.resource) for write in writes_since(start, graph)}
        return result

    for name in ways:
        tf.function(lambda x, name=name: trace(name, x), autograph=False).get_concrete_function(
            tf.constant(1.0)
        )
    assert found.pop("none") == set()
    assert all(each == {id(variable.handle)} for each in found.values())
