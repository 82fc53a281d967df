"""Explains errors that TensorFlow raises in the middle of an inner loop."""

import pathlib
import re

import tensorflow as tf

# Matches the lines of a graph's error that say where the error occurred, not what was wrong.
LOCATION = re.compile(
    r"Graph execution error|Detected at |Node: |  File |<stack |\t \[\[|\d+ root error"
)
# Matches what surrounds the reason in the other lines: the error's number, and the operation.
WRAPPING = re.compile(r"^ *\(0\) [A-Z_]+: +|^\{\{.*?\}\} | \[Op:\w+\].*|[:. ]+$")
# Matches an error that a pipeline has raised, in a graph or as it is read by itself.
READING = re.compile(r"IteratorGetNext(\]\]|\}\}|_output_types)")
NOT_INFINITE = "Input dataset was expected to contain an infinite number of elements"
# Begins what `Monitoring(check_data=True)` says of a wrong batch; see `losses/value_checks.py`.
MARK = "check_data: the batch must hold"


class DataError(RuntimeError):
    """Raised when the training data raises an error, or ends before the run does."""


def explain(
    error: tf.errors.OpError,
    done: int,
    target: int,
    latest: pathlib.Path | None,
    cause: Exception | None = None,
) -> None:
    """Raises a DataError if the data caused `error`; otherwise adds a note to `error`.

    Args:
        error: the error that an inner loop raised.
        done: number of steps taken before the error.
        target: the step at which the run should have ended.
        latest: path of the last checkpoint, or None.
        cause: the error that Python code has raised while reading the data, if it is known.

    Raises:
        DataError: if the data caused `error`, which becomes the cause of the DataError.
    """
    place = f"after step {done} of {target}"
    saved = f"The last checkpoint is {latest}." if latest else "No checkpoint was saved."
    if cause is not None:
        what = f"raised {type(cause).__name__} {place}: {cause}"
        raise DataError(f"The training data {what}. {saved}") from cause
    if isinstance(error, tf.errors.OutOfRangeError) or NOT_INFINITE in error.message:
        raise DataError(
            f"The training data ended {place}: it claims to be infinite, or was empty in its next "
            f"pass. {saved}"
        ) from error
    if MARK in error.message or READING.search(error.message):
        what = f"raised {type(error).__name__} {place}: {reason_of(error.message)}"
        raise DataError(f"The training data {what}. {saved}") from error
    error.add_note(f"raised after step {done}. {saved}")


def reason_of(message: str) -> str:
    """Returns the line of TensorFlow's message that says what was wrong.

    Example:
        >>> reason_of("/there/log; No space left on device [Op:FlushSummaryWriter] name: ")
        '/there/log; No space left on device'
    """
    lines = [line for line in message.splitlines() if line and not LOCATION.match(line)]
    return WRAPPING.sub("", lines[0] if lines else message)
