"""A trained model as a file for others: `.keras` or a SavedModel, in any precision, compared."""

import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.argument_checks import check_choice, check_path
from trainer.base.keras_private import all_layers, with_dtype_policy

PRECISIONS = ("train", "float32", "float16", "bfloat16")
# The relative distance from 1 to the next number.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUNDINGS = 32  # of the coarsest dtype that computes: what an output may be off by


def export(model: Any, path: pathlib.Path, precision: str, compare_on: Any) -> float | None:
    """Writes a Keras model; see `Trainer.export`.

    Returns:
        How far the outputs of what was written are from the model's, or None.
    """
    if path.suffix == ".keras":
        (model if precision == "train" else copy_of(model, precision)).save(path)
    else:
        # Of the copy: it is under no strategy.
        copy_of(model, precision).export(path, format="tf_saved_model", verbose=False)
    if compare_on is None:
        return None
    expected = model(compare_on, training=False)
    found = outputs_of(path, compare_on, classes_of(model))
    dtypes = {layer.compute_dtype for layer in all_layers(model)}
    eps = max(EPS[dtype] for dtype in {*dtypes, precision} & EPS.keys())
    return check_same_outputs(expected, found, eps, path)


def copy_of(model: keras.Model, precision: str) -> keras.Model:
    """Returns a copy of a model; its layers compute, and hold weights, as `precision` says."""
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "model.keras"
        if precision == "train":
            model.save(file)
        else:
            with with_dtype_policy(
                precision, [each for each in all_layers(model) if is_real(each)]
            ):
                model.save(file)
        return keras.saving.load_model(file, custom_objects=classes_of(model), compile=False)


def is_real(layer: keras.Layer) -> bool:
    """Returns whether a layer computes with real numbers."""
    return tf.as_dtype(layer.compute_dtype).is_floating


def classes_of(model: keras.Model) -> dict[str, type]:
    """Returns the classes of a model's layers by name: they need not be registered with Keras."""
    return {type(layer).__name__: type(layer) for layer in all_layers(model)}


def outputs_of(path: pathlib.Path, inputs: Any, classes: dict[str, type]) -> Any:
    """Returns what the model in a file makes of some inputs."""
    if path.suffix == ".keras":
        loaded = keras.saving.load_model(path, custom_objects=classes, compile=False)
        return loaded(inputs, training=False)
    loaded = tf.saved_model.load(str(path))  # which must live as long as it serves
    return loaded.serve(inputs)


def check_same_outputs(expected: Any, found: Any, eps: float, path: pathlib.Path) -> float:
    """Returns the largest difference, as a share of the largest output.

    Args:
        expected: what the model made of some inputs.
        found: what the file made of them.
        eps: of the coarsest dtype that computes in one of the two.
        path: of the file.

    Raises:
        ValueError: if it is more than rounding explains.
    """
    worst = 0.0
    for pair in zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True):
        ours, theirs = (tf.cast(each, tf.float32).numpy() for each in pair)
        size = float(np.max(np.abs(ours), initial=2.0**-126))
        worst = max(worst, float(np.max(np.abs(ours - theirs), initial=0.0)) / size)
    if not worst <= ROUNDINGS * eps:
        raise ValueError(
            f"`path` must predict what the model does; got {path}, whose outputs are off by "
            f"{worst:.2g} of the largest, where rounding explains {ROUNDINGS * eps:.2g}. A "
            "layer keeps something that its config does not say. Write its get_config(), or do not "
            "use this file."
        )
    return worst


def check_export(model: Any, path: Any, precision: Any) -> None:
    """Raises TypeError or ValueError unless a model can be written."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`export` must be asked of a trainer of a keras.Model; got {type(model).__name__}. "
            "Only Keras can write one to a file with its layers. Use tf.saved_model.save, or "
            "tf.train.Checkpoint(model=trainer.model)."
        )
    check_path("path", path, "model.keras")
    if pathlib.Path(path).suffix not in {".keras", ""}:
        raise ValueError(
            f"`path` must end in .keras, or be a folder for a SavedModel; got {str(path)!r}. The "
            'format is told by it. Use for instance "model.keras".'
        )
    check_choice("precision", precision, PRECISIONS)
