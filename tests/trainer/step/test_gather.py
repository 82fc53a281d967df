"""`all_gather`: the rows of all replicas, with the gradients of one device."""

import re

import numpy as np
import pytest
import tensorflow as tf
from plans import Pair, loss_of_pair, plan_of

import strategies
from trainer.step.gather import (
    all_gather,
    check_gathers,
    check_loss_reduction,
    check_no_weights,
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


@pytest.mark.parametrize("examples", [7, 6, 2])
def test_rows_come_in_the_order_of_the_batch(mirrored, examples):
    """L8: every replica gets all rows in order, in their dtype, with uneven and empty shares."""
    rows = ROWS[:examples]
    for found in on_replicas(mirrored(3), rows, gathered):
        assert found["rows"].numpy().tolist() == rows.tolist()
        assert found["positive"].numpy().tolist() == (rows[:, 0].astype(int) > 0).tolist()
        assert found["half"].dtype == tf.float16
        assert found["half"].numpy().tolist() == rows[:, 0].astype(int).tolist()


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


MICROBATCHES = (
    "`num_microbatches` must be 1 for a loss that calls all_gather; got 2. Microbatches are computed "
    "one after the other, and each one's rows are gone before the next ones are known. Use more "
    "replicas, or save memory by keras.RematScope."
)
MEAN = (
    '`reduction` must be "global" for a loss that calls all_gather on several replicas; got '
    "'mean' and 3 replicas. Rows can be exchanged only in a step that is built for it. Pass "
    'reduction="global" and return one number, such as the mean of the losses.'
)
CONDITION = (
    "`all_gather` must be called in compute_loss itself; got a call inside tf.cond, tf.while_loop, "
    "tf.map_fn or a tf.function. Replicas that take different branches would wait for each other "
    "without end. Gather before the condition or the loop."
)
NONE = (
    '`compute_loss` must call all_gather with reduction="global" on several replicas; got none '
    "on 3 replicas. Each replica sees only its share of the batch, so the result would be the mean of "
    'other losses. Compute the loss from self.all_gather(x), or pass reduction="mean" and '
    "return one loss per example."
)
STRINGS = (
    "`x` must be numbers or bool; got string. Replicas exchange rows by adding them to zeros. Gather "
    "numbers, such as ids or labels."
)


def under_a_condition(share, size):
    """Gathers in one branch only."""
    del size
    return tf.cond(share.batch[0, 0] > 0, lambda: all_gather(share.batch), lambda: share.batch)


@pytest.mark.parametrize(
    ("loss_of", "settings", "error", "message"),
    [
        (gathered, {"num_microbatches": 2}, ValueError, MICROBATCHES),
        (gathered, {"global_loss": False}, ValueError, MEAN),
        (under_a_condition, {}, ValueError, CONDITION),
        (lambda share, _: tf.reduce_mean(share.batch), {}, ValueError, NONE),
        (lambda share, _: all_gather(tf.as_string(share.batch)), {}, TypeError, STRINGS),
    ],
    ids=["microbatches", "mean", "condition", "no gather", "strings"],
)
def test_what_cannot_be_gathered_is_refused(mirrored, loss_of, settings, error, message):
    """A gather that could not be right, or could wait without end, is refused while it is traced."""
    with pytest.raises(error) as raised:
        on_replicas(mirrored(3), ROWS, loss_of, **settings)

    assert str(raised.value) == message


def test_batches_of_any_size_are_refused_where_replicas_exchange_one_shape():
    """TensorFlow's collectives would fail at a smaller last batch, and at everything after it."""
    with pytest.raises(ValueError, match="`all_gather`"):
        on_replicas(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), ROWS, gathered)


