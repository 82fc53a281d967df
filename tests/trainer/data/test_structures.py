"""Lists, pandas and PyTorch in the structures that tf.data takes."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from trainer.data.batches import batches
from trainer.data.structures import (
    BatchError,
    as_arrays,
    as_global_batch,
    difference,
    fingerprint,
    rows_in,
    spec_of,
)

X = np.arange(8, dtype=np.float32)[:, None]


def test_a_list_of_arrays_is_a_tuple():
    """`[x, y]` is `(x, y)`, at any depth."""
    found = batches([X, [X, X]], "data", tf.distribute.get_strategy(), global_batch=4)

    assert tf.nest.map_structure(lambda leaf: leaf.shape.as_list(), found.first) == (
        [4, 1],
        ([4, 1], [4, 1]),
    )


@pytest.mark.extras
def test_pandas_as_in_keras():
    """Columns and a Series become float32 of two dimensions."""
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    x, y = as_arrays((table, table["b"]))

    assert (x.tolist(), x.dtype) == ([[1.0, 3.0], [2.0, 4.0]], np.float32)
    assert (y.tolist(), y.dtype) == ([[3], [4]], np.int64)


def test_variables_are_read():
    """Those of TensorFlow and of Keras, which have no length."""
    x = np.ones([2, 3], np.float32)
    for variable in (tf.Variable(x), keras.Variable(x)):
        [found] = as_arrays([variable])
        assert isinstance(found, np.ndarray)
        assert found.tolist() == x.tolist()


@pytest.mark.extras
def test_tensors_of_pytorch_share_their_memory():
    """No copy is made on the CPU; bfloat16 keeps its bits."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    tensor = torch.arange(3.0, requires_grad=True)
    x, half = as_arrays([tensor, torch.tensor([1.5], dtype=torch.bfloat16)], "data")

    assert x.ctypes.data == tensor.data_ptr()
    assert (half.dtype, half.tolist()) == (ml_dtypes.bfloat16, [1.5])


def test_lists_in_a_batch():
    """Numbers become an array of TensorFlow's usual dtypes; arrays become components."""
    found = as_arrays(
        {"a": [[1.0], [2.0]], "b": [1, 2], "c": [X[:2], X[:2]], "d": ["x", "y"]}, "data"
    )

    assert (found["a"].dtype, found["b"].dtype) == (np.float32, np.int64)
    assert isinstance(found["c"], tuple)
    assert spec_of([found])["d"].dtype == tf.string
    assert difference(found, spec_of([found])) is None


def test_a_fingerprint_tells_batches_apart():
    """Another number, shape or text gives another checksum; the same batch the same one."""
    same = [fingerprint((X, X)) for _ in range(2)]
    others = [
        fingerprint(one) for one in ((X, X + 1), (X, X[:4]), np.array(["a"]), np.array(["b"]))
    ]

    assert same[0] == same[1]
    assert len({*same, *others}) == 5


@pytest.mark.parametrize("other", [X[:3], np.float32(1.0)])
def test_a_batch_has_one_row_per_example_unless_it_is_whole(other):
    """A batch that is divided is refused by the names of its entries."""
    batch = {"x": X, "z": other}

    assert difference({"x": X[:3], "z": other}, spec_of([batch])) is None
    assert rows_in({"x": X, "y": X}, "data") == rows_in(batch, "data", whole=True) == 8
    with pytest.raises(BatchError, match=r"`data`.*'z': \("):
        rows_in(batch, "data")


STRATEGY = tf.distribute.get_strategy()
MASKED = np.ma.masked_array(X, X < 0)  # where nothing is masked yet: the next batch may be


@pytest.mark.parametrize(
    "read",
    [
        lambda: batches((MASKED, X), "data", STRATEGY, global_batch=2),
        lambda: batches(lambda: iter([(MASKED, X)]), "data", STRATEGY),
    ],
)
def test_a_masked_array_is_refused(read):
    """Its mask would be lost without a word."""
    with pytest.raises(TypeError, match="`data` must not be masked"):
        read()


def test_text_in_objects_is_text():
    """An array of objects is taken for text."""
    for text in (np.array(["a"], dtype=object), np.array(["a"])):
        assert spec_of([text]).dtype == tf.string


def test_batches_come_in_the_forms_that_data_have():
    """Lists of numbers become arrays, lists of arrays tuples; tensors and dicts stay."""
    x, y = np.zeros([2, 3]), np.zeros([2], np.int32)
    pair = as_global_batch([x, y])
    assert isinstance(pair, tuple)
    assert [leaf.dtype for leaf in pair] == [tf.float64, tf.int32]
    named = as_global_batch({"x": [[1.0], [2.0]], "ids": tf.constant([1, 2])})
    assert named["x"].dtype == tf.float32
    assert named["ids"].shape == [2]
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    assert as_global_batch((ragged, y))[0] is ragged


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ((np.zeros([2, 1]), None), TypeError),
        ((np.zeros([2, 1]), 1.0), ValueError),
        ((np.zeros([2, 1]), np.zeros([3])), ValueError),
        (np.zeros([0, 1]), ValueError),
    ],
)
def test_what_is_no_batch_is_an_error(batch, kind):
    """The error names the argument."""
    with pytest.raises(kind, match="`batch`"):
        as_global_batch(batch)
