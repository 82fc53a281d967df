"""Replicas agree on sums and on verdicts."""

import numpy as np
import pytest
import tensorflow as tf

import strategies


def replica_id():
    """Returns the index of this replica, as float32."""
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


def test_several_replica_counts_in_one_process(on_replicas):
    """L7: strategies of 2, 4, 3 and 2 replicas, made in turn in one process, all sum correctly."""
    for replicas in [2, 4, 3, 2]:
        strategy = strategies.create("mirrored", [f"CPU:{index}" for index in range(replicas)])
        sums = on_replicas(strategy, lambda: strategies.sum_gradients(replica_id() + 1))

        assert [replicas * (replicas + 1) / 2] * replicas == [float(total) for total in sums]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_kind_of_gradient_is_kept(mirrored, on_replicas, replicas):
    """A sum keeps None as None, sparse gradients sparse, and the structure as it is."""
    strategy = mirrored(replicas)

    def replica():
        slices = tf.IndexedSlices(replica_id()[None], tf.constant([7]), tf.constant([9]))
        summed = strategies.sum_gradients(
            {"a": [None, tf.ones([2, 3])], "b": slices, "c": tf.constant([1, 2])}
        )
        assert summed["c"].dtype == tf.int32
        tf.debugging.assert_equal(summed["c"], replicas * tf.constant([1, 2]))
        assert summed["a"][0] is None
        assert isinstance(summed["b"], tf.IndexedSlices)
        return summed["a"][1], tf.convert_to_tensor(summed["b"])

    dense, sparse = on_replicas(strategy, replica)
    for values, row in zip(dense, sparse, strict=True):
        np.testing.assert_array_equal(values, np.full([2, 3], replicas))
        assert float(row[7]) == sum(range(replicas))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_any_replica_can_veto(mirrored, on_replicas, replicas):
    """L5: every replica gets False if one or more of them voted False, for every combination."""
    strategy = mirrored(replicas)
    for pattern in range(2**replicas):
        votes_no = tf.constant([bool(pattern >> index & 1) for index in range(replicas)])

        def replica(votes_no=votes_no):
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            return strategies.agree(~votes_no[index])

        answers = on_replicas(strategy, replica)
        assert [pattern == 0] * replicas == [bool(answer) for answer in answers]


def test_gradients_are_not_summed_as_integers():
    """They would lose their fractions."""
    with pytest.raises(ValueError, match=r"^`dtype`"):
        strategies.sum_gradients([1.5], "int32")


def test_a_sum_of_three_has_one_order(mirrored):
    """L7: the bits of a sum do not depend on what else uses the values that are added."""
    strategy = mirrored(3)

    @tf.function
    def total(numbers, use_values):
        def replica():
            context = tf.distribute.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            value = tf.sin(number * numbers)
            return strategies.sum_gradients([value]), value

        sums, values = strategy.run(replica)
        used = strategy.experimental_local_results(values)[:2] if use_values else ()
        return strategy.experimental_local_results(sums[0])[0], used

    numbers = tf.random.normal([1000])
    with_others, by_itself = (total(numbers, use)[0].numpy() for use in (True, False))
    assert with_others.tobytes() == by_itself.tobytes()


@pytest.mark.parametrize("flag", [True, False])
def test_a_single_worker_decides_by_itself(mirrored, flag):
    """Without other workers, `any_worker` returns the flag and `from_chief` the number."""
    strategy = mirrored(2)

    assert strategies.any_worker(flag, strategy) is flag
    tensor = tf.constant(flag)
    assert strategies.any_worker(tensor, strategy) is tensor
    assert strategies.from_chief(7 + flag, strategy) == 7 + flag


@pytest.mark.parametrize(
    ("dtype", "bucket_bytes", "buckets"),
    [
        (None, None, [["f", 340]]),
        (None, 1, [["f", 100], ["f", 200], ["f", 40]]),
        (None, 400, [["f", 300], ["f", 40]]),
        ("float16", None, [["h", 340]]),
        ("bfloat16", 200, [["b", 300], ["b", 40]]),
    ],
)
def test_each_bucket_is_one_collective(dtype, bucket_bytes, buckets):
    """L7: on each replica a sum is one collective, or one per bucket, from the last tensor to the
    first: a bucket is full when it holds more than `bucket_bytes`. It has the dtype that was asked for.
    """
    # TensorFlow's own sums on CPUs: the same collectives as between workers. Traced, not run.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def total():
        def replica():
            tensors = [replica_id() * tf.ones([size]) for size in (40, 200, 100)]
            return strategies.sum_gradients([*tensors, None], dtype, bucket_bytes)[:3]

        return strategy.run(replica)

    graph = total.get_concrete_function().graph
    found = [each for each in graph.get_operations() if each.type.startswith("CollectiveReduce")]
    names = {tf.float32: "f", tf.float16: "h", tf.bfloat16: "b"}
    sums = [[names[each.inputs[0].dtype], each.inputs[0].shape[0]] for each in found]
    assert sorted(sums) == sorted(2 * buckets)
    assert sums[0] == buckets[0]


def test_sparse_sums_where_a_collective_takes_one_shape():
    """L7: a sum of any number of rows is dense, since every batch may have another number; a sum of a
    known number stays sparse.
    """
    # In one test, because collectives of a second strategy in this process would fail.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    sparse = []

    def replica(indices):
        values = (replica_id() + 1) * tf.ones([tf.shape(indices)[0], 1])
        values = tf.ensure_shape(values, [indices.shape[0], 1])
        summed = strategies.sum_gradients(tf.IndexedSlices(values, indices, tf.constant([9, 1])))
        sparse.append(isinstance(summed, tf.IndexedSlices))
        return tf.convert_to_tensor(summed)

    for rows, cases in {None: [[7, 3, 7], [1], [], [7, 7, 7, 0]], 2: [[7, 3], [7, 7]]}.items():

        @tf.function(input_signature=[tf.TensorSpec([rows], tf.int32)])
        def total(indices):
            return strategy.experimental_local_results(strategy.run(replica, args=(indices,)))

        for indices in cases:
            expected = 3.0 * np.bincount(np.int64(indices), minlength=9)[:, None]
            for found in total(tf.constant(indices, tf.int32)):
                np.testing.assert_array_equal(found, expected)
    assert sparse == [False, False, True, True]
