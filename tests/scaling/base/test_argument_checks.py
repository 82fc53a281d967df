"""The argument checks: what they accept, and the errors for the rest."""

import types

import numpy as np
import pytest
import tensorflow as tf

from scaling import DynamicLossScale, FixedLossScaleState, NoLossScale
from scaling.base.argument_checks import (
    as_flag,
    as_tensor,
    check_bool,
    check_integer,
    check_scalar,
    check_state,
    did_you_mean,
    is_integer,
    is_name_in,
    is_number,
    loss_scale_of,
    map_leaves,
    shown,
)


def message_of(error_type, check, *arguments):
    """The message of the error that a check raises."""
    with pytest.raises(error_type) as error:
        check(*arguments)
    return str(error.value)


@pytest.mark.parametrize("value", [1.0, [1, 2], np.zeros(3), tf.constant(2), "text"])
def test_values_that_tensorflow_converts_become_tensors(value):
    """Numbers, lists, arrays, strings and tensors are accepted."""
    assert tf.is_tensor(as_tensor("structure", value))


def test_a_value_that_is_no_tensor_is_an_error():
    """The error names the argument and the type of the value."""
    assert message_of(TypeError, as_tensor, "structure", object()) == (
        "`structure` must be convertible to tensors; got object. TensorFlow cannot convert this "
        "type. Pass tensors, NumPy arrays or numbers."
    )


@pytest.mark.parametrize("value", [True, np.bool_(True), tf.constant(True)])
def test_a_flag_is_one_bool(value):
    """Bools from Python, NumPy and TensorFlow are flags."""
    assert as_flag("flag", value, "Why.", "Remedy")


def test_flags_inside_a_graph_may_have_an_unknown_shape():
    """Only what is known statically is checked, and no op is added to the graph."""

    @tf.function(input_signature=[tf.TensorSpec(None, tf.bool)])
    def check(flag):
        operations = len(tf.compat.v1.get_default_graph().get_operations())
        as_flag("flag", flag, "Why.", "Remedy")
        check_scalar("flag", flag, "Why.", "Remedy")
        assert operations == len(tf.compat.v1.get_default_graph().get_operations())
        return flag

    assert check(tf.constant(True))


def test_a_flag_of_another_dtype_or_shape_is_an_error():
    """The errors contain the reason and the remedy that the caller gave."""
    assert message_of(TypeError, as_flag, "flag", 1, "Why.", "Remedy") == (
        "`flag` must be a bool; got int32. Why. Remedy."
    )
    assert message_of(ValueError, as_flag, "flag", [True, False], "Why.", "Remedy") == (
        "`flag` must be a scalar; got shape (2,). Why. Remedy."
    )


@pytest.mark.parametrize("value", [None, "yes", 2])
def test_only_true_and_false_are_accepted_as_settings(value):
    """Other values are errors, even if Python would treat them as true or false."""
    check_bool("training", True, "Why.", "Remedy")
    check_bool("training", False, "Why.", "Remedy")

    assert message_of(TypeError, check_bool, "training", value, "Why.", "Remedy") == (
        f"`training` must be True or False; got {value!r}. Why. Remedy."
    )


@pytest.mark.parametrize("value", [1, 1.5, True, "3", None])
def test_an_integer_has_a_lower_bound(value):
    """Smaller ints, other numbers, bools and other types are errors."""
    check_integer("count", 2, 2, "Why.", "Remedy")
    check_integer("count", np.int64(3), 2, "Why.", "Remedy")

    assert message_of(ValueError, check_integer, "count", value, 2, "Why.", "Remedy") == (
        f"`count` must be an int of at least 2; got {value!r}. Why. Remedy."
    )


def test_a_state_must_have_the_type_of_its_rule():
    """The error names the type that the rule uses."""
    state = NoLossScale().initial_state()

    assert message_of(TypeError, check_state, state, FixedLossScaleState) == (
        "`state` must be a FixedLossScaleState; got NoLossScaleState. Each rule has a state type "
        "of its own. Pass what the rule's initial_state() or advance() returned."
    )


def test_the_scale_is_read_from_a_state():
    """Anything with a `loss_scale` is a state; a bare number is an error."""
    assert float(loss_scale_of(DynamicLossScale(8.0).initial_state())) == 8.0
    assert message_of(TypeError, loss_scale_of, 8.0) == (
        "`state` must be a rule's state; got float. A rule's state has the scale in its `loss_scale` field. Pass "
        "what the rule's initial_state() or advance() returned."
    )


def test_the_most_similar_name_is_suggested():
    """Without a similar name the alternative text is returned."""
    known = ["pytorch", "jmp"]

    assert did_you_mean("pytroch", known, "Use one of these.") == "Did you mean 'pytorch'?"
    assert did_you_mean("caffe", known, "Use one of these.") == "Use one of these."
    assert did_you_mean(3, known, "Use one of these.") == "Use one of these."


@pytest.mark.parametrize(
    ("value", "number", "integer"),
    [
        (1, True, True),
        (np.int32(1), True, True),
        (1.0, True, False),
        (np.float16(1), True, False),
        (float("nan"), True, False),
        (True, False, False),
        ("1", False, False),
        (None, False, False),
        (1j, False, False),
    ],
)
def test_numbers_and_integers(value, number, integer):
    """Numbers come from Python or NumPy; bools are not numbers."""
    assert is_number(value) is number
    assert is_integer(value) is integer


def test_a_long_value_is_shown_without_its_middle():
    """An error stays readable whatever was passed, also an object that cannot be printed."""

    class Unprintable:
        def __repr__(self):
            raise ArithmeticError

    assert shown("text") == "'text'"
    assert shown(Unprintable()) == "a Unprintable that cannot be printed"
    assert len(shown("x" * 10**6)) == 400


def test_a_name_is_looked_up_in_whatever_type_it_has():
    """A list cannot be looked up in a dict, and a string can be part of another."""
    assert is_name_in("a", {"a": 1})
    assert not is_name_in(["a"], {"a": 1})


def test_a_structure_that_cannot_be_made_again_is_refused():
    """Of a mapping proxy tf.nest makes no second one."""
    assert map_leaves("tree", float, {"a": 1}) == {"a": 1.0}
    with pytest.raises(TypeError, match=r"`tree` must be a structure that tf.nest can make again"):
        map_leaves("tree", float, types.MappingProxyType({"a": 1}))
