"""Evaluates a model of half precision in float32, and explains why some model cannot be."""

import contextlib
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from trainer.base.error_origin import raising_package
from trainer.keras_compat import all_layers, computing_in_float32
from trainer.step.checks import SIGNIFICANT_BITS

ANSI = re.compile(r"\x1b\[\d*m")  # Keras prints errors in bold
CALLING = re.compile(r"when calling (\w+\.call\(\))")  # names the layer in Keras's errors


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Context manager: a model is traced in float32.

    Args:
        model: the model. A layer that has remembered its compute dtype, instead of asking for
            `self.compute_dtype` in each call, still computes in that one.

    Raises:
        ValueError: if an operation gets both float32 and the half precision of a layer.
    """
    halves = {layer.compute_dtype for layer in all_layers(model)} & set(SIGNIFICANT_BITS)
    try:
        with computing_in_float32(model):
            yield
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        if raising_package(error) == "trainer":  # it says what to do
            raise
        text = ANSI.sub("", str(error))
        mixed = [
            line.strip()
            for line in text.splitlines()
            if "float32" in line and any(half in line for half in halves)
        ]
        if not mixed:
            raise
        layer = CALLING.search(text)
        got = f"got in {layer[1]}" if layer else "got"
        raise ValueError(
            f"`model` must be able to compute in float32, as evaluations do by default; {got}: "
            f"{mixed[0]} A layer probably keeps a tensor in the dtype in which it computed when it "
            "was built. Keep it in float32 and cast it in each call, to x.dtype or "
            'self.compute_dtype; or call evaluate() and predict() with precision="train", and '
            "train without eval_data."
        ) from error
