"""Lowers a trainer's step to HLO: the whole step of one device, or one replica's program of several.

The checks for TPUs and GPUs share it. It uses private names of TensorFlow 2.21, and no package of the
project imports it.
"""

import re
from typing import NamedTuple
from unittest import mock

import access
import fake_tpu
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from trainer import Trainer
from trainer.base.tracking import tensorflow_variable
from trainer.step import attempt
from trainer.step.report import PackedReport

REPLICA_SUFFIX = "_of_replica"  # ends the names of rewritten functions


class Lowered(NamedTuple):
    """A program as HLO, and what its arguments and outputs are."""

    hlo: bytes
    values: list  # the arguments that are no variables: arrays
    variables: list  # the arguments after them: a `tf.Variable` each
    paths: list  # of those variables
    inputs: list  # for each of `values`, where it comes from; "replica" is the replica's index
    written: list  # (argument, output) of each variable that the program writes


def started(trainer, batch):
    """Builds a trainer as `train` does; returns the spec of a batch."""
    dataset = tf.data.Dataset.from_tensors(batch)
    access.start(trainer, next(iter(dataset)))
    assert access.steps(trainer).python_function.args[0].__wrapped__.__func__ is Trainer.train_step
    return dataset.element_spec


def copies(trainer):
    """Yields the path of every variable and its copies on all replicas."""
    for variable in [*trainer.model.variables, *trainer.optimizer.variables]:
        inner = tensorflow_variable(variable)
        yield variable.path, list(getattr(inner, "values", [inner]))


def hlo_of(function, specs):
    """Returns a compiled function's HLO, and (argument, output) of what it writes in place.

    Args:
        function: a `tf.function` with `jit_compile=True`.
        specs: of its arguments.
    """
    # What is traced here on a CPU is compiled for another device.
    with mock.patch.object(attempt, "adds_in_rows", return_value=False):
        lowered = function.experimental_get_compiler_ir(*specs)
    # The heading of the HLO says which output is the new value of which argument.
    heading = lowered(stage="hlo", platform_name="CPU").partition("\n")[0]
    aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}", heading)
    written = [(int(argument), int(output)) for output, argument in aliases]
    return lowered(stage="hlo_serialized", platform_name="CPU"), written


def lower_function(function, batch):
    """Returns the HLO of a function of a batch, compiled as one program.

    A report is one vector, as `xla.one_program` returns it.

    Args:
        function: takes the batch, returns tensors, and may read and write variables.
        batch: arrays in any structure.
    """
    spec = tf.data.Dataset.from_tensors(batch).element_spec

    @tf.function(jit_compile=True, autograph=False)
    def program(*leaves):
        found = function(tf.nest.pack_sequence_as(spec, leaves))
        return found.bits if isinstance(found, PackedReport) else found

    return hlo_of(program, tf.nest.flatten(spec))[0]


def lower_replica(trainer, spec, value_of):
    """Returns one replica's program of a step that is traced under a fake `TPUStrategy`.

    Args:
        trainer: a started trainer.
        spec: of the global batch.
        value_of: returns the value of an input that is neither a variable nor a constant.
    """
    step = tf.function(trainer.train_step).get_concrete_function(spec)
    core, inputs, outputs = cut_out(step.graph, trainer.strategy.num_replicas_in_sync)
    values, variables, paths = inputs_of_replica(step, inputs, trainer, value_of)
    program = as_function(core, outputs, values, variables)
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in values.values()]
    hlo, written = hlo_of(program, specs)
    lowered = Lowered(
        hlo=hlo,
        values=list(values.values()),
        variables=list(variables.values()),
        paths=list(paths.values()),
        inputs=list(inputs.values()),
        written=written,
    )
    return lowered, step.graph


def cut_out(graph, replicas):
    """Cuts the program of one replica out of a graph.

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
        function.signature.name += REPLICA_SUFFIX
        for node in function.node_def:
            rewrite(node, functions)
    inputs = {}
    for node in inside:
        if node.op == "TPUReplicatedInput":
            sources = [by_name[name] for name in node.input if not name.startswith("^")]
            values = {source.attr["value"].tensor.SerializeToString() for source in sources}
            inputs[node.name] = "replica" if len(values) == replicas else sources[0].name
            continue
        copy = core.node.add()
        copy.CopyFrom(node)
        rewrite(copy, functions)
        # What comes from outside is the same for all replicas, such as a constant of a layer.
        outside = {name for name in copy.input if name.split(":")[0].lstrip("^") not in names}
        inputs |= {name: name for name in outside if not name.startswith("^")}
        kept = [name for name in copy.input if name not in outside or name in inputs]
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
            attr.func.name += REPLICA_SUFFIX


def inputs_of_replica(step, inputs, trainer, value_of):
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
        if id(captured.get(source)) in known:
            path, copy = known[id(captured[source])]
            paths[name], variables[name] = path, tf.Variable(copy.read_value())
        elif source in captured:
            values[name] = captured[source].numpy()
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


def programs_of(graph):
    """Returns the number of programs that a step traced under a `TPUStrategy` would start."""
    return fake_tpu.count(graph, "TPUReplicateMetadata")
