"""Explains errors that TensorFlow raises in the middle of an inner loop."""

import contextlib
import pathlib
import re
from collections.abc import Iterator

import tensorflow as tf

from trainer.base.describe import HALFSTEP
from trainer.base.error_origin import raising_package
from trainer.data.reader import Reader
from trainer.data.source import EmptyPassError
from trainer.data.structures import BatchError
from trainer.data.value_checks import found_in

# Matches the lines of a graph's error that say where the error occurred, not what was wrong.
LOCATION = re.compile(
    r"Graph execution error|Detected at |Node: |  File |<stack |\t \[\[|\d+ root error"
)
# Matches what surrounds the reason in the other lines: the error's number, and the operation.
WRAPPING = re.compile(r"^ *\(0\) [A-Z_]+: +|^\{\{.*?\}\} | \[Op:\w+\].*|[:. ]+$")
# Matches an error that a pipeline has raised, in a graph or as it is read by itself.
READING = re.compile(r"IteratorGetNext(\]\]|\}\}|_output_types)")
NOT_INFINITE = "Input dataset was expected to contain an infinite number of elements"


class DataError(RuntimeError):
    """Raised when the training data raises an error, or ends before the run does."""


def explain(
    error: tf.errors.OpError,
    done: int,
    target: int,
    latest: pathlib.Path | None,
    *,
    exact: bool,
    cause: Exception | None = None,
) -> None:
    """Raises a DataError if the data caused `error`; otherwise adds a note to `error`.

    Args:
        error: the error that an inner loop raised.
        done: number of steps taken before the error.
        target: the step at which the run should have ended.
        latest: path of the last checkpoint, or None.
        exact: whether checkpoints hold the position in the data, including batches read ahead.
        cause: the error that Python code has raised while reading the data, if it is known.

    Raises:
        DataError: if the data caused `error`, which becomes the cause of the DataError.
    """
    saved = f"The last checkpoint is {latest}." if latest else "No checkpoint was saved."
    if cause is not None:
        raise source_error(cause, f"after step {done} of {target}", f" {saved}") from cause
    if wrong := found_in(error.message):
        raise wrong_values(wrong, f"after step {done} of {target}", f" {saved}") from error
    ahead = ""
    if latest and exact:
        ahead = (
            " The saved position includes batches that were read ahead. If the resumed run fails "
            'on the same batch, pass data_resume="skip", which reads the data from the beginning '
            "and drops the batches already used."
        )
    if isinstance(error, tf.errors.OutOfRangeError) or NOT_INFINITE in error.message:
        raise DataError(
            f"The training data ended after step {done} of {target}. Either the dataset "
            "claims to be infinite but is not, or it returned nothing when it was read again for "
            "the next epoch. "
            f"{saved} Remove assert_cardinality(), or make the generator start over each time it "
            f"is called.{ahead}"
        ) from error
    if READING.search(error.message):
        raise DataError(
            f"The training data raised {type(error).__name__} after step {done} of {target}: "
            f"{reason_of(error.message)}. {saved} Fix the data, or call "
            f"dataset.ignore_errors() to skip elements that cannot be read.{ahead}"
        ) from error
    error.add_note(f"raised after step {done}. {saved}")


def wrong_values(wrong: str, place: str, saved: str = "") -> DataError:
    """Returns the error for a batch that `check_data=True` has found wrong.

    Args:
        wrong: what it must hold, and what it holds, from `value_checks.found_in`.
        place: where the run was, for example "after step 3 of 10".
        saved: what is on disk, as a sentence.
    """
    return DataError(
        f"`train_data` must hold {wrong}, in the batch {place}. With check_data=True every "
        f"batch is checked before its step.{saved} Correct the data, or leave such examples out."
    )


def source_error(cause: Exception, place: str = "", saved: str = "") -> DataError:
    """Returns the error for data that Python makes.

    Args:
        cause: the error that reading the data has raised.
        place: where the run was, for example "after step 3 of 10".
        saved: what is on disk, as a sentence.
    """
    when = f" {place}" if place else ""
    if isinstance(cause, EmptyPassError):
        return DataError(f"The data ended{when}: {cause}.{saved}")
    if isinstance(cause, BatchError):
        return DataError(f"{cause}{f' Raised{when}.' if place else ''}{saved}")
    reason = str(cause).splitlines()[0].removesuffix(".") if str(cause) else "no message"
    return DataError(
        f"The data raised {type(cause).__name__}{when}: {reason}.{saved} Fix the data; the "
        "traceback above shows where it was raised."
    )


def raised_by_halfstep(error: Exception) -> bool:
    """Returns whether an error was raised by a line of halfstep, which says what to do."""
    return raising_package(error) in HALFSTEP


def pipeline_error(error: tf.errors.OpError, place: str = "") -> DataError:
    """Returns the error for a pipeline of TensorFlow that raises.

    Args:
        error: the error that it has raised.
        place: where, for example "in its first batch".
    """
    return DataError(
        f"The data raised {type(error).__name__}{f' {place}' if place else ''}: "
        f"{reason_of(error.message)}. Fix the data, or call dataset.ignore_errors() to skip "
        "elements that cannot be read."
    )


@contextlib.contextmanager
def reading_explained(reader: Reader | None) -> Iterator[None]:
    """Context manager: raises DataError for an error that a reader's source has raised."""
    try:
        yield
    except tf.errors.OpError as error:
        if reader is not None and reader.error is not None:
            raise source_error(reader.error) from reader.error
        if READING.search(error.message):
            raise pipeline_error(error) from error
        raise


def reason_of(message: str) -> str:
    """Returns the line of TensorFlow's message that says what was wrong.

    Example:
        >>> reason_of("/there/log; No space left on device [Op:FlushSummaryWriter] name: ")
        '/there/log; No space left on device'
    """
    lines = [line for line in message.splitlines() if line and not LOCATION.match(line)]
    return WRAPPING.sub("", lines[0] if lines else message)
