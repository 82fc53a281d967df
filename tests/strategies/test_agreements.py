"""The two agreements."""

import numpy as np
import pytest
import tensorflow as tf

import strategies


def replica_id():
    """This replica's number, as float32."""
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


def test_several_replica_counts_in_one_process(on_replicas):
    """L7: 2, 4, 3 and 2 replicas, made in turn in one process, sum right on every replica."""
    for replicas in [2, 4, 3, 2]:
        strategy = strategies.create("mirrored", [f"CPU:{index}" for index in range(replicas)])
        sums = on_replicas(strategy, lambda: strategies.sum_gradients(replica_id() + 1))

        assert [replicas * (replicas + 1) / 2] * replicas == [float(total) for total in sums]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_kind_of_gradient_survives(mirrored, on_replicas, replicas):
    """None stays None, sparse stays sparse, the structure stays."""
    strategy = mirrored(replicas)

    def replica():
        slices = tf.IndexedSlices(replica_id()[None], tf.constant([7]), tf.constant([9]))
        summed = strategies.sum_gradients({"a": [None, tf.ones([2, 3])], "b": slices})
        assert summed["a"][0] is None
        assert isinstance(summed["b"], tf.IndexedSlices)
        return summed["a"][1], tf.convert_to_tensor(summed["b"])

    dense, sparse = on_replicas(strategy, replica)
    for values, row in zip(dense, sparse, strict=True):
        np.testing.assert_array_equal(values, np.full([2, 3], replicas))
        assert float(row[7]) == sum(range(replicas))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_one_replica_can_veto(mirrored, on_replicas, replicas):
    """L5: whoever says no, and however many do, no replica hears yes."""
    strategy = mirrored(replicas)
    for noes in range(2**replicas):
        against = tf.constant([bool(noes >> index & 1) for index in range(replicas)])

        def replica(against=against):
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            return strategies.agree(~against[index])

        answers = on_replicas(strategy, replica)
        assert [noes == 0] * replicas == [bool(answer) for answer in answers]


@pytest.mark.parametrize(
    ("call", "argument"), [(strategies.agree, True), (strategies.sum_gradients, [1.0])]
)
def test_agreements_need_replicas(mirrored, call, argument):
    """In cross-replica context there is nobody to agree with, and the error says where to call."""
    with mirrored(2).scope(), pytest.raises(RuntimeError, match=r"Call it inside the function"):
        call(argument)


def test_a_sum_of_three_has_one_order(mirrored):
    """L7: the bits of a sum do not depend on who else is using what is summed."""
    strategy = mirrored(3)

    @tf.function
    def total(numbers, held):
        def replica():
            context = tf.distribute.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            value = tf.sin(number * numbers)
            return strategies.sum_gradients([value]), value

        sums, values = strategy.run(replica)
        kept = strategy.experimental_local_results(values)[:2] if held else ()
        return strategy.experimental_local_results(sums[0])[0], kept

    numbers = tf.random.normal([1000])
    held, alone = (total(numbers, held)[0].numpy() for held in (True, False))
    assert held.tobytes() == alone.tobytes()
