"""The argument checks of `strategies`."""

import numpy as np
import pytest
import tensorflow as tf

from strategies import checks


@pytest.mark.parametrize("count", [1, 7, np.int64(3)])
def test_counts_are_accepted(count):
    """Every int of at least 1 is a count, including those of NumPy."""
    checks.check_count("parts", count, "Unused.")


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "2", None, np.float32(1)])
def test_other_values_are_not_counts(count):
    """Any other value, a bool included, is refused with the name of the argument."""
    with pytest.raises(ValueError, match="`parts`") as error:
        checks.check_count("parts", count, "Parts are numbered.")

    assert str(error.value) == (
        f"`parts` must be an int of at least 1; got {count!r}. Parts are numbered. Use 1 or more."
    )


def test_static_shapes():
    """A static shape is known of tensors and arrays; a Python number is a scalar."""
    assert checks.static_shape(tf.ones([2, 3])).as_list() == [2, 3]
    assert checks.static_shape(np.ones([4])).as_list() == [4]
    assert checks.static_shape(1.5).as_list() == []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def traced(tensor):
        assert checks.static_shape(tensor).as_list() == [None, 3]

    traced.get_concrete_function()


def test_a_strategy_is_accepted(mirrored):
    """Every strategy of TensorFlow is one."""
    checks.check_strategy(tf.distribute.get_strategy(), "Unused.")
    checks.check_strategy(mirrored(2), "Unused.")


@pytest.mark.parametrize("strategy", ["mirrored", None, tf.distribute.MirroredStrategy])
def test_other_values_are_not_strategies(strategy):
    """A name, None or a class is refused with a suggestion that works."""
    with pytest.raises(TypeError) as error:
        checks.check_strategy(strategy, "It has the replicas.")

    assert str(error.value) == (
        f"`strategy` must be a tf.distribute.Strategy; got {strategy!r}. It has the replicas. Pass "
        'for instance strategies.create("mirrored").'
    )
