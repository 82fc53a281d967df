"""A `TPUStrategy` on a machine without a TPU. It can trace a step for a TPU but not run it.

It uses private names of TensorFlow 2.21 for a resolver that invents the metadata of a TPU.
"""

import collections

import tensorflow as tf
from tensorflow.python.client.session import _DeviceAttributes
from tensorflow.python.tpu.tpu_system_metadata import TPUSystemMetadata

JOB = "/job:localhost/replica:0/task:0/device"
COLLECTIVES = ("CrossReplicaSum", "AllToAll")


class FakeResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """A resolver for a TPU that does not exist."""

    def __init__(self, cores):
        """Stores the number of cores, all on one host."""
        self._cores = cores
        self._tpu_topology = None

    def get_tpu_system_metadata(self):
        """Returns what a real resolver would ask the TPU for."""
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
        """Returns the address of this machine."""
        return ""

    def cluster_spec(self):
        """Returns an empty cluster."""
        return tf.train.ClusterSpec({})

    def get_job_name(self):
        """Returns the job of this process."""
        return "localhost"

    def num_accelerators(self, *arguments, **options):
        """Returns the number of cores."""
        return {"TPU": self._cores}


def strategy(cores=4):
    """Returns a `tf.distribute.TPUStrategy` whose variables are on the CPU."""
    tf.config.set_soft_device_placement(True)
    fake = tf.distribute.TPUStrategy(FakeResolver(cores))
    fake._enable_packed_variable_in_eager_mode = False  # each core's copy gets its own handle
    return fake


def nodes(graph):
    """Returns all nodes of a graph and of its functions."""
    definition = graph.as_graph_def()
    functions = (function.node_def for function in definition.library.function)
    return [*definition.node, *(node for each in functions for node in each)]


def count(graph, op):
    """Returns the number of nodes with the given operation."""
    return collections.Counter(node.op for node in nodes(graph))[op]


def divergent_conditions(graph):
    """Returns the names of conditions that guard a collective and can differ between replicas.

    A condition can differ between replicas if it does not depend on the result of a collective.
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

    def depends_on_collective(name, seen):
        node = by_name[name.split(":")[0].lstrip("^")]
        if node.name in seen:
            return False
        seen.add(node.name)
        return node.op in COLLECTIVES or any(
            depends_on_collective(each, seen) for each in node.input
        )

    return [
        node.name
        for node in definition.node
        if node.op in ("If", "StatelessIf")
        and any(
            holds_collective(node.attr[branch].func.name)
            for branch in ("then_branch", "else_branch")
        )
        and not depends_on_collective(node.input[0], set())
    ]
