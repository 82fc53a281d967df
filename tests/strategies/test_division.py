"""A global batch is divided over replicas and microbatches."""

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given

import strategies
from strategies.division import cut_rows


# Fewer examples than parts: the last ones are empty.
@example(examples=2, replicas=4, microbatches=3)
@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 4))
def test_every_example_counts_once(examples, replicas, microbatches):
    """L8: for all sizes, each example is in exactly one microbatch of one replica, in order, and
    the shares of replicas differ by at most one example.
    """
    weights = np.arange(1, examples + 1, dtype=np.float32)
    share = strategies.whole({"x": tf.range(examples)}, tf.constant(weights))
    seen, sizes = [], []
    for replica in range(replicas):
        replica_share = strategies.take(share, replica, replicas)
        sizes.append(int(replica_share.examples))
        for index in range(microbatches):
            part = strategies.take(replica_share, tf.constant(index), microbatches)
            count = int(part.examples)
            rows = part.batch["x"].numpy()

            assert len(rows) == max(count, 1)
            np.testing.assert_array_equal(part.weights, weights[rows] if count else [0.0])
            seen.extend(rows[:count])

    assert seen == list(range(examples))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_an_empty_share_repeats_a_real_example():
    """L8: an empty share holds a real example with weight 0, as zeros can give NaN gradients."""
    share = strategies.take(strategies.whole(tf.constant([5.0, 6.0]), tf.ones([2])), 2, 3)

    assert (share.batch.numpy().tolist(), share.weights.numpy().tolist()) == ([6.0], [0.0])
    assert int(share.examples) == 0


def test_weights_may_be_integers():
    """Integers and bools count as the same float32 weights, in an empty share too."""
    for weights in (tf.constant([2, 0]), tf.constant([True, False])):
        shares = [strategies.take(strategies.whole(tf.range(2), weights), at, 3) for at in range(3)]
        found = [share.weights.numpy().tolist() for share in shares]
        assert found == [[float(weights[0])], [0.0], [0.0]]


def test_a_tensor_without_a_row_for_each_weight_is_refused():
    """Its rows would go to other examples."""
    share = strategies.whole({"x": tf.range(4), "y": tf.range(2)}, tf.ones([4]))
    with pytest.raises(ValueError, match=r"^`batch` must have one row per example"):
        strategies.take(share, 0, 2)


@pytest.mark.parametrize("examples", [1, 5, 6])
def test_ragged_and_sparse_tensors_are_cut_as_dense_ones(examples):
    """L8: each part holds the same rows of a ragged, a sparse and a dense tensor; None stays."""
    dense = np.tril(np.ones([examples, 4], np.int32))
    ragged = tf.RaggedTensor.from_tensor(dense, padding=0)
    batch = {"dense": dense, "ragged": ragged, "sparse": tf.sparse.from_dense(dense), "none": None}
    batch["dense"] = tf.constant(dense)

    def cut(batch, index):
        share = strategies.take(strategies.whole(batch, tf.ones([examples])), index, 3)
        parts = share.batch
        sparse = tf.sparse.to_dense(parts["sparse"])
        return parts["dense"], parts["ragged"].to_tensor(shape=[None, 4]), sparse, parts["none"]

    for function in (cut, tf.function(cut)):
        for index in range(3):
            wanted, ragged_part, sparse_part, none = function(batch, tf.constant(index))

            assert none is None
            np.testing.assert_array_equal(ragged_part, wanted)
            np.testing.assert_array_equal(sparse_part, wanted)


@pytest.mark.parametrize("make", [np.int64, lambda index: tf.constant(index, tf.int64)])
def test_an_index_of_64_bits_is_an_index(make):
    """Counts of examples are int32; an index may be of NumPy, or a tensor."""
    share = strategies.whole(tf.range(7), tf.ones([7]))
    traced = tf.function(lambda: strategies.take(share, make(1), 3).batch)

    assert strategies.take(share, make(1), 3).batch.numpy().tolist() == [3, 4]
    assert traced().numpy().tolist() == [3, 4]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("examples", [6, 5, 2])
def test_a_replica_is_handed_its_share(mirrored, replicas, examples):
    """L8: the rows of all replicas are the batch, in order, of any kind of tensor; an empty share has
    none. A share's size is known while the step is traced if that of the batch is.
    """
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    dense = tf.range(examples)
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(2 * examples), [2] * examples)
    batch = {"dense": dense, "ragged": ragged, "none": None, "text": tf.strings.as_string(dense)}

    @tf.function
    def run():
        def replica(share):
            share = strategies.own_share(share)
            assert share.batch["none"] is None
            assert (
                examples % replicas or tf.get_static_value(share.examples) == examples // replicas
            )
            part = cut_rows((share.batch["dense"], share.batch["ragged"]), 0, share.examples)
            return (*part, share.batch["text"], share.weights)

        shares = strategies.shares(batch, tf.range(1.0, examples + 1.0), strategy)
        return strategy.run(replica, args=(shares,))

    dense, ragged, text, weights = map(strategy.experimental_local_results, run())
    sizes = [len(part) for part in np.array_split(np.arange(examples), replicas)]
    assert [len(part) for part in dense] == sizes
    assert tf.concat(dense, 0).numpy().tolist() == list(range(examples))
    assert tf.concat(ragged, 0).flat_values.numpy().tolist() == list(range(2 * examples))
    assert [len(part) for part in text] == [max(size, 1) for size in sizes]
    assert float(sum(map(tf.reduce_sum, weights))) == sum(range(1, examples + 1))
