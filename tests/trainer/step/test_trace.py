"""What a traced step reads, writes and calls; what it writes is restored after a skip."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import copies
from plans import NO_SCALE, Pair, keras_model, loss_of_keras, loss_of_pair, plan_of

from trainer import Trainer
from trainer.step import TrainState, attempt_step
from trainer.step.trace import (
    PASSES,
    WRITERS,
    any_depends,
    graph_around_loops,
    inner_graphs,
    operations_before,
    writes_since,
)

pytestmark = pytest.mark.sampled

X = np.random.default_rng(0).normal(size=[8, 3]).astype(np.float32)
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


def by_handle(variable):
    """Triples a variable of which the trace knows no more than the handle."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=3.0 * value)


def in_branch(variable):
    """Triples a variable in a branch of a condition."""
    tf.cond(variable > 0.0, lambda: variable.assign(3.0 * variable), lambda: variable + 0.0)


def in_loop_of_graph(variable):
    """Triples a variable in a loop of the graph."""
    tf.while_loop(
        lambda i: i < 1, lambda i: (i + 1, variable.assign(3.0 * variable))[:1], [tf.constant(0)]
    )


def compiled(variable):
    """Triples a variable in a function that XLA compiles."""
    tf.function(lambda: variable.assign(3.0 * variable), jit_compile=True)()


@tf.custom_gradient
def writing_backward(loss):
    """Passes a loss on; its gradient triples a variable."""

    def gradient(upstream):
        HIDDEN["variable"].assign(3.0 * HIDDEN["variable"])
        return upstream

    return loss, gradient


def no_write(variable):
    """Writes nothing: the gradient does."""


WRITE = {
    "plain": lambda variable: variable.assign(3.0 * variable),
    "in a branch": in_branch,
    "in a loop": in_loop_of_graph,
    "compiled": compiled,
    "in the gradient": no_write,
    "by its handle": by_handle,
}


@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*WRITE, "keras"])
@pytest.mark.parametrize("kind", ["keras", "module"])
def test_a_skip_restores_what_the_trace_writes(mirrored, replicas, kind, name):
    """L6: after a skip because of the last replica, every copy of a variable that no object holds has
    its bits again, however deeply the loss, or its gradient, hides the write; an applied step keeps
    what was assigned.
    """
    strategy = strategy_of(replicas, mirrored)
    with strategy.scope():
        make = keras.Variable if name == "keras" else tf.Variable
        HIDDEN["variable"] = make(0.1, trainable=False)
        write = WRITE.get(name, WRITE["plain"])
        model, loss = parts_of(kind, lambda: write(HIDDEN["variable"]))

    def compute_loss(batch, training):
        losses = loss(batch, training)
        return writing_backward(losses) if name == "in the gradient" else losses

    plan = plan_of(model, compute_loss, strategy=strategy)
    with strategy.scope():
        run = TrainState(NO_SCALE)
    before = copies(HIDDEN["variable"])
    applied_bad = stepped(plan, run, batch_of(kind, bad=True))
    after = copies(HIDDEN["variable"])
    applied = stepped(plan, run, batch_of(kind, bad=False))

    assert not applied_bad
    assert len(before) == replicas
    assert np.array(after).tobytes() == np.array(before).tobytes()
    assert applied
    np.testing.assert_allclose(np.array(copies(HIDDEN["variable"])), 0.3, rtol=1e-6)


def insert():
    """Writes to the hidden table."""
    HIDDEN["table"].insert(tf.constant([1], tf.int64), [1.0])


def hide():
    """Fills the globals."""
    HIDDEN["variable"] = tf.Variable(0.0, name="hidden")
    HIDDEN["table"] = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    HIDDEN["iterator"] = iter(tf.data.Dataset.range(3))
    HIDDEN["queue"] = tf.queue.FIFOQueue(3, tf.float32)


