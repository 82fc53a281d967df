"""Beginning a new run with the weights of an old one, and with nothing else of it."""

import pathlib
import zipfile
from typing import Any

import keras
import tensorflow as tf

from trainer.checkpoint import folder
from trainer.checkpoint.best import KERAS_FILE
from trainer.checkpoint.contents import describe, read_all
from trainer.checkpoint.saver import PREFIX, check_variables, newest_sound


def warm_start(path: pathlib.Path, model: Any) -> pathlib.Path:
    """Gives a model the weights that another run has left. Call it in the strategy's scope.

    Args:
        path: a checkpoint `ckpt-STEP`; a `model_dir`, whose newest is taken; one of its best
            models, `best/step-STEP`; or, for a Keras model, a `.keras` or `.weights.h5` file.
        model: a `keras.Model` or `tf.Module` with all its variables.

    Returns:
        What was read.

    Raises:
        ValueError: if there is no such thing, or its weights do not fit.
    """
    if path.is_file() and isinstance(model, keras.Model):
        return read_file(path, model)
    is_folder = (path / folder.MANIFEST).exists()
    sound = newest_sound({0: path} if is_folder else of_run(path), "init_from")
    if sound is None:
        raise ValueError(
            "`init_from` must be a checkpoint, a model_dir that has one, or a file of Keras "
            f"weights; got {str(path)!r}. There is nothing to begin with. Give for instance "
            "model_dir/ckpt-1000."
        )
    found, facts = sound
    if KERAS_FILE in facts["files"] and isinstance(model, keras.Model):
        return read_file(found / KERAS_FILE, model)
    if "variables" in facts:  # of the best models no more is said than what they came to
        saved, ours = {"model": facts["variables"]["model"]}, {"model": describe(weights_of(model))}
        check_variables(saved, ours, found, "init_from")
    read_all(tf.train.Checkpoint(model=model), found, "init_from")
    return found


def read_file(path: pathlib.Path, model: keras.Model) -> pathlib.Path:
    """Reads a file of Keras weights, or raises ValueError if they do not fit."""
    try:
        model.load_weights(path)
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"`init_from` must be a file of this model's weights; got {str(path)!r}: {error} They "
            "would have nowhere to go. Use another file, or None to begin with new weights."
        ) from error
    return path


def of_run(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the checkpoints of a `model_dir`."""
    return folder.committed(path, PREFIX)


def weights_of(model: Any) -> list[Any]:
    """Returns what a model keeps: trained or not, but neither seeds nor metrics."""
    return list(model.weights if isinstance(model, keras.Model) else model.variables)
