"""What users are told about errors that TensorFlow raises in the middle of a run."""

import pathlib

import pytest
import tensorflow as tf

from trainer.data.errors import NOT_INFINITE, DataError, explain, reason_of

LATEST = pathlib.Path("runs/a/ckpt-4")
AHEAD = (
    " The saved position includes batches that were read ahead. If the resumed run fails on the same "
    'batch, pass data_resume="skip", which reads the data from the beginning and drops the batches '
    "already used."
)


def explained(error, latest=LATEST, *, exact=False):
    """The message of the DataError for an error after step 6 of 12."""
    with pytest.raises(DataError) as raised:
        explain(error, 6, 12, latest, exact=exact)
    assert raised.value.__cause__ is error
    return str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.OutOfRangeError(None, None, "End of sequence"),
        tf.errors.InvalidArgumentError(None, None, f"{NOT_INFINITE}, but it ended."),
    ],
)
def test_data_that_ends_is_explained(error):
    """The error says at which step the data ended, and names the last checkpoint."""
    assert explained(error) == (
        "The training data ended after step 6 of 12. Either the dataset claims to be infinite "
        "but is not, or it returned nothing when it was read again for the next epoch. The last checkpoint is runs/a/ckpt-4. "
        "Remove assert_cardinality(), or make the generator start over each time it is called."
    )


def in_data(reason):
    """An error that TensorFlow raises while it reads the next batch."""
    return tf.errors.InvalidArgumentError(
        None, None, f"{reason}\n\t [[{{{{node IteratorGetNext}}}}]] [Op:__inference_f_1]"
    )


def test_data_that_raise_are_explained():
    """The error gives TensorFlow's reason, without where it happened."""
    assert explained(in_data("a row is odd"), None) == (
        "The training data raised InvalidArgumentError after step 6 of 12: a row is odd. No checkpoint "
        "was saved. Fix the data, or call dataset.ignore_errors() to skip elements that cannot be "
        "read."
    )


@pytest.mark.parametrize(
    "error", [in_data("a row is odd"), tf.errors.OutOfRangeError(None, None, "")]
)
def test_batches_read_ahead_are_mentioned_if_they_were_saved(error):
    """Only a checkpoint with an exact position can hold the batch that failed."""
    assert explained(error, exact=True).endswith(AHEAD)
    assert AHEAD not in explained(error)
    assert AHEAD not in explained(error, None, exact=True)


def test_other_errors_get_a_note():
    """An error in the model is not replaced; a note says after which step it was raised."""
    error = tf.errors.InvalidArgumentError(None, None, "assertion failed: [a slope is odd]")
    explain(error, 6, 12, LATEST, exact=True)
    assert error.__notes__ == ["raised after step 6. The last checkpoint is runs/a/ckpt-4."]

    error = tf.errors.InternalError(None, None, "out of luck")
    explain(error, 0, 12, None, exact=True)
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
