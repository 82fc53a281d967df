"""The microbatches of a share, one after the other."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from plans import Pair, keras_model, pass_inputs_of, plan_of

import strategies
from trainer.step.accumulate import (
    accumulate,
    as_int32,
    from_int32,
    integers_of_first,
    lowest,
    maxima,
    sum_over_replicas,
    sums_and_first,
)
from trainer.step.types import Contribution, Microbatch, NonfiniteFlags

pytestmark = pytest.mark.sampled


def accumulated(plan, batch, parts, weights=None):
    """The results of a whole batch in microbatches, in a graph."""
    inputs = pass_inputs_of(plan, batch, weights, parts=parts)

    @tf.function(autograph=False)
    def run():
        return accumulate(plan.groups[0].differentiate, inputs)

    return run()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_microbatches_add_up_to_the_whole_batch(parts):
    """L8: gradients and losses are those of the whole batch, even if a microbatch is empty."""
    batch, weights = tf.constant([1.0, 2.0, 4.0]), [1.0, 2.0, 1.0]
    whole = accumulated(plan_of(Pair()), batch, 1, weights)
    summed = accumulated(plan_of(Pair(), num_microbatches=parts), batch, parts, weights)

    for expected, found in zip(
        tf.nest.flatten(whole.contribution), tf.nest.flatten(summed.contribution), strict=True
    ):
        assert float(found) == float(expected)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_statistics_move_once_in_a_step(parts):
    """L8: BatchNorm's mean moves as far with several microbatches as with the whole batch."""
    model = keras_model()
    norm = model.layers[1]
    batch = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])
    plan = plan_of(model, num_microbatches=parts)
    position = [id(variable) for variable in plan.held_back].index(id(norm.moving_mean))
    found = accumulated(plan, batch, parts).written[str(position)]
    mean = model.layers[0](batch).numpy().mean(axis=0)

    np.testing.assert_allclose(found, mean * (1 - norm.momentum), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("parts", "static"),
    [
        *[(parts, True) for parts in (1, 2, 3, 4)],
        *[(parts, False) for parts in (1, 2, 3, 4)],
    ],
)
def test_aux_is_that_of_the_real_examples(parts, static):
    """Aux of all microbatches is joined in order, without rows of empty microbatches."""
    model = Pair()

    def compute_loss(batch, training):
        del training
        return model.first.weight * model.second.weight * batch, {"twice": 2 * batch}

    plan = plan_of(model, compute_loss, num_microbatches=parts)

    @tf.function(input_signature=[tf.TensorSpec([3 if static else None])], autograph=False)
    def run(batch):
        weights = tf.ones_like(batch)
        inputs = pass_inputs_of(plan, tf.ones([3]), parts=parts)
        inputs = inputs._replace(share=strategies.whole(batch, weights))
        return accumulate(plan.groups[0].differentiate, inputs).rows.aux

    assert run(tf.constant([1.0, 2.0, 3.0]))["twice"].numpy().tolist() == [2.0, 4.0, 6.0]


def test_flags_are_summed():
    """Bad losses are counted over all microbatches."""
    plan = plan_of(Pair(), num_microbatches=2)
    found = accumulated(plan, tf.constant([np.nan, np.inf, 1.0, np.nan]), 2).nonfinite

    assert (float(found.loss), found.losses.numpy().tolist()) == (2.0, [1.0, 2.0])


def test_a_missing_gradient_stays_missing():
    """A variable that the loss does not reach has no gradient after several microbatches either."""
    model = Pair()

    def compute_loss(batch, training):
        del training
        return model.first.weight * batch

    plan = plan_of(model, compute_loss, num_microbatches=2)
    first, second = accumulated(plan, tf.constant([1.0, 3.0]), 2).contribution.gradients

    assert (float(first), second) == (2.0, None)


def test_the_first_microbatch_gives_the_integers():
    """A counter has no mean: it takes the first microbatch's value, and floats are summed."""
    total = {"0": tf.constant(7), "1": tf.constant(0.5)}
    new = {"0": tf.constant(9), "1": tf.constant(0.25)}
    found = [sums_and_first(total, new, tf.constant(index)) for index in (0, 1)]

    assert [(int(each["0"]), float(each["1"])) for each in found] == [(9, 0.75), (7, 0.75)]


@pytest.mark.parametrize(("examples", "expected"), [(0, [1.0, 2.0]), (2, [5.0, 2.0])])
def test_an_empty_share_has_no_maximum(examples, expected):
    """L20: values that replace variables are combined by their maximum, without empty shares."""
    share = strategies.Share((), (), tf.constant(examples))
    highest, new = {"0": tf.constant([1.0, 2.0])}, {"0": tf.constant([5.0, -3.0])}

    assert maxima(highest, new, share)["0"].numpy().tolist() == expected
    assert float(lowest(tf.TensorSpec([], tf.float32))) == tf.float32.min


