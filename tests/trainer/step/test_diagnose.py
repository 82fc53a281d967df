"""Why a step was skipped, and where: the cause, the replica, the variable and the counts."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from scaling import Cause
from trainer.step.diagnose import (
    Evidence,
    NonfiniteTable,
    count_by_variable,
    diagnose,
    first_row,
    first_true,
    no_finding,
    own_row,
    squares_overflow,
)
from trainer.step.types import NonfiniteFlags

INF, NAN = np.inf, np.nan
REPLICAS, VARIABLES = 3, 2
FLOOR = 2.0**-30
RULE = SimpleNamespace(min_scale=FLOOR)


def finding_of(
    *,
    weights=(0, 0),
    losses=((0, 0),) * REPLICAS,
    statistics_finite=True,
    local=(0,) * REPLICAS,
    summed=(0, 0),
    unscaled=(0, 0),
    scale=2.0**-20,
    rule=RULE,
    single_pass=False,
):
    """What `diagnose` returns for a skipped step, as plain numbers.

    Args:
        weights: an element of each weight, whose other elements are 0.
        losses: for each replica the number of losses that are inf, and NaN.
        statistics_finite: whether the variables that the forward pass assigns stay finite.
        local: for each replica 1 + the position of its first bad gradient; 0 if none is bad.
        summed: an element of each gradient's sum.
        unscaled: the same after unscaling, where the sum is finite.
        scale: the loss scale.
        rule: the loss-scale rule.
        single_pass: see `diagnose`.
    """
    finite = [2.0**127 if value == INF else value * scale for value in unscaled]
    summed = [value or other for value, other in zip(summed, finite, strict=True)]
    weights, summed = ([tf.constant([0.0, each]) for each in row] for row in (weights, summed))
    table = NonfiniteTable(
        loss=tf.constant([float(sum(row) > 0) for row in losses]),
        losses=tf.constant(losses, tf.float32),
        gradient=tf.constant(local, tf.float32),
    )
    evidence = Evidence(table, tf.constant(statistics_finite), summed)
    state = SimpleNamespace(loss_scale=tf.constant(scale))
    (cause, *place), no_inf = diagnose(
        evidence, weights, state, rule, single_pass=single_pass, in_xla=False
    )
    assert bool(no_inf) == (not np.isinf(summed).any())
    return Cause(int(cause)), *map(int, place)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"weights": (0, NAN)}, (Cause.WEIGHTS, -1, 1, 0, 1)),
        ({"losses": ((0, 0), (2, 1), (1, 0))}, (Cause.FORWARD, 1, -1, 2, 1)),
        ({"statistics_finite": False}, (Cause.FORWARD, -1, -1, 0, 0)),
        ({"local": (0, 0, 2), "summed": (0, INF)}, (Cause.BACKWARD, 2, 1, 1, 0)),
        ({"local": (0, 2, 1), "summed": (INF, NAN)}, (Cause.BACKWARD, 1, 1, 0, 1)),
        ({"summed": (0, -INF)}, (Cause.REDUCTION, -1, 1, 1, 0)),
        ({"unscaled": (0, INF)}, (Cause.UNSCALING, -1, 1, 1, 0)),
        ({"unscaled": (0, 1e25)}, (Cause.UNSCALING, -1, 1, 0, 0)),  # its square overflows
        ({"unscaled": (1.5e19, 1.5e19)}, (Cause.UNSCALING, -1, -1, 0, 0)),  # only the norm does
    ],
)
def test_each_cause(arguments, expected):
    """L17: each cause is found where it first appeared, with the replica, the variable and counts."""
    assert finding_of(**arguments) == expected


FAULTS = {
    Cause.WEIGHTS: {"weights": (INF, 0)},
    Cause.FORWARD: {"losses": ((0, 1), (0, 0), (0, 0))},
    Cause.BACKWARD: {"local": (1, 0, 0)},
    Cause.REDUCTION: {"summed": (INF, 0)},
    Cause.UNSCALING: {"unscaled": (INF, 0)},
}


@given(st.sets(st.sampled_from(list(FAULTS)), min_size=1))
def test_the_earliest_cause_counts(causes):
    """L17: of several faults, the cause is the one that comes first in the step."""
    arguments = {}
    for cause in causes:
        arguments |= FAULTS[cause]

    assert finding_of(**arguments)[0] is next(cause for cause in FAULTS if cause in causes)


@pytest.mark.parametrize("cause", FAULTS)
@pytest.mark.parametrize(
    ("scale", "rule"), [(FLOOR, RULE), (2 * FLOOR, RULE), (FLOOR, SimpleNamespace())]
)
def test_at_the_floor_no_backoff_is_left(cause, scale, rule):
    """L17: at `min_scale` an overflow is attributed to the model, because no smaller scale is left;
    other causes stay, and so does every cause under a rule without a floor.
    """
    at_floor = scale == FLOOR and rule is RULE
    curable = cause in (Cause.BACKWARD, Cause.REDUCTION)
    expected = Cause.MODEL if at_floor and curable else cause

    assert finding_of(**FAULTS[cause], scale=scale, rule=rule)[0] is expected


def test_a_single_pass_is_diagnosed_from_its_gradients():
    """With one microbatch on one replica, a bad gradient is backward, although no flag was set."""
    one_replica = {"losses": ((0, 0),), "local": (0,), "single_pass": True}

    assert finding_of(summed=(0, NAN), **one_replica) == (Cause.BACKWARD, 0, 1, 0, 1)
    assert finding_of(unscaled=(INF, 0), **one_replica) == (Cause.UNSCALING, -1, 0, 1, 0)


def test_a_finite_step_has_no_finding():
    """The finding of a finite step names no replica and no variable."""
    assert [int(field) for field in no_finding()] == [int(Cause.NONE), -1, -1, 0, 0]


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_replica_fills_its_own_row(mirrored, on_replicas, replicas):
    """The sum of all replicas' tables has the flags of each replica in its row."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = tf.cast(index, tf.float32)
        gradients = tf.constant([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[index]
        return own_row(
            NonfiniteFlags(number, tf.stack([number, 2 * number]), gradients),
            tf.distribute.get_replica_context(),
        )

    tables = on_replicas(strategy, replica)
    loss, losses, gradient = (sum(np.array(rows)).tolist() for rows in tables)

    assert loss == [0.0, 1.0, 2.0][:replicas]
    assert losses == [[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]][:replicas]
    assert gradient == [0.0, 2.0, 1.0][:replicas]


@pytest.mark.parametrize(("loss", "finite"), [([0, 0], True), ([0, 1], False), ([2, 0], False)])
def test_losses_finite(loss, finite):
    """The losses are finite only if they are on every replica."""
    table = NonfiniteTable(tf.constant(loss, tf.float32), tf.zeros([2, 2]), tf.zeros([2]))

    assert table.losses_finite.numpy() == finite


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_first_true(flags):
    """`first_true` returns the position of the first true flag, or -1 if all are false."""
    expected = flags.index(True) if any(flags) else -1

    assert int(first_true(tf.constant(flags))) == expected
    assert int(first_row(tf.cast(tf.constant(flags), tf.int32)[:, None])) == expected


@pytest.mark.parametrize("in_xla", [False, True])
def test_counts_by_variable(in_xla):
    """Infs, NaNs and overflowing squares are found by variable, in sparse gradients too."""
    sparse = tf.IndexedSlices(tf.constant([NAN, INF, INF]), tf.range(3), tf.constant([9]))
    values = [tf.constant([1.0]), None, sparse, tf.constant([[1e25], [-INF]]), tf.constant(NAN)]

    counts = count_by_variable(values, in_xla=in_xla).numpy().tolist()
    assert counts == [[0, 0], [0, 0], [2, 1], [1, 0], [0, 1]]
    assert squares_overflow(values[:4]).numpy().tolist() == [False, False, True, True]


@pytest.mark.thorough
def test_no_slice_has_to_be_known_to_the_compiler():
    """No slice begins at a computed position. To compile the branch of a skip, XLA would otherwise
    compute every gradient on the host first, which takes minutes even for a small perceptron.
    """
    values = [tf.TensorSpec([2]), tf.TensorSpec([3])]

    @tf.function
    def run(table, summed):
        evidence = Evidence(NonfiniteTable(*table), tf.constant(True), summed)
        state = SimpleNamespace(loss_scale=tf.constant(8.0))
        return diagnose(evidence, summed, state, RULE, single_pass=False, in_xla=True)

    table = [tf.TensorSpec([REPLICAS]), tf.TensorSpec([REPLICAS, 2]), tf.TensorSpec([REPLICAS])]
    graph = run.get_concrete_function(table, values).graph
    begins = [each.inputs[1] for each in graph.get_operations() if each.type == "StridedSlice"]

    assert all(begin.op.type == "Const" for begin in begins)
