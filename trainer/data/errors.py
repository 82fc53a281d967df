"""What is said of an error that TensorFlow raises in the middle of an inner loop."""

import pathlib
import re

import tensorflow as tf

# How lines of a graph's error begin that do not say what was wrong.
PLACES = re.compile(r"Graph execution error|Detected at |  File |<stack |\t \[\[|\d+ root error")
# What stands around the reason in such a line: which of several it is, and the operation.
WRAPPING = re.compile(r"^ *\(0\) [A-Z_]+: +|^\{\{.*?\}\} | \[Op:\w+\].*|[:. ]+$")
NOT_INFINITE = "Input dataset was expected to contain an infinite number of elements"


class DataError(RuntimeError):
    """The training data raised, or ended before the run did."""


def explain(
    error: tf.errors.OpError, done: int, target: int, latest: pathlib.Path | None, *, exact: bool
) -> None:
    """Raises a DataError if the data are at fault; else leaves a note at the error.

    Args:
        error: of an inner loop.
        done: the step after which it came.
        target: the step that was to be reached.
        latest: the last checkpoint, if there is one.
        exact: whether it holds the position in the data, batches read ahead included.

    Raises:
        DataError: from the error.
    """
    where = f"The last checkpoint is {latest}." if latest else "Nothing was saved."
    ahead = ""
    if latest and exact:
        ahead = (
            " Batches are read ahead: if that checkpoint holds this one already, "
            'data_resume="skip" goes on from it without.'
        )
    if isinstance(error, tf.errors.OutOfRangeError) or NOT_INFINITE in error.message:
        raise DataError(
            f"`train_data` must not end before the run does; got its end after step {done} of "
            f"{target}. It says that it has none, or a further pass found nothing. "
            f"{where} Leave out assert_cardinality(), or let a generator begin anew each "
            f"time.{ahead}"
        ) from error
    if re.search(r"IteratorGetNext(\]\]|\}\})", error.message):
        reason = reason_of(error.message)
        raise DataError(
            f"`train_data` must not raise; got {type(error).__name__} after step {done} of "
            f"{target}: {reason}. {where} Mend the data, or leave out what it cannot "
            f"read with dataset.ignore_errors().{ahead}"
        ) from error
    error.add_note(f"raised in the step after {done}. {where}")


def reason_of(message: str) -> str:
    """Returns the line of TensorFlow's message that says what was wrong; the others say where.

    Example:
        >>> reason_of("/there/log; No space left on device [Op:FlushSummaryWriter] name: ")
        '/there/log; No space left on device'
    """
    lines = [line for line in message.splitlines() if line and not PLACES.match(line)]
    return WRAPPING.sub("", lines[0] if lines else message)
