"""Starts a new run from some of the weights of an old run (`init_from_skip`).

The rest of a checkpoint is matched by the names of the variables, and not by their places, because
the two models differ.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from trainer.base.tracking import name_of_variable
from trainer.step.types import Variable


def load_all_but(
    skip: Sequence[str], weights: Sequence[Variable], saved: Sequence[str], folder: pathlib.Path
) -> None:
    """Assigns the values in a checkpoint to all weights but some. Call it in the strategy's scope.

    Args:
        skip: regular expressions. A variable whose name contains a match of one keeps its value,
            and a saved one is left out.
        weights: the model's.
        saved: what the checkpoint's manifest says of the saved model's weights; see `describe`.
        folder: the checkpoint.

    Raises:
        ValueError: if an expression matches no name, or if a weight that is not left out has no
            saved value of its name and shape, or a saved value no weight.
    """
    ours = named([name_of_variable(each) for each in weights], weights)
    names = [line.rpartition(": ")[0] for line in saved]
    theirs = named(names, names)
    check_skips(skip, [*ours, *theirs])
    wanted, found = (
        {name: each for name, each in side.items() if not matches(skip, name)}
        for side in (ours, theirs)
    )
    check_names(wanted, found, folder)
    reader = tf.train.load_checkpoint(str(folder / "variables"))
    keys = keys_of_names(reader)
    values = {name: reader.get_tensor(keys[full]) for name, full in found.items()}
    for name, variable in wanted.items():
        variable.assign(values[name])


def matches(skip: Sequence[str], name: str) -> bool:
    """Returns whether a name contains a match of one of several regular expressions."""
    return any(re.search(each, name) for each in skip)


def named(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Returns values keyed by the names of variables, without what all the names begin with.

    The names of a Sequential or subclassed model's variables begin with its own, which has a number
    that differs between processes.

    Raises:
        ValueError: if two variables have one name.

    Example:
        >>> named(["net_1/body/kernel:0", "net_1/head/kernel:0"], [1, 2])
        {'body/kernel': 1, 'head/kernel': 2}
    """
    parts = [name.removesuffix(":0").split("/") for name in names]
    shared = len(parts) > 1 and len({each[0] for each in parts}) == 1
    short = ["/".join(each[1:] if shared and len(each) > 1 else each) for each in parts]
    if twice := [name for name in short if short.count(name) > 1]:
        raise ValueError(f"`init_from_skip` needs weights of different names; got two {twice[0]!r}")
    return dict(zip(short, values, strict=True))


def keys_of_names(reader: Any) -> dict[str, str]:
    """Returns the keys of the model's variables in a checkpoint file, by the variables' names.

    Args:
        reader: what `tf.train.load_checkpoint` returns.
    """
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    ahead = [each.node_id for each in graph.nodes[0].children if each.local_name == "model"]
    seen = set()
    while ahead:
        place = ahead.pop()
        if place not in seen:
            seen.add(place)
            ahead += [each.node_id for each in graph.nodes[place].children]
    attributes = [each for place in sorted(seen) for each in graph.nodes[place].attributes]
    found = {each.full_name: each.checkpoint_key for each in attributes}
    return found | {f"{name}:0": key for name, key in found.items()}


def check_skips(skip: Sequence[str], names: Iterable[str]) -> None:
    """Raises ValueError if an expression matches no name of a variable."""
    listed = sorted(set(names))
    for each in skip:
        if not any(re.search(each, name) for name in listed):
            raise ValueError(
                f"`init_from_skip` must match names of weights; got {each!r}; they are {listed}"
            )


def check_names(
    ours: Mapping[str, Variable], theirs: Mapping[str, str], folder: pathlib.Path
) -> None:
    """Raises ValueError unless both sides have variables of the same names."""
    if apart := sorted(ours.keys() ^ theirs.keys()):
        where = "the model" if apart[0] in ours else folder
        raise ValueError(f"`init_from_skip` must match {apart[0]!r}, which only {where} has")