def reduced(strategy, on_replicas, local_of):
    """Every replica's sums of what `local_of` returns for a replica's index.

    They are the dense gradient, the total loss, the total regularization loss, the table, and the
    written float.
    """

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        found = sum_over_replicas(*local_of(index))
        gradient, missing = found.total.gradients
        assert missing is None
        total = found.total
        written = found.written["0"]
        return gradient, total.loss, total.regularization_loss, *found.table[:2], written

    return list(zip(*on_replicas(strategy, replica), strict=True))


def local_of(examples):
    """Each replica's results: everything is its number, counted from 1.

    Args:
        examples: number of examples on each replica.
    """

    def of(index):
        number = tf.cast(index, tf.float32) + 1.0
        share = strategies.Share((), (), tf.constant(examples)[index])
        contribution = Contribution([number * tf.ones([2]), None], number, 10.0 * number)
        nonfinite = NonfiniteFlags(number, tf.stack([number, 0.0]), tf.zeros([2]))
        written = {"0": number, "1": tf.cast(number, tf.int32)}
        return Microbatch(contribution, nonfinite, written, {}, ()), share

    return of


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_everything_is_summed_over_replicas(mirrored, on_replicas, replicas):
    """L7: gradients and losses are summed; every replica has the same sums; a missing gradient stays
    missing, and the table has a row for each replica.
    """
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    total, rows = float(sum(range(1, replicas + 1))), list(range(1, replicas + 1))
    found = reduced(strategy, on_replicas, local_of([1] * replicas))

    assert len(found) == replicas
    for gradient, loss, regularization, losses_bad, counts, _ in found:
        assert gradient.numpy().tolist() == [total, total]
        assert (float(loss), float(regularization)) == (total, 10 * total)
        assert losses_bad.numpy().tolist() == counts.numpy()[:, 0].tolist() == rows


def test_parts_of_means_are_summed(mirrored, on_replicas):
    """Step 10: float statistics become their mean over the examples of all replicas."""
    for found in reduced(mirrored(3), on_replicas, local_of([2, 2, 1])):
        assert float(found[-1]) == 6.0


@pytest.mark.parametrize(
    ("examples", "values", "maximum"),
    [([2, 2, 1], [1.0, 3.0, 2.0], 3.0), ([1, 1, 0], [-1.0, -2.0, 9.0], -1.0)],
)
def test_values_that_replace_variables_become_their_maximum(
    mirrored, on_replicas, examples, values, maximum
):
    """L20: every replica gets the element-wise maximum over the replicas that had examples."""

    def of(index):
        local, share = local_of(examples)(index)
        value = tf.constant(values)[index] * tf.constant([1.0, 2.0])
        return local._replace(replaced={"0": value}), share

    for found in reduced(mirrored(3), on_replicas, of):
        assert found[-1].numpy().tolist() == [maximum, 2 * maximum]


def test_sparse_sums_are_coalesced(mirrored, on_replicas):
    """L9: rows of several replicas that share an index become one row."""

    def of(index):
        local, share = local_of([1, 1])(index)
        rows = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([2]), tf.constant([4, 1]))
        contribution = local.contribution._replace(gradients=[rows, None])
        return local._replace(contribution=contribution), share

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = sum_over_replicas(*of(index)).total.gradients[0]
        return gradient.indices, gradient.values

    indices, values = on_replicas(mirrored(2), replica)

    assert [copy.numpy().tolist() for copy in indices] == [[2], [2]]
    assert [copy.numpy().tolist() for copy in values] == [[[2.0]], [[2.0]]]


def test_integers_are_the_first_replicas(mirrored, on_replicas):
    """Counters have no mean: every replica gets the first replica's integers, in their own dtype."""

    def replica():
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.int64) + 7
        return integers_of_first({"0": number, "1": tf.constant(0.5)}, context)

    found = on_replicas(mirrored(3), replica)

    assert list(found) == ["0"]
    assert [(int(copy), copy.dtype) for copy in found["0"]] == [(7, tf.int64)] * 3


