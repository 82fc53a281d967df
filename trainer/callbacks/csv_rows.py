"""Takes rows back from the file of Keras's `CSVLogger` when a run goes back to a checkpoint."""

import csv
import io

import keras
import tensorflow as tf


def take_back_rows(logger: keras.callbacks.CSVLogger, epochs: int) -> None:
    """Removes the rows of epochs that will be trained again from a logger's file.

    Only rows at the end of the file are removed. An earlier run's, before them, are kept.

    Args:
        logger: the logger, whose rows are written by now.
        epochs: number of epochs that the run has ended at the checkpoint.
    """
    if not tf.io.gfile.exists(logger.filename):
        return
    with tf.io.gfile.GFile(logger.filename, "r") as file:
        text = file.read()
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=logger.sep))
    kept, following = rows[:], float("inf")
    while kept and epochs <= (number := epoch_of(kept[-1])) < following:
        following = number
        kept.pop()
    if len(kept) < len(rows):
        lines = text.splitlines(keepends=True)
        with tf.io.gfile.GFile(logger.filename, "w") as file:
            file.write("".join(lines[: len(lines) - (len(rows) - len(kept))]))


def epoch_of(row: list[str]) -> int:
    """Returns the epoch in the first column; -1 for the header, and for anything else."""
    return int(row[0]) if row and row[0].isdecimal() else -1
