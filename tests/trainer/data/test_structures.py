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
    as_batch,
    difference,
    fingerprint,
    rows_in,
    spec_of,
)

X = np.arange(8, dtype=np.float32)[:, None]


def test_a_list_of_arrays_is_a_tuple():
    """`[x, y]` is `(x, y)`, at any depth; a list of numbers stays refused."""
    found = batches([X, [X, X]], "data", tf.distribute.get_strategy(), global_batch=4)
    with pytest.raises(TypeError, match="must not contain lists"):
        batches([[1.0], [2.0]], "data", tf.distribute.get_strategy(), global_batch=1)

    assert tf.nest.map_structure(lambda leaf: leaf.shape.as_list(), found.first) == (
        [4, 1],
        ([4, 1], [4, 1]),
    )


@pytest.mark.extras
def test_pandas_as_in_keras():
    """Columns and a Series become float32 of two dimensions; text is refused."""
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    x, y = as_arrays((table, table["b"]), "data")

    assert (x.tolist(), x.dtype) == ([[1.0, 3.0], [2.0, 4.0]], np.float32)
    assert (y.tolist(), y.dtype) == ([[3], [4]], np.int64)
    with pytest.raises(TypeError) as error:
        as_arrays(pandas.DataFrame({"name": ["a", "b"]}).astype(object), "data")
    assert str(error.value) == (
        "`data` must hold numbers in every column of a DataFrame; got object in 'name'. Text and "
        "categories have no values to compute with. Encode the column, as pandas.get_dummies does, "
        "or leave it out."
    )


def test_variables_are_read():
    """Those of TensorFlow and of Keras, which have no length."""
    x = np.ones([2, 3], np.float32)
    for variable in (tf.Variable(x), keras.Variable(x)):
        [found] = as_arrays([variable], "train_data")
        assert isinstance(found, np.ndarray)
        assert found.tolist() == x.tolist()


@pytest.mark.extras
def test_tensors_of_pytorch_share_their_memory():
    """No copy is made on the CPU; bfloat16 keeps its bits."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    tensor = torch.arange(3.0, requires_grad=True)
    x, half = as_batch([tensor, torch.tensor([1.5], dtype=torch.bfloat16)])

    assert x.ctypes.data == tensor.data_ptr()
    assert (half.dtype, half.tolist()) == (ml_dtypes.bfloat16, [1.5])


def test_lists_in_a_batch():
    """Numbers become an array of TensorFlow's usual dtypes; arrays become components."""
    found = as_batch({"a": [[1.0], [2.0]], "b": [1, 2], "c": [X[:2], X[:2]], "d": ["x", "y"]})

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
