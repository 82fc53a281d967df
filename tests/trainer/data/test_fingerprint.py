"""Fingerprints of training data."""

import numpy as np
import pytest
import tensorflow as tf

from trainer.data import fingerprint
from trainer.data.fingerprint import first_change, of_arrays, of_pipeline
from trainer.data.pipeline_graph import pipeline_graph

X = np.arange(24, dtype=np.float32).reshape(8, 3)


def of(*tensors):
    """The fingerprint of a pipeline that scales the tensors."""
    return of_pipeline(pipeline_graph(scaled(tensors, 2.0)))


def scaled(tensors, factor):
    """A pipeline with a function."""
    return tf.data.Dataset.from_tensor_slices(tensors).map(lambda *row: row[0] * factor).batch(2)


def test_the_same_values_have_the_same_fingerprint():
    """Whether they are arrays or tensors, and up to rounding."""
    assert of_arrays((X, {"y": None})) == of_arrays([tf.constant(X)])
    assert first_change(of_arrays(X), of_arrays(X * (1 + 1e-7))) is None
    assert first_change(of(X), of(X.copy())) is None


@pytest.mark.parametrize(
    "other",
    [X + 0.01, X[::-1], X[:7], X.astype(np.float64), np.where(X == 5, np.nan, X)],
    ids=["other values", "another order", "fewer rows", "another dtype", "a NaN"],
)
def test_other_values_have_another_fingerprint(other):
    """Of arrays, and of tensors in a pipeline."""
    place, was, now = first_change(of_arrays([X, X]), of_arrays([X, other]))
    assert place == 1
    assert was.startswith("float32 (8, 3), norm 65.757, projection ")
    assert was != now
    assert first_change(of(X), of(np.ascontiguousarray(other))) is not None


def test_numbers_whose_squares_overflow():
    """Data of float64 are equal to themselves, however large their numbers."""
    large = np.array([1e200, -1e308, 1.0])
    assert first_change(of_arrays(large), of_arrays(large.copy())) is None
    assert first_change(of_arrays(large), of_arrays(-large)) is not None


def test_another_number_of_arrays():
    """What is missing is called nothing."""
    assert first_change(of_arrays([X]), of_arrays([X, 1]))[:2] == (1, "nothing")


@pytest.mark.extras
def test_strings_and_tables():
    """Strings are hashed; a table of pandas is read like an array."""
    words = of_arrays(np.array(["a", "b"]))
    assert words[0]["kind"] == "string (2,)"
    assert first_change(words, of_arrays(np.array(["a", "c"]))) is not None
    pandas = pytest.importorskip("pandas")
    assert of_arrays(pandas.DataFrame(X)) == of_arrays(X)


def test_large_arrays_are_sampled(monkeypatch):
    """Evenly spaced rows are read, the first and the last among them."""
    monkeypatch.setattr(fingerprint, "MAX_ELEMENTS", 6)
    before = of_arrays(X)
    for row, seen in ((0, True), (7, True), (3, False)):
        other = X.copy()
        other[row] += 1
        assert (first_change(before, of_arrays(other)) is not None) == seen
    assert of_arrays(tf.constant(X)) == before


def test_functions_of_a_pipeline():
    """The constants in its functions count, and files are not read."""
    one, same, other = (
        of_pipeline(pipeline_graph(scaled((X,), factor))) for factor in (2.0, 2.0, 3.0)
    )
    assert one == same
    assert first_change(one, other)[0] == 1
