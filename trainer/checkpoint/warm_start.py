"""Starts a new run from the weights of an old run, without its other state.

`init_from` takes all of the weights, and with `init_from_skip` those that are named alike.
"""

import io
import json
import pathlib
import re
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

import h5py
import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from trainer.base.tracking import name_of_variable
from trainer.checkpoint import folder
from trainer.checkpoint.best import KERAS_FILE
from trainer.checkpoint.contents import describe, read_variables
from trainer.checkpoint.saver import PREFIX, check_variables, newest_intact
from trainer.step.types import Model, Variable

# An optimizer's numbers in a file: a model may hold several, as `d_optimizer`.
OPTIMIZER = re.compile(r"(\w+_)?optimizer(_weights)?/")


def warm_start(path: pathlib.Path, model: Model, skip: Sequence[str] = ()) -> pathlib.Path:
    """Loads the weights of another run into a model. Call it in the strategy's scope.

    Args:
        path: a checkpoint `ckpt-STEP`; a `model_dir`, whose newest checkpoint is used; a best
            model, `best/step-STEP`; or, for a Keras model, a `.keras` or
            `.weights.h5` file.
        model: the model, with all its variables created.
        skip: regular expressions of the names of variables that are not loaded; see
            `load_all_but`.

    Returns:
        The path of the file or folder that was read.

    Raises:
        ValueError: if there are no weights at `path`, or if they do not fit the model.
    """
    facts: folder.Facts = {}
    if not (path.is_file() and isinstance(model, keras.Model)):
        is_folder = (path / folder.MANIFEST).exists()
        checkpoints = {0: path} if is_folder else folder.committed(path, PREFIX)
        intact = newest_intact(checkpoints, "init_from")
        if intact is None:
            raise ValueError(
                "`init_from` must be a checkpoint, a model_dir or a file of weights; got "
                f"{str(path)!r}"
            )
        path, facts = intact
    if skip and "variables" not in facts:  # a best model does not list its variables either
        raise ValueError(
            f"`init_from_skip` must be empty unless `init_from` is a checkpoint; got {str(path)!r}"
        )
    if not facts:
        read_file(path, model)
    elif KERAS_FILE in facts["files"] and isinstance(model, keras.Model):
        read_file(path / KERAS_FILE, model)
    elif skip:
        load_all_but(skip, weights_of(model), facts["variables"]["model"], path)
    else:
        if "variables" in facts:
            saved = {"model": facts["variables"]["model"]}
            check_variables(saved, {"model": describe(weights_of(model))}, path, "init_from")
        read_variables(tf.train.Checkpoint(model=model), path, "init_from")
    return path


def read_file(path: pathlib.Path, model: keras.Model) -> None:
    """Loads a file of Keras weights; raises ValueError if some of them would be left out."""
    model.load_weights(path)
    if left := left_in(path, model):
        raise ValueError(
            f"`init_from` must hold weights of the model alone; got {left[0]!r} in {str(path)!r}"
        )


def load_all_but(
    skip: Sequence[str], weights: Sequence[Variable], saved: Sequence[str], path: pathlib.Path
) -> None:
    """Assigns the values in a checkpoint to all weights but some. Call it in the strategy's scope.

    They are matched by the names of the variables, and not by their places, because the models
    differ.

    Args:
        skip: regular expressions. A variable whose name contains a match of one keeps its value,
            and a saved one is left out.
        weights: the model's.
        saved: what the checkpoint's manifest says of the saved model's weights; see `describe`.
        path: the checkpoint.

    Raises:
        ValueError: if an expression matches no name, or if a weight that is not left out has no
            saved value of its name and shape, or a saved value no weight.
    """
    ours = named([name_of_variable(each) for each in weights], weights)
    names = [line.rpartition(": ")[0] for line in saved]
    theirs = named(names, names)
    known = sorted({*ours, *theirs})
    for each in skip:
        if not any(re.search(each, name) for name in known):
            raise ValueError(f"`init_from_skip` must match names of {known}; got {each!r}")
    wanted, found = (
        {name: each for name, each in side.items() if not any(re.search(s, name) for s in skip)}
        for side in (ours, theirs)
    )
    if apart := sorted(wanted.keys() ^ found.keys()):
        where = "the model" if apart[0] in wanted else path
        raise ValueError(f"`init_from_skip` must match {apart[0]!r}, which only {where} has")
    reader = tf.train.load_checkpoint(str(path / "variables"))
    keys = keys_of_names(reader)
    values = {name: reader.get_tensor(keys[full]) for name, full in found.items()}
    for name, variable in wanted.items():
        variable.assign(values[name])


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


def left_in(path: pathlib.Path, model: keras.Model) -> list[str]:
    """Returns the names of a file's weights that the model does not have.

    `load_weights` reads what the model has, and says nothing of what else a `.keras` or
    `.weights.h5` file holds; it refuses such files of the older format itself.
    """
    saved = names_in(path)
    older = any(name.startswith("model_weights/") for name in saved)
    if older or len(saved) <= len(model.weights):
        return []
    with tempfile.TemporaryDirectory() as own:
        model.save_weights(f"{own}/model.weights.h5")
        ours = names_in(pathlib.Path(own, "model.weights.h5"))
    return sorted(saved - ours)


def names_in(path: pathlib.Path) -> set[str]:
    """Returns the names of the arrays in a file of Keras weights, but for those of optimizers."""
    names: list[str] = []
    for source in parts_of(path):
        with h5py.File(source, "r") as part:
            part.visititems(
                lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
            )
    return {name for name in names if not OPTIMIZER.match(name)}


def parts_of(path: pathlib.Path) -> list[Any]:
    """Returns what h5py can open of a file of Keras weights, which may be an index of several."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return [io.BytesIO(archive.read("model.weights.h5"))]
    if path.suffix == ".json":
        index = json.loads(path.read_text())["weight_map"]  # to a name or a list of names
        return [path.parent / name for name in set(tf.nest.flatten(index))]
    return [path]


def weights_of(model: Model) -> list[Variable]:
    """Returns the weights of a model, trainable or not, without seed states and metrics."""
    return list(model.weights if isinstance(model, keras.Layer) else model.variables)
