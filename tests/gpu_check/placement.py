"""What the host waits for while a graph runs on a GPU, found without one.

TensorFlow's wheel for Linux holds the kernels of GPUs, and says of each which of its arguments are in the
host's memory. An operation runs on the GPU if it has a kernel there, unless its device is the host or it
uses a variable that lies on the host. Where an argument in the host's memory comes from one in the GPU's,
TensorFlow copies it, and what needs it waits until the GPU has computed all that was asked of it before.
Only values are followed. An operation on the host that has to come after one on the GPU waits as well.

A second logical CPU stands for the GPU: what is placed there counts as placed on the GPU.

It uses private names of TensorFlow 2.21, and no package of the project imports it.
"""

import functools
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}
NOT_COPIED = {"IteratorGetNext"}  # an iterator lies where it was made
ON_CARD, ON_HOST = "the card", "the host"
CARD = "CPU:1"


class Copy(NamedTuple):
    """A value that the host waits for."""

    source: str  # the operation that computes it on the GPU
    user: str  # the operation that needs it on the host
    conditional: bool  # whether that is in a branch, which not every step takes


@functools.cache
def gpu_kernels(op):
    """Returns the kernels of an operation for GPUs."""
    found = kernels.get_registered_kernels_for_op(op).kernel
    return [each for each in found if each.device_type in ("GPU", "DEFAULT")]


def gpu_kernel(node):
    """Returns the kernel that runs a node on a GPU, or None."""
    for kernel in gpu_kernels(node.op):
        if all(
            node.attr[each.name].type in each.allowed_values.list.type for each in kernel.constraint
        ):
            return kernel
    return None


def arguments(node, args):
    """Yields the name of each input, or output, of a node: as often as it has tensors."""
    for arg in args:
        if arg.number_attr:
            count = node.attr[arg.number_attr].i
        elif arg.type_list_attr:
            count = len(node.attr[arg.type_list_attr].list.type)
        else:
            count = 1
        yield from [arg.name] * count