def test_there_is_one_row_per_example(mirrored):
    """Two views in one tensor have another order on replicas than on one device: refused."""
    message = (
        "`x` must have one row per example of this replica, in the order of the batch; got shape "
        "{} for {} examples. The rows of all replicas are put together in the order of the global "
        "batch. Gather each view of the examples by itself, or make the views a second dimension."
    )
    expected = re.escape(message.format("(None, 2)", "its"))
    with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
        on_replicas(mirrored(3), ROWS, lambda share, _: all_gather(tf.repeat(share.batch, 2, 0)))


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
    """Rows that were not gathered, or of another number, are refused; one device has all rows."""
    message = (
        "`x` must have one row per example of the global batch, as all_gather returns; got shape "
        "{}. The rows of this replica are cut out of it. Pass what all_gather returned, "
        "or what was computed from it with the same first dimension."
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=re.escape(message.format("(None, 2)"))
    ):
        on_replicas(mirrored(3), ROWS, lambda share, _: own_rows(share.batch), global_loss=False)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        on_replicas(mirrored(3), ROWS, lambda *_: own_rows(tf.constant(1.0)))
    assert str(error.value).startswith("`x` ")
    assert own_rows((tf.ones([2]), None))[0].shape == [2]
    with pytest.raises(RuntimeError) as error:
        mirrored(3).run(lambda: own_rows(tf.ones([2])))
    assert str(error.value).startswith("`own_rows` ")
    with pytest.raises(TypeError, match="`x` must be a dense tensor; got a RaggedTensor"):
        own_rows(tf.ragged.constant([[1], [2, 3]]))


def test_outside_of_a_loss(mirrored):
    """One device has all rows anyway; in a replica outside of the step, nothing is known."""
    assert all_gather((tf.ones([2]), None))[0].shape == [2]
    with mirrored(3).scope():
        assert all_gather(tf.ones([2])).shape == [2]
    with pytest.raises(RuntimeError) as error:
        mirrored(3).run(lambda: all_gather(tf.ones([2])))
    assert str(error.value).startswith("`all_gather` ")
    with pytest.raises(TypeError) as error:
        all_gather(tf.ragged.constant([[1], [2, 3]]))
    assert str(error.value).startswith("`x` ")


def test_a_global_loss_is_one_float32():
    """A loss of another shape or dtype is refused."""
    assert float(scalar_loss(tf.constant(2.0))) == 2.0
    with pytest.raises(ValueError, match="`compute_loss`"):
        scalar_loss(tf.ones([3]))
    with pytest.raises(TypeError, match="`compute_loss`"):
        scalar_loss(tf.constant(1.0, tf.float16))
    assert scalar_loss(tf.constant(2.0, tf.float64)).dtype == tf.float32


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda: check_loss_reduction("global", 2),
            "`num_microbatches` ",
        ),
        (
            lambda: check_no_weights(tf.ones),
            "`example_weights` ",
        ),
        (
            lambda: check_gathers(tf.distribute.get_strategy(), True, None),
            "`jit_compile` ",
        ),
        (
            lambda: check_gathers(tf.distribute.get_strategy(), False, 100),
            "`on_stuck` ",
        ),
    ],
    ids=["microbatches", "weights", "XLA", "float32"],
)
def test_what_is_refused(check, message):
    """What a global loss cannot do is refused by name, with the way out."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        check()

    assert str(error.value).startswith(message)


def test_tpus_and_parameter_servers_are_refused(monkeypatch):
    """On several replicas of a TPU or of parameter servers nothing was tried, so it is refused."""
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(
        "trainer.step.gather.strategies.capabilities",
        lambda _: type("Found", (), {"decides_in_replica": True, "asynchronous": False}),
    )
    with pytest.raises(ValueError, match="`strategy`"):
        check_gathers(strategy, False, None)


def test_one_replica_needs_none_of_it():
    """On a single replica XLA may compile the pass, which is a `tf.function` of its own."""
    model = Pair()
    plan = plan_of(model, loss_of_pair(model), reduction="global", jit_compile=True)

    assert not plan.gathers
    assert isinstance(plan.groups[0].differentiate, type(tf.function(len)))
