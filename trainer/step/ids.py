"""Refuses models in which Keras would round integers, such as token ids, to half precision.

Layers cast floats, not integers. But a functional model casts all of its inputs to their declared
dtypes, and Keras declares half precision where no `keras.Input` does. float16 holds integers up to
2048 and bfloat16 up to 256; larger ones become other ids, without an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from trainer.base.keras_private import (
    CONVERSION,
    all_layers,
    functional_part,
    inputs_in_half,
    replaced_calls,
)
from trainer.step.checks import SIGNIFICANT_BITS

EXACT = {dtype: 2**bits for dtype, bits in SIGNIFICANT_BITS.items()}  # the largest exact integers


@contextlib.contextmanager
def ids_unrounded(model: keras.Model) -> Iterator[None]:
    """Context manager: a pass in which integers are rounded ends in a ValueError.

    These are integers that reach an input in half precision, and ids that reach an `Embedding` as
    half floats. Whether a layer of the user's takes floats for ids is not known.
    """
    # Raised at the end: Keras wraps what is raised in a call, and prints its arguments.
    faults: list[str] = []
    layers = all_layers(model)
    functional = {id(functional_part(layer)): layer for layer in layers if inputs_in_half(layer)}

    def converting(part: Any) -> Callable[[Any], Any]:
        convert, owner = getattr(part, CONVERSION), functional[id(part)]

        def converted(inputs: Any) -> Any:
            faults.extend(rounded_inputs(owner, inputs, part.inputs))
            return convert(inputs)

        return converted

    def looking_up(layer: keras.layers.Embedding) -> Callable[..., Any]:
        call = layer.call

        def looked_up(*arguments: Any, **named: Any) -> Any:  # a subclass may take others
            ids = next(iter((*arguments, *named.values())), None)
            # True sends a `ReversibleEmbedding` backwards. A tensor cannot be compared with it.
            flags = [*arguments, named.get("reverse")]
            if not any(flag is True for flag in flags):
                faults.extend(rounded_ids(layer, ids))
            return call(*arguments, **named)

        return looked_up

    parts = [functional_part(layer) for layer in functional.values()]
    lookups = [layer for layer in layers if isinstance(layer, keras.layers.Embedding)]
    with replaced_calls(parts, converting, CONVERSION), replaced_calls(lookups, looking_up):
        yield
    if faults:
        raise ValueError(faults[0])


def rounded_inputs(owner: keras.Layer, inputs: Any, declared: Any) -> Iterator[str]:
    """Yields an error for each input of integers that Keras casts to half precision.

    Args:
        owner: the functional model, or the `Sequential`.
        inputs: its inputs, flattened.
        declared: the `KerasTensor`s to whose dtypes Keras casts them.
    """
    for given, wanted in zip(inputs, declared, strict=False):
        dtype = tf.as_dtype(getattr(given, "dtype", tf.float32))
        if dtype.is_integer and dtype.size > 1 and wanted.dtype in EXACT:
            yield (
                f"`model` must declare its inputs; got {dtype.name} inputs of "
                f"{type(owner).__name__} {owner.name!r}, for which Keras has declared "
                f"{wanted.dtype}. Integers above {EXACT[wanted.dtype]} would be rounded. Make "
                f"keras.Input(shape, dtype={dtype.name!r}) its first layer."
            )


def rounded_ids(layer: keras.layers.Embedding, ids: Any) -> Iterator[str]:
    """Yields an error if the ids for an `Embedding` are floats that cannot hold all of its ids."""
    dtype = tf.as_dtype(getattr(ids, "dtype", tf.int32)).name
    if dtype in EXACT and layer.input_dim - 1 > EXACT[dtype]:
        yield (
            f"`model` must pass integers to the Embedding {layer.name!r}; got {dtype}, which "
            f"rounds ids above {EXACT[dtype]}. A layer or model around it has cast them. Pass "
            "integers as data; a Sequential or functional model must begin with "
            'keras.Input(shape, dtype="int32").'
        )
