"""The argument checks: what they accept, and what they refuse."""

import numpy as np
import pytest
import tensorflow as tf

from scaling.base.argument_checks import (
    as_flag,
    check_bool,
    check_integer,
    did_you_mean,
    is_integer,
    is_number,
    shown,
)


@pytest.mark.parametrize("value", [True, np.bool_(True), tf.constant(True)])
def test_a_flag_is_one_bool(value):
    """Bools from Python, NumPy and TensorFlow are flags."""
    assert as_flag("flag", value)
    for wrong in (1, 1.0, [True, False], tf.constant([True])):
        with pytest.raises(ValueError, match=r"^`flag` must be a single bool"):
            as_flag("flag", wrong)


def test_flags_inside_a_graph_may_have_an_unknown_shape():
    """Only what is known statically is checked."""

    @tf.function(input_signature=[tf.TensorSpec(None, tf.bool)])
    def check(flag):
        return as_flag("flag", flag)

    assert check(tf.constant(True))


@pytest.mark.parametrize("value", [1, "no", None])
def test_a_switch_is_true_or_false(value):
    """The text "no" would count as True."""
    check_bool("switch", np.bool_(False))
    with pytest.raises(TypeError, match=r"^`switch` must be True or False"):
        check_bool("switch", value)


@pytest.mark.parametrize("value", [1, 6, 2.0, True, "3", None])
def test_an_integer_has_bounds(value):
    """Ints from Python and NumPy within both bounds, and nothing else."""
    check_integer("count", np.int8(2), 2)
    check_integer("count", 5, 2, 5)
    with pytest.raises(ValueError, match=r"^`count` must be an int from 2 to 5"):
        check_integer("count", value, 2, 5)


def test_a_similar_name_is_suggested():
    """If no name is similar, the alternative text is returned."""
    known = ["pytorch", "jmp"]
    assert did_you_mean("pytroch", known, "Use one.") == "Did you mean 'pytorch'?"
    assert did_you_mean("caffe", known, "Use one.") == "Use one."


def test_numbers_and_integers():
    """Numbers of Python and NumPy; bools and tensors do not count."""
    assert all(map(is_number, [1, 1.5, np.float16(1.0), np.int64(3)]))
    assert not any(map(is_number, [True, "1", None, tf.constant(1.0)]))
    assert all(map(is_integer, [1, np.int64(3)]))
    assert not any(map(is_integer, [True, 1.0, "1", None]))


def test_a_long_value_is_shown_by_its_ends():
    """In one line of at most 400 characters."""
    text = shown(list(range(10**5)))

    assert len(text) == 400
    assert text.startswith("[0, 1, 2")
    assert text.endswith("99999]")
    assert "\n" not in shown(np.ones([2, 2]))
