"""Names for the types that pass through this package."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import tensorflow as tf

# One variable's gradient: dense, sparse, or None if the loss does not depend on the variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

# Any nest of lists, tuples and dicts that `tf.nest` can walk. Python has no type for it.
Structure: TypeAlias = Any


@runtime_checkable
class RuleState(Protocol):
    """What a rule remembers between steps: a NamedTuple of tensors whose first is `loss_scale`."""

    @property
    def loss_scale(self) -> tf.Tensor:
        """Shape (), float32: the scale of the next step, a power of two."""

    def __iter__(self) -> Iterator[tf.Tensor]:
        """Iterates over the fields."""

    @property
    def _replace(self) -> Callable[..., "RuleState"]:
        """Returns a copy with some fields replaced, like that of every NamedTuple."""

    def _asdict(self) -> Mapping[str, tf.Tensor]:
        """Returns the fields by name, like that of every NamedTuple."""
