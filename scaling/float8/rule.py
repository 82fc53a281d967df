"""The interface of a float8 rule: what a loop may call on any of them."""

from typing import Any, Protocol

import tensorflow as tf


class Float8Rule(Protocol):
    """The five methods that every rule of this package has. A rule holds no variables."""

    @property
    def dtype(self) -> str:
        """The float8 format, "float8_e4m3fn" or "float8_e5m2"."""

    # A state is Any because each rule accepts only its own type of state.
    def initial_state(self, shape: tuple[int, ...] = ()) -> Any:
        """Returns the state before the first step: a NamedTuple of tensors."""

    def amax(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the largest magnitude of a tensor, or of each of its blocks."""

    def choose_scale(self, state: Any, amax: tf.Tensor | float) -> tf.Tensor:
        """Returns the scale of this step."""

    def spread(self, scale: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Returns the scale as `quantize` takes it."""

    def advance(self, state: Any, amax: tf.Tensor | float) -> Any:
        """Returns the state after a step."""
