"""Starts a new run from the weights of an old run, without its other state (`init_from`)."""

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

from trainer.checkpoint import folder
from trainer.checkpoint.best import KERAS_FILE
from trainer.checkpoint.contents import describe, read_variables
from trainer.checkpoint.partial_start import load_all_but
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
    if path.is_file() and isinstance(model, keras.Model):
        check_no_skip(skip, path)
        return read_file(path, model)
    is_folder = (path / folder.MANIFEST).exists()
    intact = newest_intact({0: path} if is_folder else checkpoints_in(path), "init_from")
    if intact is None:
        raise ValueError(
            f"`init_from` must be a checkpoint, a model_dir or a file of weights; got {str(path)!r}"
        )
    found, facts = intact
    if KERAS_FILE in facts["files"] and isinstance(model, keras.Model):
        check_no_skip(skip, found)
        return read_file(found / KERAS_FILE, model)
    if "variables" in facts:  # the manifest of a best model does not list its variables
        saved, ours = {"model": facts["variables"]["model"]}, {"model": describe(weights_of(model))}
        if skip:
            load_all_but(skip, weights_of(model), saved["model"], found)
            return found
        check_variables(saved, ours, found, "init_from")
    else:
        check_no_skip(skip, found)
    read_variables(tf.train.Checkpoint(model=model), found, "init_from")
    return found


def check_no_skip(skip: Sequence[str], path: pathlib.Path) -> None:
    """Raises ValueError if parts of a file are wanted, which only a checkpoint can give."""
    if skip:
        raise ValueError(
            f"`init_from_skip` must be empty unless `init_from` is a checkpoint; got {str(path)!r}"
        )


def read_file(path: pathlib.Path, model: keras.Model) -> pathlib.Path:
    """Loads a file of Keras weights; raises ValueError if some of them would be left out."""
    model.load_weights(path)
    if left := left_in(path, model):
        raise ValueError(
            f"`init_from` must hold weights of the model alone; got {left[0]!r} in {str(path)!r}"
        )
    return path


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


def checkpoints_in(model_dir: pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the checkpoints in a `model_dir`, keyed by step, in ascending order."""
    return folder.committed(model_dir, PREFIX)


def weights_of(model: Model) -> list[Variable]:
    """Returns the weights of a model, trainable or not, without seed states and metrics."""
    return list(model.weights if isinstance(model, keras.Layer) else model.variables)
