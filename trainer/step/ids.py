"""Refuses token ids that Keras has rounded to half precision on their way to an `Embedding`.

Layers cast floats, not integers. But a functional model casts all of its inputs to their declared
dtypes. Keras declares floats where no `keras.Input` declares integers. float16 holds integers up to
2048 and bfloat16 up to 256; larger ones become other ids, without an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from trainer.keras_compat import all_layers, replaced_calls
from trainer.step.checks import SIGNIFICANT_BITS

EXACT = {dtype: 2**bits for dtype, bits in SIGNIFICANT_BITS.items()}  # the largest exact integers


@contextlib.contextmanager
def ids_unrounded(model: keras.Model) -> Iterator[None]:
    """Context manager: a pass in which an `Embedding` gets rounded ids ends in a ValueError."""
    # Raised at the end: Keras wraps what is raised in a call, and prints its arguments.
    faults: list[str] = []

    def looking_up(layer: keras.layers.Embedding) -> Callable[..., Any]:
        call = layer.call

        def looked_up(*arguments: Any, **named: Any) -> Any:  # a subclass may take others
            ids = next(iter((*arguments, *named.values())), None)
            dtype = tf.as_dtype(getattr(ids, "dtype", tf.int32)).name
            # True sends a `ReversibleEmbedding` backwards. A tensor cannot be compared with it.
            backwards = any(flag is True for flag in (*arguments, named.get("reverse")))
            if dtype in EXACT and layer.input_dim - 1 > EXACT[dtype] and not backwards:
                faults.append(
                    f"`model` must pass integers to the Embedding {layer.name!r}; got {dtype}: "
                    'begin it with keras.Input(shape, dtype="int32").'
                )
            return call(*arguments, **named)

        return looked_up

    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding)]
    with replaced_calls(layers, looking_up):
        yield
    if faults:
        raise ValueError(faults[0])
