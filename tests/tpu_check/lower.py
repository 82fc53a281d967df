"""Lowers the trainer's step to the program that one core of a TPU runs: python lower.py OUT KIND.

The step is traced under a `TPUStrategy` (see `fake_tpu`). The program of one core is cut out of the
graph, its two kinds of collectives, which have no kernel outside a TPU, are replaced by operations
that XLA can lower for a CPU, and the result is written as HLO with the values of its arguments.

KIND is a precision, or the name of a step that must fail: `prints`, `huge` or `divergent`. This
program uses private names of TensorFlow 2.21, and no package of the project imports it.
"""

import json
import os
import pathlib
import re
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fake_tpu
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import strategies
from trainer import Trainer
from trainer.step.held_back import tensorflow_variable
from trainer.step.report import Outcome
from trainer.step.rollback import variables_in_reach

CORES = 4
BATCH = 16
CORE_SUFFIX = "_of_core"  # ends the names of rewritten functions


class Checked(Trainer):
    """A trainer with BatchNorm, Dropout, momentum and a moving average.

    `kind` is a precision, or adds to the step what it must not have.
    """

    def __init__(self, kind, strategy, jit_compile=False):
        """Computes in bfloat16 unless `kind` is another precision."""
        precision = kind if kind.startswith("mixed") else "mixed_bfloat16"
        super().__init__(
            strategy=strategy,
            precision=precision,
            loss_scale=2.0**8,
            ema_momentum=0.9,
            jit_compile=jit_compile,
            seed=1,
            verbose=False,
        )
        self.kind = kind

    def build_model(self):
        """A small model."""
        return keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ],
            name="checked",
        )

    def build_optimizer(self):
        """SGD, whose update shows every factor in a gradient."""
        return keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")

    def compute_loss(self, batch, training):
        """Squared errors, and the operations that a step of this kind must not have."""
        x, y = batch
        predictions = tf.cast(self.model(x, training=training), tf.float32)
        if self.kind == "prints":
            tf.print(predictions)
        if self.kind == "huge":  # a product of 50 GB
            drawn = tf.random.stateless_normal([112_000, 112_000], [1, 2])
            product = tf.matmul(tf.tanh(tf.matmul(drawn, drawn)), drawn)
            predictions += 1e-9 * tf.reduce_max(product)
        if self.kind == "divergent":  # a collective behind a condition that can differ by replica
            bad = ~tf.math.is_finite(tf.reduce_sum(y))
            mean = tf.stop_gradient(tf.reduce_mean(predictions))
            predictions += tf.cond(bad, lambda: 0.0, lambda: strategies.sum_gradients(mean))
        return tf.square(predictions - y)[:, 0]


def example(poisoned):
    """Returns a global batch; if poisoned, an example of the third replica has an infinite target."""
    x = np.random.default_rng(0).normal(size=[BATCH, 6]).astype(np.float32)
    y = np.tanh(x[:, :1])
    if poisoned:
        y[9] = np.inf
    return x, y


def trace(trainer):
    """Returns the concrete function of the step that `train` takes."""
    dataset = tf.data.Dataset.from_tensors(example(poisoned=False))
    trainer._start(next(iter(dataset)))
    assert trainer._parts.run_steps.python_function.args[0].__func__ is Trainer.train_step
    return tf.function(trainer.train_step).get_concrete_function(dataset.element_spec)


def copies(trainer):
    """Yields the path of every variable and its copies on all cores."""
    for variable in variables_in_reach([trainer.model, trainer.optimizer], ()):
        inner = tensorflow_variable(variable)
        yield variable.path, list(getattr(inner, "values", [inner]))


def cut_out(graph):
    """Cuts the program of one core out of a graph.

    Returns:
        The program's graph, the source of each of its inputs by name, and the names of its outputs.
    """
    whole = graph.as_graph_def()
    by_name = {node.name: node for node in whole.node}
    inside = [
        node
        for node in whole.node
        if (node.attr["_tpu_replicate"].s or node.op == "TPUReplicatedInput")
        and node.op not in ("TPUReplicateMetadata", "TPUCompilationResult", "NoOp")
    ]
    names = {node.name for node in inside}
    core = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
    functions = {function.signature.name for function in core.library.function}
    for function in core.library.function:
        function.signature.name += CORE_SUFFIX
        for node in function.node_def:
            rewrite(node, functions)
    inputs = {}
    for node in inside:
        if node.op == "TPUReplicatedInput":
            sources = [by_name[name] for name in node.input if not name.startswith("^")]
            values = {source.attr["value"].tensor.SerializeToString() for source in sources}
            inputs[node.name] = "replica" if len(values) == CORES else sources[0].name
            continue
        copy = core.node.add()
        copy.CopyFrom(node)
        rewrite(copy, functions)
        kept = [name for name in copy.input if name.split(":")[0].lstrip("^") in names]
        del copy.input[:]
        copy.input.extend(kept)
    outputs = [node.input[0] for node in whole.node if node.op == "TPUReplicatedOutput"]
    return core, inputs, outputs


