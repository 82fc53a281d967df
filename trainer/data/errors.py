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


MARK = "check_data"  # by which an error of `check_data=True` is recognised; see `value_checks`
FAILED = re.compile(rf"\[{MARK}: (.*?)\]((?: \[[^\]]*\])*)")


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
    if wrong := found_in(error.message):
        raise wrong_values(wrong, place, f" {saved}") from error
    if isinstance(error, tf.errors.OutOfRangeError) or NOT_INFINITE in error.message:
        raise DataError(
            f"The training data ended {place}: it claims to be infinite, or was empty in its next "
            f"pass. {saved}"
        ) from error
    if READING.search(error.message):
        what = f"raised {type(error).__name__} {place}: {reason_of(error.message)}"
        raise DataError(f"The training data {what}. {saved}") from error
    error.add_note(f"raised after step {done}. {saved}")


def wrong_values(wrong: str, place: str, saved: str = "") -> DataError:
    """Returns the error for a batch that `check_data=True` has found wrong.

    Args:
        wrong: what it must hold, and what it holds, from `found_in`.
        place: where the run was, for example "after step 3 of 10".
        saved: what is on disk, as a sentence.
    """
    return DataError(f"`train_data` must hold {wrong}, in the batch {place}.{saved}")


def found_in(message: str) -> str | None:
    """Returns what `check_data=True` has found wrong; None if another operation failed.

    Args:
        message: of an error that a step raised.

    Example:
        >>> found_in("assertion failed: [check_data: labels of at least 0; got] [-1]")
        'labels of at least 0; got -1'
    """
    failed = FAILED.search(message)
    if failed is None:
        return None
    numbers = re.findall(r"\[([^\]]*)\]", failed[2])
    return f"{failed[1]} {' and '.join(numbers)}".rstrip()


def reason_of(message: str) -> str:
    """Returns the line of TensorFlow's message that says what was wrong.

    Example:
        >>> reason_of("/there/log; No space left on device [Op:FlushSummaryWriter] name: ")
        '/there/log; No space left on device'
    """
    lines = [line for line in message.splitlines() if line and not LOCATION.match(line)]
    return WRAPPING.sub("", lines[0] if lines else message)
