"""Exports a trained model as a `.keras` file or a SavedModel, in the precision of your choice."""

import math
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.argument_checks import check_choice
from trainer.keras_compat import all_layers, layers_under_policy

PRECISIONS = ("train", "float32", "float16", "bfloat16")
# The distance from 1 to the next larger number in each dtype.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
MAX_EPS = 32  # largest accepted output difference, in multiples of the coarsest dtype's EPS


def export(
    model: keras.Layer,
    path: pathlib.Path,
    precision: str,
    compare_on: Any,
    inputs: Any = None,
) -> float | None:
    """Writes a Keras model, or a layer as a model of it; see `Trainer.export`.

    Args:
        model: the trained model or layer.
        path: a file that ends in `.keras`, or a folder for a SavedModel.
        precision: one of `PRECISIONS`.
        compare_on: inputs for which the exported model must return the same outputs as `model`,
            or None.
        inputs: specs of what the model was called with; None if it is not known. A layer, and a
            SavedModel of a subclassed model, need them.

    Returns:
        The largest difference between the outputs, as a fraction of the largest output; None
        without `compare_on`.

    Raises:
        ValueError: for another kind of file, and if the outputs differ by more than rounding.
    """
    check_choice("precision", precision, PRECISIONS)
    if path.suffix not in {".keras", ""}:
        raise ValueError(f"`path` must end in .keras, or have no suffix; got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    declared = getattr(model, "inputs", None)
    if not declared and inputs is None and not (path.suffix and isinstance(model, keras.Model)):
        raise ValueError("`export` must know the model's inputs: call predict first")
    if not isinstance(model, keras.Model):
        model = model_of(model, inputs)
        declared = model.inputs
    if path.suffix == ".keras":
        # A quantized model is copied, because Keras cannot load everything quantized that it saves.
        quantized = any(layer.quantization_mode for layer in all_layers(model))
        copied = precision != "train" or quantized
        (copy_of(model, precision) if copied else model).save(path)
    else:
        # A copy, because the variables of `model` may be distributed.
        copy_of(model, precision).export(
            path,
            format="tf_saved_model",
            verbose=False,
            input_signature=None if declared else [inputs],
        )
    if compare_on is None:
        return None
    expected = model(compare_on, training=False)
    found = outputs_of(path, compare_on, layer_classes(model))
    dtypes = {layer.compute_dtype for layer in all_layers(model)}
    eps = max(EPS[dtype] for dtype in {*dtypes, precision} & EPS.keys())
    pairs = zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True)
    worst = max(difference(ours.numpy(), theirs.numpy()) for ours, theirs in pairs)
    if worst > MAX_EPS * eps:
        raise ValueError(f"`path` must hold the same outputs; in {path} they differ by {worst:.2g}")
    return worst


def model_of(layer: keras.Layer, inputs: Any) -> keras.Model:
    """Returns a model that calls a layer with inputs of these specs; those of a dict get names."""

    def declared(spec: tf.TensorSpec, name: str | None = None) -> Any:
        return keras.Input(batch_shape=spec.shape, dtype=spec.dtype.name, name=name)

    if isinstance(inputs, Mapping):
        arguments = {name: declared(spec, name) for name, spec in inputs.items()}
    else:
        arguments = tf.nest.map_structure(declared, inputs)
    return keras.Model(arguments, layer(arguments))


def copy_of(model: keras.Model, precision: str) -> keras.Model:
    """Returns a copy of a model whose layers compute and store weights in `precision`."""
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "model.keras"
        converted = [
            layer for layer in all_layers(model) if tf.as_dtype(layer.compute_dtype).is_floating
        ]
        if precision == "train":
            model.save(file)
        else:
            with layers_under_policy(precision, converted):
                model.save(file)
        return keras.saving.load_model(file, custom_objects=layer_classes(model), compile=False)


def layer_classes(model: keras.Model) -> dict[str, type]:
    """Returns a model's layer classes, keyed by name, for loading unregistered layers."""
    return {type(layer).__name__: type(layer) for layer in all_layers(model)}


def outputs_of(path: pathlib.Path, inputs: Any, classes: dict[str, type]) -> Any:
    """Loads an exported model and returns its outputs for `inputs`."""
    if path.suffix == ".keras":
        loaded = keras.saving.load_model(path, custom_objects=classes, compile=False)
        return loaded(inputs, training=False)
    loaded = tf.saved_model.load(str(path))  # keep a reference, which owns the variables
    return loaded.serve(inputs)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference, as a fraction of the largest number of the first array.

    It is inf if one of two numbers, but not the other, is inf or NaN, or if text differs.
    """
    if ours.dtype.kind in "OSU":
        return 0.0 if np.array_equal(ours, theirs) else math.inf
    ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(ours - theirs))
    size = np.abs(ours).max(where=np.isfinite(ours), initial=2.0**-126)
    return float(np.nan_to_num(differences, nan=math.inf, posinf=math.inf).max(initial=0.0) / size)