@pytest.mark.parametrize(
    ("write", "operation"),
    [
        (insert, "LookupTableInsertV2"),
        (lambda: next(HIDDEN["iterator"]), "IteratorGetNext"),
        (lambda: HIDDEN["queue"].enqueue(1.0), "QueueEnqueueV2"),
    ],
    ids=["table", "iterator", "queue"],
)
def test_writes_that_a_skip_cannot_undo_are_refused(write, operation):
    """L6: a write to a table, a queue or an iterator is found in the traced graph."""
    hide()
    model, compute_loss = parts_of("keras", write)
    with pytest.raises(ValueError, match=rf"`compute_loss` .*{operation}"):
        stepped(plan_of(model, compute_loss), TrainState(NO_SCALE), batch_of("keras", bad=False))


def test_a_hidden_random_generator_of_keras_is_refused():
    """It would draw the same numbers on every replica, and others in a resumed run."""
    hidden = keras.random.SeedGenerator(1)
    model, compute_loss = parts_of("keras", lambda: keras.random.normal([], seed=hidden))
    with pytest.raises(ValueError, match="`seed` must be a SeedGenerator that the model"):
        stepped(plan_of(model, compute_loss), TrainState(NO_SCALE), batch_of("keras", bad=False))


@pytest.mark.parametrize(
    "write",
    [lambda: HIDDEN["variable"].assign_add(1.0), lambda: HIDDEN["keras"].assign(1.0), insert],
    ids=["variable", "keras", "table"],
)
def test_example_weights_change_nothing(write):
    """L6: `example_weights` runs before the copies are read, so whatever it changes is refused, held by
    the trainer or not.
    """
    hide()
    HIDDEN["keras"] = keras.Variable(0.0, name="kept")
    model, compute_loss = parts_of("keras", lambda: None)

    def example_weights(batch):
        write()
        return tf.ones(tf.shape(batch)[:1])

    plan = plan_of(
        model,
        compute_loss,
        example_weights=example_weights,
        others=[HIDDEN["keras"], HIDDEN["variable"]],
    )
    with pytest.raises(ValueError, match="`example_weights` must not change"):
        stepped(plan, TrainState(NO_SCALE), batch_of("keras", bad=False))


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


def trainer_of(precision):
    """A trainer whose loss calls the model in a `tf.function`: the same in all passes."""
    forward = tf.function(lambda model, x: model(x))

    class Own(Trainer):
        def build_model(self):
            return keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def compute_loss(self, batch, training):
            outputs = tf.cast(forward(self.model, batch), tf.float32)
            return tf.reduce_mean(outputs**2, axis=1)

    return Own(precision=precision, seed=0, verbose=False)


@pytest.mark.parametrize("evaluates_first", [False, True])
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_refused(precision, evaluates_first):
    """Without the error the evaluation would be in half precision, or the training in float32."""
    trainer = trainer_of(precision)

    def train():
        trainer.train(X, steps=1, global_batch=4)

    def evaluate():
        trainer.evaluate(X, global_batch=4)

    first, second = (evaluate, train) if evaluates_first else (train, evaluate)
    first()
    with pytest.raises(ValueError, match=r"`compute_loss` must not call a tf\.function"):
        second()


@pytest.mark.thorough
@pytest.mark.parametrize("reads", ["teacher", "layer in float32", "variable"])
def test_what_has_one_precision_is_accepted(reads):
    """A function that reads no layer in half precision computes the same in every pass."""
    scale = tf.Variable(2.0, trainable=False)
    teacher = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, kernel_initializer="ones")])

    @tf.function
    def helper(model, x):
        if reads == "teacher":
            return teacher(x)
        return model.layers[0](x) if reads == "layer in float32" else scale * x

    class Own(Trainer):
        def build_model(self):
            self.scale, self.teacher = scale, teacher
            teacher.trainable = False
            first = keras.layers.Dense(2, dtype="float32")
            return keras.Sequential([keras.Input([3]), first, keras.layers.Dense(2)])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def compute_loss(self, batch, training):
            outputs = tf.cast(self.model(batch, training=training), tf.float32)
            extra = tf.reduce_mean(tf.cast(helper(self.model, batch), tf.float32) ** 2, axis=1)
            return tf.reduce_mean(outputs**2, axis=1) + extra

    trainer = Own(precision="mixed_bfloat16", seed=0, verbose=False)
    before = trainer.evaluate(X, global_batch=4)["loss"]
    trainer.train(X, steps=2, global_batch=4)

    assert trainer.evaluate(X, global_batch=4)["loss"] < before


