"""Types that are used throughout this package."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import tensorflow as tf

# One variable's gradient: dense, sparse, or None if the loss does not depend on the variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

# Any nested lists, tuples and dicts that `tf.nest` accepts. Python has no type for them.
Structure: TypeAlias = Any


@runtime_checkable
class RuleState(Protocol):
    """What a rule remembers between steps: a NamedTuple of tensors, `loss_scale` first."""

    @property
    def loss_scale(self) -> tf.Tensor:
        """Shape (), float32: the scale of the next step, a power of two."""

    def __iter__(self) -> Iterator[tf.Tensor]:
        """Iterates over the fields."""

    @property
    def _replace(self) -> Callable[..., "RuleState"]:
        """Returns a copy with some fields replaced, as for any NamedTuple."""

    def _asdict(self) -> Mapping[str, tf.Tensor]:
        """Returns a dict of the fields, keyed by name, as for any NamedTuple."""
