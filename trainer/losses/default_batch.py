"""What the default `compute_loss` and `predict_batch` ask of a batch: its form, dtypes and fit.

All of it is known while a step is traced, so nothing is checked again for every batch.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.base.error_origin import raising_package
from trainer.step.types import Batch

# Whose errors are about what they were given, and not about themselves.
LIBRARIES = ("keras", "tensorflow")


def unpack(batch: Batch, argument: str = "train_data") -> tuple[Batch, Batch, tf.Tensor | None]:
    """Returns (x, y, sample_weight); raises ValueError if the batch has a different form.

    Args:
        batch: a batch, or a replica's share of it.
        argument: name of the user's argument, for errors.
    """
    if isinstance(batch, tuple) and len(batch) in (2, 3):
        return batch if len(batch) == 3 else (*batch, None)
    kind = "a single tensor" if tf.is_tensor(batch) else f"a {type(batch).__name__}"
    if isinstance(batch, tuple):
        kind = f"a tuple of {len(batch)}"
    raise ValueError(
        f"`{argument}` must yield (x, y) or (x, y, sample_weight) for the default compute_loss; "
        f"got {kind}: {described(batch)}. Otherwise inputs and labels cannot be told apart. "
        "Override compute_loss(batch, training), or map the dataset to tuples."
    )


def all_inputs(data: Any, model: Any) -> Any:
    """Returns an array for each of a model's several inputs as one item; other data as it is.

    The second item of a tuple would otherwise be labels.
    """
    declared = getattr(model, "inputs", None) if isinstance(model, keras.Model) else None
    arrays = isinstance(data, tuple | list) and all(hasattr(each, "shape") for each in data)
    return (tuple(data),) if declared and arrays and 1 < len(data) == len(declared) else data


def described(batch: Any) -> str:
    """Returns the dtypes and shapes of a batch as text.

    Example:
        >>> described((tf.ones([4, 1]), {"ids": tf.ones([4], tf.int32)}))
        "(float32 (4, 1), {'ids': int32 (4,)})"
    """
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key!r}: {described(batch[key])}" for key in batch) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(described, batch)) + ")"
    if getattr(batch, "dtype", None) is None:
        return str(batch)
    shape = batch.shape
    return f"{tf.as_dtype(batch.dtype).name} {tuple(shape) if shape.rank is not None else shape}"


def check_real(name: str, part: Any, argument: str) -> None:
    """Raises TypeError if labels or weights are text or complex numbers.

    Keras would drop the imaginary part without a word, and fail on text in the middle of a step.

    Args:
        name: "labels" or "weights", for the error.
        part: the labels or weights: a tensor, or a structure of tensors.
        argument: name of the user's argument.
    """
    for leaf in tf.nest.flatten(part):
        dtype = getattr(leaf, "dtype", tf.float32)
        if not is_real(dtype):
            raise TypeError(
                f"`{argument}` must have {name} that are real numbers for a loss of Keras; got "
                f"{described(leaf)}. Keras would cast them to float32. Convert them to numbers "
                "where the data is made, or pass a function of your own as loss_fn."
            )


def is_real(dtype: Any) -> bool:
    """Returns whether a dtype is one of real numbers or bools."""
    dtype = tf.as_dtype(dtype)
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def check_inputs(model: Any, x: Batch, argument: str) -> None:
    """Raises TypeError or ValueError for inputs on which Keras's own error would not help.

    That is text or complex numbers where a model has inputs of real numbers: Keras casts what it is
    given to the dtype of the input. Of complex numbers it would drop the imaginary part without a
    word, and text fails in the middle of a step. So does a ragged last dimension where the model
    has one of a fixed size. A single tensor for a model of several inputs is the first of a tuple
    of inputs, of which the others would be labels and weights.

    Args:
        model: the model; only one with declared inputs is checked.
        x: what it is called with.
        argument: name of the user's argument.
    """
    declared = getattr(model, "inputs", None) if isinstance(model, keras.Model) else None
    leaves = tf.nest.flatten(x)
    if declared and len(declared) > 1 and tf.is_tensor(x):
        raise ValueError(
            f"`{argument}` must hold all {len(declared)} inputs of the model in the first item of "
            f"a tuple; got {described(x)}. The other items are labels and weights. Pass "
            "((x1, x2), y) to train and evaluate, and ((x1, x2),) to predict."
        )
    if not declared or not all(is_real(each.dtype) for each in declared):
        return
    for leaf in leaves:
        if hasattr(leaf, "dtype") and not is_real(leaf.dtype):
            raise TypeError(
                f"`{argument}` must hold real numbers for a model with inputs of real numbers; got "
                f"{described(leaf)}. Keras would cast them to {declared[0].dtype}. Convert them to "
                "numbers where the data is made, or give keras.Input the dtype of the data."
            )
    for leaf, each in pairs_of(x, model):
        if isinstance(leaf, tf.RaggedTensor) and has_fixed_end(each) and leaf.shape[-1] is None:
            raise TypeError(
                f"`{argument}` must have a last dimension of a fixed size for this model; got "
                f"{described(leaf)}, which is ragged there, for an input of shape {each.shape}. "
                "Its products need rows of one size. Pad the data with to_tensor(), or make the "
                "last dimension of keras.Input None."
            )


def pairs_of(x: Any, model: keras.Model) -> Iterable[tuple[Any, Any]]:
    """Returns inputs with the declared inputs that they are for; in a dict, by their names."""
    declared = getattr(model, "input", None)  # a Sequential may have none until it is called
    if not isinstance(x, Mapping):
        return zip(tf.nest.flatten(x), model.inputs, strict=False)
    named = (
        declared if isinstance(declared, Mapping) else {each.name: each for each in model.inputs}
    )
    return [(x[name], named[name]) for name in x if name in named]


def has_fixed_end(declared: Any) -> bool:
    """Returns whether the last dimension of a model's input has a known size."""
    return len(declared.shape) > 1 and declared.shape[-1] is not None


def misfit(error: Exception, x: Batch, argument: str) -> Exception:
    """Returns the error for inputs that a model cannot take; an error of the user's code as it is.

    Args:
        error: what the model has raised when it was called.
        x: what it was called with.
        argument: name of the user's argument.
    """
    if not from_library(error):
        return error
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(
        f"`{argument}` must fit the model; got inputs {described(x)}. The model raised "
        f"{type(error).__name__}: {reason_in(str(error))}. Compare them with what "
        "the model's first layer takes; calling the model on one batch shows where it fails."
    )


def from_library(error: Exception) -> bool:
    """Returns whether an error of a plain kind was raised by a line of Keras or TensorFlow."""
    if type(error) not in {TypeError, ValueError, tf.errors.InvalidArgumentError}:
        return False
    return raising_package(error) in LIBRARIES


def reason_in(message: str) -> str:
    r"""Returns the sentence of Keras's message that says what is wrong.

    Example:
        >>> reason_in("Exception encountered when calling A.call().\n\n\x1b[1mBad.\x1b[0m\n")
        'Bad'
    """
    bold = re.search(r"\x1b\[1m(.*?)\x1b\[0m", message, re.DOTALL)
    text = bold[1] if bold else message
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "no message").rstrip(".:")