def only_in_a_loop(step, batch):
    """One trace of the step, which runs twice."""
    reports = []

    def body(i):
        reports.append(step(batch))
        return (i + 1,)

    tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])
    return reports[0]


def twice(step, batch):
    """Two updates with one batch."""
    step(batch)
    return step(batch)


@pytest.mark.parametrize("how", [twice, only_in_a_loop])
@pytest.mark.parametrize("online", [False, True])
def test_any_other_number_of_updates_is_refused(how, online):
    """Before the first step, in a run and with `train_on_batch`."""

    class Own(Trainer):
        def train_step(self, batch):
            return how(super().train_step, batch)

    trainer = Own(
        model=lambda: keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
    )
    data = X, X[:, :1]
    with pytest.raises(ValueError, match="`train_step` must"):
        trainer.train_on_batch(data) if online else trainer.train(data, steps=2, global_batch=4)

    assert trainer.totals.attempted == 0


def in_loop(inner):
    """Calls a function in a loop of the graph."""
    return tf.while_loop(lambda i: i < 2, lambda i: i + 1 + inner(), [0])[0]


def in_condition(inner):
    """Calls a function in both branches of a condition."""
    return tf.cond(tf.constant(0.0) < 1.0, inner, inner)


def in_function(inner):
    """Calls a function in a `tf.function` of its own."""
    return tf.function(inner)()


def nothing(inner):
    """Calls a function."""
    return inner()


def found_in(*places):
    """What is found in nested places, outermost first: the kinds, and the graph around the loops."""
    found = []

    def innermost():
        found.append((inner_graphs(outer), graph_around_loops(outer)))
        return tf.constant(0)

    def nested(places):
        if not places:
            return innermost()
        graphs.append(tf.compat.v1.get_default_graph())
        return places[0](lambda: nested(places[1:]))

    graphs = []
    outer = tf.Graph()
    with outer.as_default():
        nested(places)
    kinds, around = found[0]
    return kinds, None if around is None else graphs.index(around)


@pytest.mark.parametrize(
    ("places", "kinds", "around"),
    [
        ([nothing], set(), None),
        ([in_loop], {"loop"}, 0),
        ([in_condition], {"condition"}, None),
        ([in_function], {"function"}, None),
        ([in_loop, in_loop], {"loop"}, 0),
        ([in_loop, in_condition], {"loop", "condition"}, 0),
        ([in_condition, in_loop], {"loop", "condition"}, 1),
        ([in_loop, in_condition, in_loop], {"loop", "condition"}, 0),
        ([in_function, in_loop], {"loop", "function"}, 1),
        ([in_loop, in_function], {"loop", "function"}, None),
        ([in_loop, in_function, in_loop], {"loop", "function"}, 2),
    ],
)
def test_what_is_traced(places, kinds, around):
    """`around` is the position of the place whose graph holds the loops: what is computed there is
    computed once, and never in a function that TensorFlow may call again elsewhere.
    """
    assert found_in(*places) == (kinds, around)


def test_a_loop_around_the_pass_does_not_count():
    """A pass that is traced in a loop itself, as a microbatch may be, ends there."""
    seen = []

    def body():
        outer = tf.compat.v1.get_default_graph()
        seen.append((inner_graphs(outer), graph_around_loops(outer)))
        in_loop(lambda: seen.append(graph_around_loops(outer) is outer) or tf.constant(0))
        return tf.constant(0)

    with tf.Graph().as_default():
        in_loop(body)
    assert seen == [(set(), None), True]


def test_a_shape_is_no_dependence():
    """The number of rows of `y` does not depend on the values of `y`."""
    with tf.Graph().as_default():
        x, y, other = tf.ones([2]), tf.random.uniform([2]), tf.ones([2])
        result = x * 2.0 + tf.zeros_like(y)

        assert x.op in operations_before([result])
        assert y.op not in operations_before([result])
        assert any_depends([other, result], [y, x])
        assert not any_depends([other, result], [y])
        assert not any_depends([], [x])