def rewrite(node, functions):
    """Changes a node in place into one that XLA can lower for a CPU."""
    if node.op == "CrossReplicaSum":
        node.op = "XlaAllReduce"
        node.attr["reduce_op"].s, node.attr["mode"].s = b"Add", b"CrossReplica"
    elif node.op == "AllToAll":  # gives all replicas the value of the first, and they have the same
        node.op = "Identity"
        del node.input[1:]
        for name in set(node.attr) - {"T"}:
            del node.attr[name]
    for name in [name for name in node.attr if name.startswith("_")]:
        del node.attr[name]
    node.device = ""
    for attr in node.attr.values():
        if attr.func.name in functions:
            attr.func.name += CORE_SUFFIX


def inputs_of_core(step, inputs, trainer):
    """Returns the values of the program's inputs, by name.

    Returns:
        The values of all inputs that are not variables; a new variable with the value of each input
        that is one; the paths of those variables.
    """
    captured = {inner.op.name: outer for outer, inner in step.graph.captures}
    known = {id(copy.handle): (path, copy) for path, each in copies(trainer) for copy in each}
    nodes = {node.name: node for node in step.graph.as_graph_def().node}
    values, variables, paths = {}, {}, {}
    for name, source in inputs.items():
        if source in captured:
            path, copy = known[id(captured[source])]
            paths[name], variables[name] = path, tf.Variable(copy.read_value())
        elif source == "replica":
            values[name] = np.int32(0)
        elif nodes[source].op == "Const":
            values[name] = tf.make_ndarray(nodes[source].attr["value"].tensor)
        else:
            values[name] = value_of(step.graph.get_tensor_by_name(f"{source}:0"))
    return values, variables, paths


def as_function(core, outputs, values, variables):
    """Returns a `tf.function` that runs the program; it takes the values and reads the variables."""

    @tf.function(jit_compile=True, autograph=False)
    def program(*arguments):
        graph = tf.compat.v1.get_default_graph()
        for variable in variables.values():
            variable.read_value()  # makes it a variable of the function
        given = dict(zip(values, arguments, strict=True))
        given |= {name: graph.capture(variable.handle) for name, variable in variables.items()}
        return tf.graph_util.import_graph_def(
            core,
            input_map={f"{name}:0": tensor for name, tensor in given.items()},
            return_elements=[f"{name}:0" for name in outputs],
        )

    for function in core.library.function:
        context.context().add_function_def(function)
    return program


def lower(trainer, out):
    """Writes `OUT/step.hlo`, `OUT/arguments.npz` and `OUT/facts.json`, which describes them."""
    step = trace(trainer)
    core, inputs, outputs = cut_out(step.graph)
    values, variables, paths = inputs_of_core(step, inputs, trainer)
    program = as_function(core, outputs, values, variables)
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in values.values()]
    lowered = program.experimental_get_compiler_ir(*specs)
    (out / "step.hlo").write_bytes(lowered(stage="hlo_serialized", platform_name="CPU"))
    # The heading of the HLO says which output is the new value of which argument.
    heading = lowered(stage="hlo", platform_name="CPU").partition("\n")[0]
    aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}", heading)
    arrays = [*values.values(), *(variable.numpy() for variable in variables.values())]
    np.savez(out / "arguments.npz", *arrays)
    facts = {
        "programs": fake_tpu.count(step.graph, "TPUReplicateMetadata"),
        "divergent": fake_tpu.divergent_conditions(step.graph),
        "replica": list(inputs.values()).index("replica"),
        "targets": [
            index for index, value in enumerate(values.values()) if value.shape == (BATCH, 1)
        ],
        "outcome": [*Outcome._fields],
        "paths": [path for path, _ in copies(trainer)],
        # For each variable that is written: its path, and its indices among outputs and arguments.
        "written": [
            (list(paths.values())[int(argument) - len(values)], int(output), int(argument))
            for output, argument in aliases
        ],
    }
    (out / "facts.json").write_text(json.dumps(facts))


def value_of(tensor):
    """Returns the value of an input of the step that is neither a variable nor a constant."""
    x, y = example(poisoned=False)
    by_shape = {(BATCH, 6): x, (BATCH, 1): y, (BATCH,): np.ones([BATCH], np.float32)}
    if tensor.dtype == tf.int64:  # the key of random numbers: seed 1, step 0
        return np.array([1, 0], np.int64)
    return by_shape.get(tuple(tensor.shape), np.float32(2.0**8))


if __name__ == "__main__":
    lower(Checked(sys.argv[2], fake_tpu.strategy(CORES)), pathlib.Path(sys.argv[1]))
