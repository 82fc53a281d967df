"""Seeds the global random generators for a block of code, and puts them back afterwards.

Keras draws initial weights from Python's generator, and a user's `build_model` may draw from
NumPy's or TensorFlow's. All of these are global: a trainer that seeded them for good would change
what the rest of the program draws, and the seeds of every dataset that is made later. Only the
generator of `keras.random` without a seed stays seeded: Keras has no public way to read its state.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from trainer.keras_compat import set_tensorflow_random_state, tensorflow_random_state


class RandomState(NamedTuple):
    """The state of the global random generators of Python, NumPy and TensorFlow."""

    python: Any
    numpy: Any
    tensorflow: Any


def random_state() -> RandomState:
    """Returns the state of the global generators of Python, NumPy and TensorFlow."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002  # the global one is meant
    return RandomState(random.getstate(), numpy_state, tensorflow_random_state())


def set_random_state(state: RandomState) -> None:
    """Puts the global generators of Python, NumPy and TensorFlow into a state."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)  # noqa: NPY002  # the global one is meant
    set_tensorflow_random_state(state.tensorflow)


ONE_AT_A_TIME = threading.RLock()  # the global generators belong to the whole process


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Context manager: these generators are afterwards as they were found."""
    with ONE_AT_A_TIME:
        before = random_state()
        try:
            yield
        finally:
            set_random_state(before)


class ScopedSeed:
    """The random numbers that one trainer draws from global generators.

    Those of Python, NumPy and TensorFlow continue from one block to the next, as if nothing else
    drew any.

    Args:
        seed: the seed; None leaves the global generators alone.

    Example:
        >>> seeded = ScopedSeed(1)
        >>> with seeded.in_use():
        ...     first = random.random()
        >>> with seeded.in_use():
        ...     second = random.random()
        >>> expected = random.Random(1)
        >>> [first, second] == [expected.random(), expected.random()]
        True
    """

    def __init__(self, seed: int | None) -> None:
        """Stores the seed."""
        self._seed = seed
        self._state: RandomState | None = None  # None before the first block
        self._in_use = False

    @contextlib.contextmanager
    def in_use(self, *, from_start: bool = False) -> Iterator[None]:
        """Context manager: the global generators are this trainer's, and then as they were found.

        Trainers in other threads wait until the block ends.

        TensorFlow restarts the counters of eager operations with a seed of their own
        (`tf.random.uniform([], seed=1)`) whenever its seed is set, which cannot be undone. The
        generator of `keras.random` without a seed stays that of the block.

        Args:
            from_start: whether to begin again with the seed.
        """
        if self._seed is None or self._in_use:
            yield
            return
        with random_numbers_kept():
            if from_start or self._state is None:
                keras.utils.set_random_seed(self._seed)
            else:
                set_random_state(self._state)
            self._in_use = True
            try:
                yield
                self._state = random_state()
            finally:
                self._in_use = False
