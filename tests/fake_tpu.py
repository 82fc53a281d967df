"""A `TPUStrategy` on a machine without a TPU: it traces a step as for a TPU, and can run none.

What it leans on is private to TensorFlow 2.21: a resolver that makes up a TPU's metadata.
"""

import collections

import tensorflow as tf
from tensorflow.python.client.session import _DeviceAttributes
from tensorflow.python.tpu.tpu_system_metadata import TPUSystemMetadata

JOB = "/job:localhost/replica:0/task:0/device"
COLLECTIVES = ("CrossReplicaSum", "AllToAll")


class MadeUp(tf.distribute.cluster_resolver.ClusterResolver):
    """A resolver of a TPU that is not there."""

    def __init__(self, cores):
        """One host, so many cores."""
        self._cores = cores
        self._tpu_topology = None

    def get_tpu_system_metadata(self):
        """What a real one would ask the TPU for."""
        names = [f"{JOB}:CPU:0", *(f"{JOB}:TPU:{core}" for core in range(self._cores))]
        devices = [_DeviceAttributes(name, name.split(":")[-2], 0, 0) for name in names]
        return TPUSystemMetadata(
            num_cores=self._cores,
            num_hosts=1,
            num_of_cores_per_host=self._cores,
            topology=None,
            devices=devices,
        )

    def master(self, *arguments, **options):
        """This machine."""
        return ""

    def cluster_spec(self):
        """No cluster."""
        return tf.train.ClusterSpec({})

    def get_job_name(self):
        """This process."""
        return "localhost"

    def num_accelerators(self, *arguments, **options):
        """The cores."""
        return {"TPU": self._cores}


def strategy(cores=4):
    """A `tf.distribute.TPUStrategy`; the variables of its cores are on the CPU."""
    tf.config.set_soft_device_placement(True)
    made = tf.distribute.TPUStrategy(MadeUp(cores))
    made._enable_packed_variable_in_eager_mode = False  # a handle for each core's
    return made


def nodes(graph):
    """All nodes of a graph and of its functions."""
    definition = graph.as_graph_def()
    functions = (function.node_def for function in definition.library.function)
    return [*definition.node, *(node for each in functions for node in each)]


def count(graph, op):
    """How many nodes have an operation."""
    return collections.Counter(node.op for node in nodes(graph))[op]


def collectives_some_may_miss(graph):
    """Returns the conditions of a graph that a replica could answer alone, with a collective behind.

    One that does not depend on any collective is answered by each replica for itself.
    """
    definition = graph.as_graph_def()
    functions = {function.signature.name: function for function in definition.library.function}

    def holds_collective(name):
        found = False
        for node in functions[name].node_def:
            inner = [attr.func.name for attr in node.attr.values() if attr.func.name in functions]
            found |= node.op in COLLECTIVES or any(holds_collective(each) for each in inner)
        return found

    by_name = {node.name: node for node in definition.node}

    def agreed(name, seen):
        node = by_name[name.split(":")[0].lstrip("^")]
        if node.name in seen:
            return False
        seen.add(node.name)
        return node.op in COLLECTIVES or any(agreed(each, seen) for each in node.input)

    return [
        node.name
        for node in definition.node
        if node.op in ("If", "StatelessIf")
        and any(holds_collective(node.attr[f"{way}_branch"].func.name) for way in ("then", "else"))
        and not agreed(node.input[0], set())
    ]
