"""`Precision`: names, dtypes and casts."""

import pytest
import tensorflow as tf

from scaling import Precision


@pytest.mark.parametrize(
    ("name", "compute", "needs"),
    [
        ("float32", "float32", False),
        ("float64", "float64", False),
        ("mixed_float16", "float16", True),
        ("mixed_bfloat16", "bfloat16", False),
        ("mixed_float8", "bfloat16", False),
    ],
)
def test_the_precisions(name, compute, needs):
    """L13: each has its own compute dtype, and no variables in half precision."""
    precision = Precision(name)

    assert (precision.compute_dtype, precision.needs_loss_scale) == (compute, needs)
    assert precision.variable_dtype == ("float64" if name == "float64" else "float32")
    assert precision.policy == name.replace("float8", "bfloat16")


def test_casts_change_only_floats():
    """Integers, bools, strings and None stay the same; values of sparse tensors are cast."""
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([3]), [4])
    tree = {
        "x": tf.ones([], tf.float64),
        "id": 3,
        "flag": True,
        "name": "a",
        "no": None,
        "s": slices,
    }
    half = Precision("mixed_float16").cast_to_compute(tree)

    assert half["x"].dtype == tf.float16
    assert half["s"].values.dtype == tf.float16
    assert (half["s"].indices.numpy().tolist(), half["s"].dense_shape) == ([3], [4])
    assert (half["id"].dtype, half["flag"].dtype, half["name"].dtype) == (
        tf.int32,
        tf.bool,
        tf.string,
    )
    assert half["no"] is None
    assert Precision("mixed_float16").cast_to_variable(half)["x"].dtype == tf.float32


def test_an_unknown_precision_is_an_error():
    """Pure half precision is not supported: weights would lose small updates."""
    with pytest.raises(ValueError, match="`precision`"):
        Precision("float16")
