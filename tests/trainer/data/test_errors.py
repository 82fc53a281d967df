"""What users are told about errors that TensorFlow raises in the middle of a run."""

import pathlib

import pytest
import tensorflow as tf

from trainer.data.errors import NOT_INFINITE, DataError, explain, reason_of

LATEST = pathlib.Path("runs/a/ckpt-4")


@pytest.mark.parametrize(
    ("error", "latest"),
    [
        (tf.errors.OutOfRangeError(None, None, "End of sequence"), LATEST),
        (tf.errors.InvalidArgumentError(None, None, f"{NOT_INFINITE}, but it ended."), LATEST),
        (
            tf.errors.InvalidArgumentError(
                None, None, "a row is odd\n\t [[{{node IteratorGetNext}}]] [Op:__inference_f_1]"
            ),
            None,
        ),
    ],
)
@pytest.mark.parametrize("cause", [None, KeyError("row 7")])
def test_data_that_end_or_raise_are_explained(error, latest, cause):
    """The error says at which step, names the last checkpoint, and has the error as its cause."""
    with pytest.raises(DataError) as raised:
        explain(error, 6, 12, latest, cause)

    assert raised.value.__cause__ is (cause or error)
    assert "after step 6 of 12" in str(raised.value)
    assert str(latest or "No checkpoint was saved") in str(raised.value)


def test_other_errors_get_a_note():
    """An error in the model is not replaced; a note says after which step it was raised."""
    error = tf.errors.InvalidArgumentError(None, None, "assertion failed: [a slope is odd]")
    explain(error, 6, 12, LATEST)
    assert error.__notes__ == ["raised after step 6. The last checkpoint is runs/a/ckpt-4."]

    error = tf.errors.InternalError(None, None, "out of luck")
    explain(error, 0, 12, None)
    assert error.__notes__ == ["raised after step 0. No checkpoint was saved."]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("a row is odd", "a row is odd"),
        (
            "Graph execution error:\n\nDetected at node Assert defined at (most recent call last):\n"
            '  File "a.py", line 3, in f\n\na row is odd\n\t [[{{node Assert}}]]',
            "a row is odd",
        ),
        (
            "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  a row is odd\n\t [[{{node Assert}}]]",
            "a row is odd",
        ),
        ("{{function_node __wrapped}} a row is odd [Op:IteratorGetNext] name: ", "a row is odd"),
        ("Graph execution error:", "Graph execution error"),
        ("", ""),
    ],
)
def test_the_reason_is_found_in_tensorflows_message(message, reason):
    """Lines that say where an error happened are left out, and so is the name of the operation."""
    assert reason_of(message) == reason