WIDE = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("compiled", [False, True])
def test_integers_of_64_bits_are_exact(mirrored, on_replicas, compiled):
    """Counts beyond 2^31 keep all their bits on the way to the other replicas, under XLA too."""
    wide = tf.constant(WIDE, tf.int64)

    def back(number):
        return from_int32(as_int32(number), number)

    assert tf.function(back, jit_compile=compiled)(wide).numpy().tolist() == WIDE

    def replica():
        context = tf.distribute.get_replica_context()
        index = tf.cast(context.replica_id_in_sync_group, tf.int64)
        unsigned = tf.constant([2**64 - 1, 2**63], tf.uint64)
        return integers_of_first({"0": wide + index, "1": unsigned, "2": index == 0}, context)

    found = on_replicas(mirrored(3), replica)

    assert [copy.numpy().tolist() for copy in found["0"]] == [WIDE] * 3
    assert [copy.numpy().tolist() for copy in found["1"]] == [[2**64 - 1, 2**63]] * 3
    assert [bool(copy) for copy in found["2"]] == [True] * 3


HALF = ["float16", "bfloat16"]


def sums_in(dtype, strategy, on_replicas, rows):
    """Every replica's sum of the rows, one row a replica, that `sum_over_replicas` finds."""

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        local, share = local_of([1] * len(rows))(index)
        own = tf.constant(rows, tf.float32)[index]
        sparse = tf.IndexedSlices(own[None], index[None], tf.constant([len(rows), len(rows[0])]))
        contribution = local.contribution._replace(gradients=[own, None, sparse])
        local = local._replace(contribution=contribution, replaced={"2": own})
        found = sum_over_replicas(local, share, dtype)
        dense, missing, slices = found.total.gradients
        assert missing is None
        others = found.total.loss, found.table.loss, found.written["0"], found.written["2"]
        return dense, tf.convert_to_tensor(slices), *others

    return list(zip(*on_replicas(strategy, replica), strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("dtype", HALF)
def test_sums_in_half_precision_are_within_their_bound(mirrored, on_replicas, replicas, dtype):
    """L8: a sum of R gradients in half precision is within ((1 + u)^R - 1) times the sum of their
    magnitudes, and R halves of the smallest number, where u is half of the dtype's eps: each is
    rounded once, and the sum R - 1 times. Every replica has the same bits, in float32.
    """
    info = ml_dtypes.finfo(dtype)
    random = np.random.default_rng(replicas)
    exponents = random.integers(-27, 12, size=3000)  # of the same size on all replicas
    rows = (random.normal(size=[replicas, 3000]) * 2.0**exponents).astype(np.float32)
    found = sums_in(dtype, mirrored(replicas), on_replicas, rows)

    u = float(info.eps) / 2
    magnitudes = np.abs(rows.astype(np.float64)).sum(axis=0)
    bound = ((1 + u) ** replicas - 1) * magnitudes + replicas * float(info.smallest_subnormal) / 2
    for dense, sparse, *_ in found:
        assert dense.dtype == sparse.dtype == tf.float32
        assert dense.numpy().tobytes() == found[0][0].numpy().tobytes()
        assert (np.abs(dense - rows.astype(np.float64).sum(axis=0)) <= bound).all()
        assert (sparse.numpy() == tf.cast(tf.cast(rows, dtype), tf.float32).numpy()).all()


@pytest.mark.parametrize("dtype", HALF)
def test_only_gradients_are_summed_in_half_precision(mirrored, on_replicas, dtype):
    """Losses, flags, parts of means and the maxima of float8 keep numbers that half precision has
    not: 2^-30 beside 1, and 100,001.
    """
    row = [1.0 + 2.0**-12, 100_001.0, 3.0e38]

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        local, share = local_of([1, 1])(index)
        number = 1.0 + 2.0**-12
        contribution = local.contribution._replace(loss=tf.where(index == 0, number, 0.0))
        written = {"0": tf.where(index == 0, number, 0.0)}
        local = Microbatch(contribution, local.nonfinite, written, {"2": tf.constant(row)}, ())
        found = sum_over_replicas(local, share, dtype)
        return found.total.loss, found.written["0"], found.written["2"]

    for loss, mean, largest in zip(*on_replicas(mirrored(2), replica), strict=True):
        assert float(loss) == float(mean) == 1.0 + 2.0**-12
        assert largest.numpy().tolist() == tf.constant(row).numpy().tolist()


def test_what_half_precision_computed_is_sent_without_loss(mirrored, on_replicas):
    """A gradient that float16 has computed is sent in float16 with its own bits; one of float32 is
    rounded.
    """
    rows = [[1.0 + 2.0**-10, 2.0**-24, 65504.0, 1.0 + 2.0**-12], [0.0, 0.0, 0.0, 0.0]]
    for dense, *_ in sums_in("float16", mirrored(2), on_replicas, rows):
        assert dense.numpy().tolist() == [1.0 + 2.0**-10, 2.0**-24, 65504.0, 1.0]
