"""What a leaf of the data must be: known from arrays, from a pipeline's spec and from a batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.data.batches import batches
from trainer.data.leaves import LeafError, as_tensors, check_spec, dtype_of

STRATEGY = tf.distribute.get_strategy()
WHY = (
    'TensorFlow has no tensors of such values. Convert them to numbers, as x.astype("float32") '
    "does, or to text; pass each field of a record as an array of its own."
)
GOOD = np.ones([4, 1])


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (np.zeros(4, [("a", "f4")]), "ndarray of dtype dtype([('a', '<f4')])"),
        (np.array([None, "a", "b", "c"]), "ndarray of dtype dtype('O')"),
        (np.zeros(4, "datetime64[D]"), "ndarray of dtype dtype('<M8[D]')"),
        (tf.TensorSpec([4], tf.float32), "TensorSpec of dtype tf.float32"),
        (keras.Input([1]), "KerasTensor of dtype 'float32'"),
    ],
)
def test_what_is_no_tensor_is_refused(leaf, found):
    """The error names the argument, what was found, and what to convert it to, wherever it is."""
    with pytest.raises(TypeError) as error:
        batches((GOOD, {"x": leaf}), "train_data", STRATEGY, global_batch=2)

    rule = "`train_data` must hold numbers, bools or text in every array; got "
    assert str(error.value) == f"{rule}{found}. {WHY}"


def test_a_masked_array_is_refused():
    """Its mask would be lost, even where nothing is masked yet: the next batch may be."""
    masked = np.ma.masked_array(GOOD, GOOD < 0)
    with pytest.raises(TypeError) as error:
        batches((masked, GOOD), "data", STRATEGY, global_batch=2)

    assert str(error.value) == (
        "`data` must hold numbers, bools or text in every array; got a masked array of shape "
        "(4, 1). The mask would be lost, and the values behind it would count. Pass x.filled(0), "
        "for example, and weights or a mask of your own."
    )


def test_numbers_bools_and_text_are_tensors():
    """Every dtype that a step can take keeps its values; None stays None."""
    data = {
        **{name: np.arange(3).astype(name) for name in ("float16", "float64", "int8", "uint64")},
        "bool": np.array([True, False, True]),
        "text": np.array(["a", "b", "c"]),
        "objects": np.array(["a", b"b", "c"], dtype=object),
        "complex": np.array([1j, 2j, 3j]),
        "none": None,
    }

    tensors = as_tensors(data, "data")

    assert tensors["none"] is None
    for name, array in data.items():
        if array is not None and name not in {"text", "objects"}:
            np.testing.assert_array_equal(tensors[name].numpy(), array)
    assert [*tensors["text"].numpy()] == [*tensors["objects"].numpy()] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.range(4).window(2),
        tf.data.Dataset.from_tensors((tf.ones([4]), tf.data.Dataset.range(3))),
        tf.data.Dataset.from_tensors(tf.experimental.Optional.from_value(tf.ones([4]))),
    ],
)
def test_a_pipeline_of_anything_else_is_refused(dataset):
    """Windows and other objects are refused by the spec, before anything is read."""
    with pytest.raises(TypeError, match="`eval_data` must yield tensors of numbers, bools or text"):
        batches(dataset, "eval_data", STRATEGY)
    check_spec(tf.data.Dataset.from_tensors((tf.ones([4]), None)).element_spec, "eval_data")


def test_the_dtype_of_a_leaf():
    """An array of objects is text if all of it is."""
    assert dtype_of(np.array(["a"], dtype=object)) == tf.string
    assert dtype_of(np.array(["a"])) == tf.string
    assert dtype_of(tf.constant([1], tf.bfloat16)) == tf.bfloat16
    with pytest.raises(LeafError):
        dtype_of(np.array([1.0], dtype=object))


def test_batches_of_python_are_checked_as_arrays_are():
    """The first batches tell what the data is; a later one is compared with them."""

    def records():
        yield np.zeros(4, [("a", "f4")])

    def dates_later():
        yield from [GOOD, GOOD, np.zeros([4, 1], "datetime64[D]")]

    with pytest.raises(ValueError, match="`data` must yield numbers, bools or text in every array"):
        batches(records, "data", STRATEGY)
    found = batches(dates_later, "data", STRATEGY)
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(found.dataset)
    assert "batch 3, which holds values of dtype datetime64[D]" in str(found.reader.error)