class Placement:
    """Where the values of a function and its callees lie.

    Args:
        function: the `FunctionDef`.
        library: the definitions of other functions, by name.
        inputs: where each of the function's inputs lies: for a resource, that which it holds.
        device: the device of the operation that calls the function: that of those without one.
        conditional: whether not every step calls it.
    """

    def __init__(self, function, library, inputs, device="", *, conditional=False):
        """Walks through the function."""
        self.copies = []
        self._library, self._device, self._conditional = library, device, conditional
        names = [arg.name for arg in function.signature.input_arg]
        self._memory = dict(zip(names, inputs, strict=True))
        self._source = dict.fromkeys(names, "an input")
        for node in ordered(used(function), set(names)):
            self._place(node)
        self.results = [
            self._memory[function.ret[arg.name]] for arg in function.signature.output_arg
        ]

    def _place(self, node):
        """Finds where a node's results lie, and what has to be copied to the host for it."""
        given = [name for name in node.input if not name.startswith("^")]
        memory = [self._memory[name] for name in given]
        definition = op_def_registry.get(node.op)
        outputs = list(arguments(node, definition.output_arg))
        if node.op in BRANCHES and not node.attr["_XlaMustCompile"].b:
            results = self._call(node, memory)
        else:
            resources = [self._memory[name] for name in given[:1] if self._is_resource(definition)]
            needed, results = self._run(node, definition, outputs, resources)
            for name, needs in zip(given, needed, strict=True):
                if needs == ON_HOST and self._memory[name] == ON_CARD:
                    self.copies.append(Copy(self._source[name], node.name, self._conditional))
        if not given:  # a constant is made where it is used
            results = [None] * len(outputs)
        numbered = {}
        for name, where in zip(outputs, results, strict=True):
            place = numbered[name] = numbered.get(name, -1) + 1
            self._memory[f"{node.name}:{name}:{place}"] = where
            self._source[f"{node.name}:{name}:{place}"] = node.name

    def _on_host(self, node):
        """Whether a node's device is the host. Without a device, it is the GPU."""
        device = node.device or self._device
        return bool(device) and CARD not in device

    def _is_resource(self, definition):
        first = [*definition.input_arg][:1]
        return bool(first) and first[0].type == tf.resource.as_datatype_enum

    def _run(self, node, definition, outputs, resources):
        """Returns where a node needs its inputs, and where its results lie."""
        inputs = list(arguments(node, definition.input_arg))
        if node.attr["_XlaMustCompile"].b:
            return [None] * len(inputs), [ON_CARD] * len(outputs)
        kernel = gpu_kernel(node)
        by_device = self._on_host(node) and ON_CARD not in resources
        on_host = by_device or ON_HOST in resources or node.op in NOT_COPIED
        if on_host or kernel is None:
            handles = [None if resources and not place else ON_HOST for place in range(len(inputs))]
            return handles, [ON_HOST] * len(outputs)
        in_host_memory = set(kernel.host_memory_arg)
        handle = {definition.input_arg[0].name} if resources else set()
        needed = [ON_HOST if name in in_host_memory - handle else None for name in inputs]
        return needed, [ON_HOST if name in in_host_memory else ON_CARD for name in outputs]

    def _of_loop(self, node, memory):
        """Returns where a loop keeps what it passes on: on the card, but for int32."""
        body = self._library[node.attr["body"].func.name]
        kinds = [arg.type for arg in body.signature.input_arg]
        resource, int32 = tf.resource.as_datatype_enum, tf.int32.as_datatype_enum
        return [
            where if kind == resource else ON_HOST if kind == int32 else ON_CARD
            for kind, where in zip(kinds, memory, strict=True)
        ]

    def _call(self, node, memory):
        """Walks through the functions that a node calls; returns where its results lie."""
        branches = "If" in node.op
        if "While" in node.op:
            memory = self._of_loop(node, memory)
        if branches and memory[0] == ON_CARD:
            self.copies.append(Copy(self._source[node.input[0]], node.name, self._conditional))
        found = [
            Placement(
                self._library[node.attr[name].func.name],
                self._library,
                memory[1:] if branches else memory,
                node.device or self._device,
                conditional=self._conditional or branches,
            )
            for name in BRANCHES[node.op]
        ]
        for each in found:
            self.copies += each.copies
        if "While" in node.op:
            condition, body = found
            if condition.results == [ON_CARD]:
                self.copies.append(Copy("the condition", node.name, self._conditional))
            return body.results
        each_result = zip(*(each.results for each in found), strict=True)
        types = [
            arg.type
            for arg in self._library[node.attr[BRANCHES[node.op][0]].func.name].signature.output_arg
        ]
        int32 = tf.int32.as_datatype_enum
        on_host = self._on_host(node)
        return [
            ON_HOST if on_host or kind == int32 or set(where) == {ON_HOST} else ON_CARD
            for where, kind in zip(each_result, types, strict=True)
        ]


def used(function):
    """Returns the nodes of a function that TensorFlow runs: those with an effect, and what they need."""
    nodes = {node.name: node for node in function.node_def}
    wanted = [*function.ret.values(), *function.control_ret.values()]
    wanted += [name for name, node in nodes.items() if op_def_registry.get(node.op).is_stateful]
    found = {}
    while wanted:
        name = wanted.pop().split(":")[0].lstrip("^")
        if name in nodes and name not in found:
            found[name] = nodes[name]
            wanted += nodes[name].input
    return found.values()


def ordered(nodes, known):
    """Returns the nodes in an order in which every input comes before its use."""
    waiting, done = list(nodes), []
    known = set(known)
    while waiting:
        ready = [
            node
            for node in waiting
            if all(name.split(":")[0].lstrip("^") in known for name in node.input)
        ]
        assert ready, "a function has no cycles"
        done += ready
        known |= {node.name for node in ready}
        waiting = [node for node in waiting if node.name not in known]
    return done


def copies_to_host(concrete, on_host):
    """Returns what the host waits for in a concrete function, with loops taken once.

    Args:
        concrete: a `ConcreteFunction`.
        on_host: the variables that lie on the host. The arguments of the function do, too.
    """
    handles = {id(each.handle) for each in on_host}
    captured = [
        ON_HOST if id(outer) in handles or holds_int32(outer) else ON_CARD
        for outer, _ in concrete.graph.captures
    ]
    given = len(concrete.graph.inputs) - len(captured)
    library = {each.signature.name: each for each in concrete.graph.as_graph_def().library.function}
    found = Placement(concrete.function_def, library, [ON_HOST] * given + captured)
    return found.copies


def holds_int32(handle):
    """Returns whether a resource is a variable of int32, which TensorFlow keeps on the host."""
    data = handle._handle_data
    shapes = data.shape_and_type if data and data.is_set else []
    return any(each.dtype == tf.int32.as_datatype_enum for each in shapes)
