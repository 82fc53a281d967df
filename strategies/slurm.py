"""The job of a Slurm step, from the variables that srun sets for each of its tasks.

TensorFlow's own resolver sorts the nodes by name, which puts n10 before n9, while Slurm numbers
tasks in the order of its list of nodes.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# The first task on each node listens on this port, the second on the next one, and so on.
PORT = 8888
STEP = "SLURM_STEP_"


def in_step() -> bool:
    """Returns whether this process is one of several tasks of a Slurm step."""
    tasks = os.environ.get(f"{STEP}NUM_TASKS") or "1"
    return tasks != "1"


def tasks_of_step() -> tuple[list[str], int, list[Any]]:
    """Returns the addresses of all tasks of this process's step, its index, and its GPUs.

    The tasks on a node divide its GPUs among themselves, unless Slurm has bound each to its own.

    Raises:
        ValueError: if this task is not where --distribution=block, Slurm's default, would place it:
            then no process knows where all tasks are. Also if the GPUs cannot be divided.
    """
    nodes, counts = os.environ[f"{STEP}NODELIST"], os.environ[f"{STEP}TASKS_PER_NODE"]
    places, index = places_of_tasks(nodes, counts), int(os.environ["SLURM_PROCID"])
    node, offset = places[index]
    here, local = os.environ.get("SLURMD_NODENAME", node), os.environ.get("SLURM_LOCALID", offset)
    if (here, str(local)) != (node, str(offset)):
        raise ValueError(
            f"task {index} must be number {offset} on {node}; got {local} on {here}: "
            "use srun --distribution=block"
        )
    gpus = own_gpus(places, index)
    return [f"{node}:{PORT + offset}" for node, offset in places], index, gpus


def places_of_tasks(nodes: str, tasks_per_node: str) -> list[tuple[str, int]]:
    """Returns the node of each task, and its number among the tasks of that node.

    Args:
        nodes: the list of nodes in Slurm's form.
        tasks_per_node: how many tasks run on each, in Slurm's form.

    Raises:
        ValueError: if the texts are about other numbers of nodes.

    Example:
        >>> places_of_tasks("n[9-10],login", "2,1(x2)")
        [('n9', 0), ('n9', 1), ('n10', 0), ('login', 0)]
    """
    names = [name for part in split_outside_brackets(nodes) for name in expanded(part)]
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.removesuffix(")") or 1)
    return [
        (name, offset) for name, count in zip(names, counts, strict=True) for offset in range(count)
    ]


def split_outside_brackets(nodes: str) -> list[str]:
    """Returns the parts of a list of nodes; the commas of ranges do not separate them.

    Example:
        >>> split_outside_brackets("a[1,3-4],b")
        ['a[1,3-4]', 'b']
    """
    return re.split(r",(?![^\[]*\])", nodes)


def expanded(part: str) -> Iterator[str]:
    """Yields the nodes that a part of a list of nodes names, in its order.

    Example:
        >>> list(expanded("r[0-1]n[08-09]"))
        ['r0n08', 'r0n09', 'r1n08', 'r1n09']
    """
    before, bracket, rest = part.partition("[")
    inside, _, after = rest.partition("]")
    if not bracket:
        yield part
        return
    for numbers in inside.split(","):
        first, _, last = numbers.partition("-")
        for each in range(int(first), int(last or first) + 1):
            name = f"{before}{each:0{len(first)}}"
            yield from expanded(name + after) if after else [name]


def own_gpus(places: Sequence[tuple[str, int]], index: int) -> list[Any]:
    """Returns the GPUs of a task, and makes TensorFlow see no others.

    Raises:
        ValueError: if there are fewer GPUs than tasks on a node.
        RuntimeError: if TensorFlow has used a device already.
    """
    gpus: list[Any] = tf.config.list_physical_devices("GPU")
    asked = count_gpus("GPUS_PER_TASK")
    if len(gpus) <= asked or len(gpus) < count_gpus("GPUS_ON_NODE"):
        return gpus  # this task sees only the GPUs that Slurm has bound it to
    offset = places[index][1]
    largest = 1 + max(other for _, other in places)
    share = asked or len(gpus) // largest
    own = gpus[offset * share : (offset + 1) * share]
    if not own:
        raise ValueError(f"{largest} tasks on a node see {len(gpus)} GPUs: use --gpus-per-task=1")
    tf.config.set_visible_devices(own, "GPU")
    return own


def count_gpus(name: str) -> int:
    """Returns the number of GPUs in a variable of Slurm's, such as "2" or "a100:2"; 0 if unset."""
    value = os.environ.get(f"SLURM_{name}") or "0"
    return sum(int(part.rpartition(":")[2]) for part in value.split(","))
