"""`all_gather`: the rows of all replicas, with the gradients of one device."""

import numpy as np
import pytest
import tensorflow as tf
from plans import Pair, loss_of_pair, plan_of

import strategies
from trainer.step.gather import (
    all_gather,
    gathering,
    own_rows,
    part_of_mean,
    scalar_loss,
)
from trainer.step.types import GlobalBatchSize

ROWS = np.float32([[1, 2], [3, -1], [0.5, 4], [-2, 1], [5, 0], [1, 1], [2, -3]])


def on_replicas(strategy, batch, loss_of, **settings):
    """What `loss_of(share)` returns on each replica, with a batch divided over the replicas.

    Settings are those of `gathering`.
    """

    def replica(share, examples):
        size = GlobalBatchSize(tf.constant(1.0), examples)
        with gathering(share, size, tf.Module(), **{"global_loss": True} | settings):
            return loss_of(share, size)

    spec = tf.TensorSpec([None, *batch.shape[1:]], batch.dtype)

    @tf.function(input_signature=[spec], autograph=False)
    def run(batch):
        examples = tf.shape(batch)[0]
        shares = strategies.shares(batch, tf.ones([examples]), strategy)
        return strategy.experimental_local_results(strategy.run(replica, args=(shares, examples)))

    return run(tf.constant(batch))


def gathered(share, size):
    """The rows, and other numbers of each example."""
    del size
    ids = tf.cast(share.batch[:, 0], tf.int64)
    return all_gather({"rows": share.batch, "positive": ids > 0, "half": tf.cast(ids, tf.float16)})


def mixed(share, size):
    """The gradient, in a weight and in the rows, of this replica's part of a loss that depends on the
    weight directly, through gathered rows, and through this replica's own rows.
    """
    weight = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch([weight, share.batch])
        own = tf.sin(share.batch * weight)
        rows = all_gather(own)
        pairs = tf.reduce_mean(tf.matmul(rows, rows, transpose_b=True) ** 2) * tf.exp(weight)
        anchors = tf.reduce_mean((own - tf.reduce_mean(rows, axis=0)) ** 2)
        part = part_of_mean(pairs + anchors, share, size)
    return (part, *tape.gradient(part, [weight, share.batch]))


@pytest.mark.sampled
@pytest.mark.parametrize("examples", [7, 6, 2])
def test_rows_come_in_the_order_of_the_batch(mirrored, examples):
    """L8: every replica gets all rows in order, in their dtype, with uneven and empty shares."""
    rows = ROWS[:examples]
    for found in on_replicas(mirrored(3), rows, gathered):
        assert found["rows"].numpy().tolist() == rows.tolist()
        assert found["positive"].numpy().tolist() == (rows[:, 0].astype(int) > 0).tolist()
        assert found["half"].dtype == tf.float16
        assert found["half"].numpy().tolist() == rows[:, 0].astype(int).tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("examples", [7, 2])
def test_gradients_are_those_of_one_device(mirrored, examples):
    """L8: the replicas' gradients add up to one device's, to 1e-6, for a loss that depends on a weight
    directly, through gathered rows and through a replica's own rows; a row's gradient is complete on
    the replica that holds it.
    """
    rows = ROWS[:examples]
    [(loss, weight, of_rows)] = on_replicas(tf.distribute.get_strategy(), rows, mixed)
    parts = on_replicas(mirrored(3), rows, mixed)
    ours = np.concatenate([part[2].numpy() for part in parts])[:examples]

    assert sum(float(part[0]) for part in parts) == pytest.approx(float(loss), rel=1e-6)
    assert sum(float(part[1]) for part in parts) == pytest.approx(float(weight), rel=1e-6)
    np.testing.assert_allclose(ours, of_rows, rtol=0, atol=1e-6 * np.abs(of_rows).max())


@pytest.mark.parametrize(
    ("name", "loss_of", "settings"),
    [
        ("num_microbatches", gathered, {"num_microbatches": 2}),
        ("compute_loss", lambda share, _: tf.reduce_mean(share.batch), {}),
    ],
)
def test_what_would_be_the_loss_of_a_part_is_refused(mirrored, name, loss_of, settings):
    """Rows of one microbatch, or of one replica, are not those of the batch."""
    with pytest.raises(ValueError, match=f"`{name}` must"):
        on_replicas(mirrored(3), ROWS, loss_of, **settings)


def test_there_is_one_row_per_example(mirrored):
    """Two views in one tensor have another order on replicas than on one device: refused."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="`x` must"):
        on_replicas(mirrored(3), ROWS, lambda share, _: all_gather(tf.repeat(share.batch, 2, 0)))


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [7, 6, 2, 1])
def test_own_rows_are_the_inverse(mirrored, rows):
    """On every replica, and with shares of different sizes, the rows that were passed come back; an
    empty share gets a row that does not count.
    """

    def back(share, size):
        numbers = tf.range(size.examples)
        return (*own_rows((all_gather(share.batch), numbers)), share.batch, share.examples)

    numbered = []
    for found, number, mine, examples in on_replicas(mirrored(3), ROWS[:rows], back):
        count = int(examples)
        np.testing.assert_array_equal(found[:count], mine[:count])
        assert len(found) == len(mine) == len(number)
        numbered += number[:count].numpy().tolist()
    assert numbered == list(range(rows))


def test_own_rows_need_a_row_per_example_of_the_batch(mirrored):
    """Rows that were not gathered are another number."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="`x` must"):
        on_replicas(mirrored(3), ROWS, lambda share, _: own_rows(share.batch), global_loss=False)


@pytest.mark.parametrize("function", [all_gather, own_rows])
def test_outside_of_a_loss(mirrored, function):
    """One device has all rows anyway; in a replica outside of the step, nothing is known."""
    assert function((tf.ones([2]), None))[0].shape == [2]
    with mirrored(3).scope():
        assert function(tf.ones([2])).shape == [2]
    with pytest.raises(RuntimeError, match=f"`{function.__name__}` must"):
        mirrored(3).run(lambda: function(tf.ones([2])))


def test_a_global_loss_is_one_float32():
    """A loss of another shape or dtype is refused."""
    assert float(scalar_loss(tf.constant(2.0))) == 2.0
    with pytest.raises(ValueError, match="`compute_loss`"):
        scalar_loss(tf.ones([3]))
    with pytest.raises(TypeError, match="`compute_loss`"):
        scalar_loss(tf.constant(1.0, tf.float16))
    assert scalar_loss(tf.constant(2.0, tf.float64)).dtype == tf.float32


def test_one_replica_needs_none_of_it():
    """On a single replica XLA may compile the pass, which is a `tf.function` of its own."""
    model = Pair()
    plan = plan_of(model, loss_of_pair(model), reduction="global", jit_compile=True)

    assert not plan.gathers
    assert isinstance(plan.groups[0].differentiate, type(tf.function(len)))
