"""Exports a trained model as a `.keras` file or a SavedModel, in the precision of your choice."""

import math
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.argument_checks import check_choice, check_path
from trainer.base.warn_once import warn_once
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
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    declared = getattr(model, "inputs", None)
    if not declared and inputs is None and not (path.suffix and isinstance(model, keras.Model)):
        raise ValueError("`export` must know the model's inputs: call predict first")
    if not isinstance(model, keras.Model):
        model = model_of(model, inputs)
        declared = model.inputs
    warn_of_merged_adapters(model)
    if path.suffix == ".keras":
        # A quantized model is copied, because Keras cannot load everything quantized that it saves.
        copied = precision != "train" or quantized_layers(model)
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
    return check_same_outputs(expected, found, eps, path)


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
        converted = [layer for layer in all_layers(model) if is_real(layer)]
        if precision == "train":
            model.save(file)
        else:
            with layers_under_policy(precision, converted):
                model.save(file)
        return keras.saving.load_model(file, custom_objects=layer_classes(model), compile=False)


def quantized_layers(model: keras.Model) -> list[str]:
    """Returns the names of a model's quantized layers."""
    return sorted(layer.name for layer in all_layers(model) if layer.quantization_mode is not None)


def warn_of_merged_adapters(model: keras.Model) -> None:
    """Warns that Keras writes quantized layers with LoRA as layers that compute something else."""
    names = [layer.name for layer in all_layers(model) if getattr(layer, "lora_enabled", False)]
    merged = sorted({*names} & {*quantized_layers(model)})
    if merged:
        warn_once(
            f"Keras merges adapters of quantized layers ({', '.join(map(repr, merged))}) when it "
            "writes a model, which then returns other outputs. Checkpoints keep both."
        )


def is_real(layer: keras.Layer) -> bool:
    """Returns whether a layer computes in a floating-point dtype."""
    return bool(tf.as_dtype(layer.compute_dtype).is_floating)


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


def check_same_outputs(expected: Any, found: Any, eps: float, path: pathlib.Path) -> float:
    """Returns the largest difference between outputs, as a fraction of the largest output.

    Args:
        expected: the outputs of the model.
        found: the outputs of the exported model for the same inputs.
        eps: EPS of the coarsest dtype in which either model computes.
        path: where the exported model is, for the error.

    Raises:
        ValueError: if the difference is larger than rounding explains.
    """
    pairs = zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True)
    worst = max(difference(ours.numpy(), theirs.numpy()) for ours, theirs in pairs)
    if worst == math.inf:
        raise ValueError(
            f"`precision` must have the range of the outputs; {path} returns inf, NaN or other text"
        )
    if worst > MAX_EPS * eps:
        raise ValueError(
            f"`path` must hold a model with the same outputs; in {path} they differ by {worst:.2g}"
        )
    return worst


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


def check_export(path: Any, precision: object) -> None:
    """Raises TypeError or ValueError unless a model can be exported with these arguments."""
    check_path("path", path)
    if pathlib.Path(path).suffix not in {".keras", ""}:
        raise ValueError(f"`path` must end in .keras, or have no suffix; got {str(path)!r}")
    check_choice("precision", precision, PRECISIONS)
