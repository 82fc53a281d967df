"""The verdict: measurements of gradients, also of whole runs whose record is simulated; what is applied;
and clipping.
"""

import itertools
import json
import math
import subprocess
import sys

import access
import generators
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, slopes
from hypothesis import example, given, settings
from hypothesis import strategies as st

import scaling
from scaling import Cause
from scaling.base.number_formats import HALF_MAX
from scaling.telemetry.record import read_record
from scaling.telemetry.simulate_rules import best_fixed_scale, compare, simulate_rule
from trainer import Checkpoints, Monitoring, Updates
from trainer.step.verdict import (
    clip,
    global_norm,
    half_squared_norm,
    half_squared_norm_in_rows,
    judge,
    measure,
    stay_finite,
)

pytestmark = pytest.mark.sampled

RULES = {
    "dynamic": scaling.DynamicLossScale(2.0**22, growth_interval=7),
    "hysteresis": scaling.DynamicLossScale(2.0**22, growth_interval=7, hysteresis=3),
    "tolerant": scaling.TolerantLossScale(2.0**22, growth_interval=7, tolerance=0.3),
    "headroom": scaling.HeadroomLossScale(2.0**24, headroom_bits=0, growth_interval=3),
    "logmax": scaling.LogMaxLossScale(2.0**24, deviations=0.5, mean_decay=0.9),
    "fixed": scaling.FixedLossScale(2.0**17),
}
STEPS = 120


def batches(count=STEPS, seed=0):
    """Batches of `Linear` whose gradients range over many powers of two; one in thirty
    is infinite.
    """
    rng = np.random.default_rng(seed)
    sizes = np.exp2(np.cumsum(rng.normal(0, 1.5, count)) * 0.5 + rng.normal(0, 0.5, count) - 2)
    sizes[11::30] = np.inf
    return [slopes(size, size / 2, -size / 4) for size in sizes]


def run(rule, model_dir, precision="mixed_float16", steps=STEPS, **arguments):
    """Trains on the batches with recorded gradients; returns the summary."""
    data = batches()
    specs = {"x": tf.TensorSpec([3, 1]), "slope": tf.TensorSpec([3])}
    dataset = untuned(tf.data.Dataset.from_generator(lambda: iter(data), output_signature=specs))
    trainer = Linear(
        precision=precision,
        loss_scale=rule,
        model_dir=model_dir,
        checkpoints=Checkpoints(data_resume="restart"),
        verbose=False,
        monitoring=Monitoring(record_gradients=True),
        log_interval=25,
        **arguments,
    )
    trainer.build_optimizer = lambda: keras.optimizers.SGD(2.0**-20)
    return trainer.train(dataset, steps=steps)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RULES)
def test_simulating_the_rule_of_a_run_repeats_the_run(name, tmp_path):
    """Simulating a run's own rule on its record gives exactly its scales and skips."""
    summary = run(RULES[name], tmp_path)
    record = read_record(tmp_path / "metrics.jsonl")
    scales, skipped = simulate_rule(RULES[name], record)

    assert list(range(1, STEPS + 1)) == record.step.tolist()
    assert record.loss_scale.tolist() == scales.tolist()
    assert record.skipped.tolist() == skipped.tolist()
    assert summary.totals.skipped == skipped.sum()
    # The run must contain both kinds of skips.
    causes = summary.totals.skipped_by_cause
    assert causes["forward"] == 4
    assert causes["backward"] >= 3


@pytest.mark.slow
def test_simulating_another_rule_predicts_its_run(tmp_path):
    """With weights that hardly move, simulating one rule on another's record predicts its skips."""
    for name in ("headroom", "dynamic"):
        run(RULES[name], tmp_path / name)
    record = read_record(tmp_path / "headroom" / "metrics.jsonl")
    own = read_record(tmp_path / "dynamic" / "metrics.jsonl")
    _, skipped = simulate_rule(RULES["dynamic"], record)

    assert abs(int(skipped.sum()) - int(own.skipped.sum())) <= 2
    assert own.skipped.sum() > 10


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_record_holds_what_the_gradients_were(replicas, mirrored, tmp_path):
    """Recorded magnitudes and counts are those of the reduced, unscaled gradients."""
    strategy = mirrored(3) if replicas == 3 else "default"
    run("none", tmp_path, precision="float32", strategy=strategy)
    record = read_record(tmp_path / "metrics.jsonl")
    with np.errstate(invalid="ignore"):
        means = np.array([np.abs(batch["slope"].mean()) for batch in batches()])
    expected = np.where(np.isfinite(means), means, np.nan)

    np.testing.assert_allclose(record.max_magnitude, expected, rtol=1e-6)
    assert record.counts.sum(axis=1).tolist() == [24.0, 24.0, 24.0, 25.0, 19.0]
    assert set(record.cause) == {Cause.NONE, Cause.FORWARD}
    assert (record.precision, record.shares) == ("float32", replicas)


@pytest.mark.slow
def test_the_best_fixed_scale_is_the_largest_without_an_overflow(tmp_path):
    """At the best fixed scale a run skips only the batches that no scale can help; at twice that
    scale it overflows.
    """
    run("none", tmp_path / "float32", precision="float32")
    record = read_record(tmp_path / "float32" / "metrics.jsonl")
    best = best_fixed_scale(record)
    causes = [
        run(scaling.FixedLossScale(scale), tmp_path / str(scale)).totals.skipped_by_cause
        for scale in (best, 2 * best)
    ]

    assert np.nanmax(record.max_magnitude) * best <= HALF_MAX
    assert causes[0] == {"forward": 4}
    assert causes[1]["backward"] >= 1


@pytest.mark.thorough
def test_the_lost_share_counts_elements(tmp_path):
    """At a scale of 2^-24, the lost share is the share of elements up to 2^-1."""
    run("none", tmp_path, precision="float32")
    record = read_record(tmp_path / "metrics.jsonl")
    [recorded, low] = compare(record, ["2^-24"])
    lost = [
        np.mean(record.max_magnitude[(record.interval == row) & ~record.skipped] <= 0.5)
        for row in range(5)
    ]
    steps = [np.sum((record.interval == row) & ~record.skipped) for row in range(5)]

    assert low.lost == pytest.approx(np.average(lost, weights=steps))
    assert 0.02 < low.lost < 0.98
    assert recorded.lost < low.lost
    assert low.below_best == STEPS


@pytest.mark.slow
def test_a_step_of_a_resumed_run_is_read_once(tmp_path):
    """If a resumed run wrote a step twice, the later line counts."""
    run("dynamic", tmp_path, steps=50, checkpoints=Checkpoints(interval=20))
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = next(line for line in reversed(lines) if line["split"] == "gradients")
    repeated = dict(last, loss_scale=[4.0] * len(last["loss_scale"]))
    path.write_text(path.read_text() + json.dumps(repeated) + "\n")
    record = read_record(path)

    assert record.step.tolist() == list(range(1, 51))
    assert set(record.loss_scale[25:]) == {4.0}
    assert record.loss_scale[24] != 4.0


@pytest.mark.thorough
def test_nothing_is_recorded_unless_asked_for(tmp_path):
    """Without `record_gradients` nothing is counted or written, and the error says so."""
    trainer = Linear(model_dir=tmp_path, verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=2, global_batch=2)
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ValueError, match="record_gradients"):
        read_record(path)

    assert "DenseBincount" not in operations(trainer)
    assert "DenseBincount" in operations(recording(tmp_path))


def recording(tmp_path):
    """A trainer that records gradients, after one step."""
    trainer = Linear(
        model_dir=tmp_path / "recording",
        verbose=False,
        monitoring=Monitoring(record_gradients=True),
    )
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)
    return trainer


def operations(trainer):
    """The types of operations in a trainer's loop, including the functions it calls."""
    [concrete] = access.steps(trainer)._list_all_concrete_functions()
    functions = concrete.graph.as_graph_def().library.function
    return {node.op for function in functions for node in function.node_def}


@pytest.mark.slow
def test_a_damaged_line_is_refused_by_its_number(tmp_path):
    """A torn last line raises an error that names it."""
    run("dynamic", tmp_path, steps=30)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1][:40]]))
    with pytest.raises(ValueError, match=rf"Line {len(lines)} of .* is damaged"):
        read_record(path)


@pytest.mark.slow
def test_the_program_prints_a_table_and_draws(tmp_path):
    """`python -m scaling.simulate` prints a row for each rule and writes a picture."""
    run("dynamic", tmp_path)
    command = [sys.executable, "-m", "scaling.simulate", str(tmp_path / "metrics.jsonl")]
    result = subprocess.run(
        [*command, "--rules=pytorch,headroom:headroom_bits=2,2^4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = result.stdout.splitlines()

    assert lines[0].startswith("120 steps in mixed_float16; best fixed scale: 2^")
    assert [line.split()[0] for line in lines[3:6]] == [
        "pytorch",
        "headroom:headroom_bits=2",
        "2^4",
    ]
    assert lines[2].split()[:3] == [
        "as",
        "recorded",
        str(read_record(tmp_path / "metrics.jsonl").skipped.sum()),
    ]
    assert lines[-1] == f"Plot written to {tmp_path / 'scales.png'}"
    assert (tmp_path / "scales.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_program_says_what_it_cannot_read(tmp_path):
    """For a file without recorded gradients, the program prints the error and nothing else."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train"}\n')
    command = [sys.executable, "-m", "scaling.simulate", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert result.returncode == 1
    assert "has no recorded gradients" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_largest_magnitude_is_measured_if_the_rule_asks():
    """Of dense and sparse gradients in any float dtype, without those that are missing."""
    state = scaling.DynamicLossScale().initial_state()
    sparse = tf.IndexedSlices(
        tf.constant([[-7.0], [1.0]]), tf.constant([3, 1]), tf.constant([5, 1])
    )
    gradients = [tf.constant([1.0, -2.0]), None, sparse, tf.constant([6.5], tf.float16)]
    asked = measure(gradients, state, range(4), magnitude=True, recorded=0)
    not_asked = measure(gradients, state, range(4), magnitude=False, recorded=0)

    assert (float(asked.max_magnitude), asked.max_magnitude.dtype) == (7.0, tf.float32)
    assert np.isnan(not_asked.max_magnitude)
    assert asked.magnitude_counts.shape == asked.underflow.shape == [0]


SPARSE = tf.IndexedSlices(tf.constant([[3.0, 4.0]]), tf.constant([1]), tf.constant([5, 2]))


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (None, 0.0),
        (tf.constant([3.0, 4.0]), 12.5),
        (SPARSE, 12.5),
        (tf.constant([1000.0], tf.float16), 500_000.0),  # beyond float16
    ],
    ids=["missing", "dense", "sparse", "float16"],
)
def test_squares_are_summed_in_float32(gradient, expected):
    """Half the sum of squares is computed in float32, whatever the gradient's dtype is."""
    found = half_squared_norm(gradient)

    assert (found.dtype, float(found)) == (tf.float32, expected)


@pytest.mark.parametrize("shape", [[1024], [33, 32], [1023], [40, 41], [7, 300, 2], []])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_squares_in_rows_are_the_same_sum(shape, jit_compile):
    """Integers add up exactly, in any order and shape, and each element counts: a square that
    overflows, inf and NaN show, wherever they are.
    """
    norm = tf.function(half_squared_norm_in_rows, jit_compile=jit_compile)
    whole = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)
    places = {place % whole.size for place in (0, 31, 32, whole.size // 2, -1)}
    for place, value in itertools.product(places, (2.0, 2e19, -np.inf, np.nan)):
        values = whole.copy()
        values.reshape(-1)[place] = value
        expected = half_squared_norm(tf.constant(values)).numpy()

        np.testing.assert_array_equal(norm(tf.constant(values)).numpy(), expected)
        assert np.isfinite(expected) == (value == 2.0)


def test_gradients_without_a_known_size_are_added_in_one_sum():
    """Missing and sparse gradients, and tensors whose shape is not known when the step is traced."""
    norm = tf.function(half_squared_norm_in_rows)
    unknown = norm.get_concrete_function(tf.TensorSpec([None, 2]))

    assert [float(half_squared_norm_in_rows(each)) for each in (None, SPARSE)] == [0.0, 12.5]
    assert float(unknown(tf.ones([3000, 2]))) == 3000.0


NORMS = [0.0, 1.0, float(np.finfo(np.float32).max), math.inf, math.nan]


def verdict_of(*, losses=True, statistics=True, norm=1.0):
    """The verdict on plain Python values."""
    return judge(
        losses_finite=tf.constant(losses),
        statistics_finite=tf.constant(statistics),
        gradient_norm=tf.constant(norm, tf.float32),
    )


@pytest.mark.parametrize(
    ("losses", "statistics", "norm"),
    list(itertools.product([True, False], [True, False], NORMS)),
)
def test_truth_table(losses, statistics, norm):
    """L5: a step is applied if the losses, the statistics and the gradient norm are all finite, and
    skipped if any of them is not.
    """
    verdict = verdict_of(losses=losses, statistics=statistics, norm=norm)

    assert verdict.numpy() == (losses and statistics and math.isfinite(norm))
    assert verdict.shape == ()


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    place=st.integers(0, 19),
    value=st.sampled_from([1.0, 1e18, 1e25, math.inf, -math.inf, math.nan]),
)
@example([1], 0, math.nan)  # the only element
@example([3, 2], 4, math.inf)  # the last one
@example([2], 1, 1e25)  # a finite element whose square overflows
def test_one_bad_element_is_enough(sizes, place, value):
    """L5: one inf, one NaN or one element whose square overflows float32, at any place in any
    gradient, skips the step.
    """
    flat = np.ones(sum(sizes), np.float32)
    flat[place % len(flat)] = value
    gradients = [tf.constant(part) for part in np.split(flat, np.cumsum(sizes)[:-1])]
    verdict = verdict_of(norm=global_norm(gradients))

    assert verdict.numpy() == (value in (1.0, 1e18))


@pytest.mark.parametrize(
    ("before", "after", "finite"),
    [
        (0.0, 1.0, True),
        (0.0, math.inf, False),
        (0.0, -math.inf, False),
        (0.0, math.nan, False),
        (math.inf, 1.0, True),
        (math.inf, math.inf, True),  # it was infinite before
        (math.nan, math.inf, True),
    ],
)
def test_a_statistic_must_not_become_bad(before, after, finite):
    """A variable that would go from finite to inf or NaN skips the step; one that was bad does not."""
    values = {"1": tf.constant(before)}

    assert stay_finite({"1": tf.constant(after)}, values).numpy() == finite


def test_every_written_float_counts():
    """One bad element of one variable is enough; integers and unwritten variables do not count."""
    before = {"0": tf.constant([0.0, 0.0]), "1": tf.constant(0), "3": tf.constant(0.0)}
    good = {"0": tf.constant([1.0, 2.0]), "1": tf.constant(7), "3": tf.constant(1.0)}

    assert stay_finite(good, before).numpy()
    assert not stay_finite(good | {"0": tf.constant([1.0, math.nan])}, before).numpy()
    assert not stay_finite(good | {"3": tf.constant(math.inf)}, before).numpy()
    assert stay_finite({"1": tf.constant(7)}, before).numpy()
    assert stay_finite({}, before).numpy()


@settings(max_examples=40)
@given(
    st.lists(st.one_of(st.none(), generators.gradients()), min_size=1, max_size=4),
    st.sampled_from([0.01, 1.0, 100.0]),
)
def test_clipping_bounds_the_norm_and_keeps_the_direction(gradients, clipnorm):
    """L9: for any list of dense, sparse and missing gradients, the norm is that of the dense
    gradient. After clipping it is at most the bound; below the bound gradients stay unchanged.
    Norms agree to n rounding errors.
    """
    gradients = [gradient for gradient in gradients if gradient is not None] or [tf.constant([1.0])]
    gradients = scaling.unscale_gradients([*gradients, None], scaling.NoLossScale().initial_state())
    dense = np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradients[:-1]])
    norm = global_norm(gradients)
    *clipped, missing = clip(gradients, norm, Updates(global_clipnorm=clipnorm))
    ours = np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in clipped])
    expected = np.linalg.norm(dense.astype(np.float64))
    tolerance = 2 * len(dense) * float(np.finfo(np.float32).eps)

    assert missing is None
    assert float(norm) == pytest.approx(expected, rel=tolerance, abs=1e-30)
    if float(norm) <= clipnorm:
        np.testing.assert_array_equal(ours, dense)
    else:
        np.testing.assert_allclose(ours, dense * (clipnorm / expected), rtol=tolerance)


SPARSE_12 = tf.IndexedSlices(tf.constant([[12.0]]), tf.constant([1]), tf.constant([3, 1]))
GRADIENTS = [tf.constant([3.0]), None, tf.constant([-4.0]), SPARSE_12]  # global norm 13


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (Updates(), [3.0, -4.0, 12.0]),
        (Updates(global_clipnorm=6.5), [1.5, -2.0, 6.0]),
        (Updates(global_clipnorm=13.0), [3.0, -4.0, 12.0]),
        (Updates(clipnorm=4.0), [3.0, -4.0, 4.0]),
        (Updates(clipvalue=3.5), [3.0, -3.5, 3.5]),
    ],
    ids=str,
)
def test_each_bound(bound, expected):
    """L9: a bound applies to all gradients together, to each of them, or to each element; missing
    gradients stay missing and sparse ones sparse.
    """
    first, missing, second, sparse = clip(GRADIENTS, tf.constant(13.0), bound)

    assert missing is None
    assert isinstance(sparse, tf.IndexedSlices)
    assert (sparse.indices.numpy().tolist(), sparse.dense_shape.numpy().tolist()) == ([1], [3, 1])
    found = [float(first[0]), float(second[0]), float(sparse.values[0, 0])]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
@pytest.mark.parametrize("bound", [2.0**-126, 2.0**63])
def test_the_outermost_bounds_keep_gradients_finite(name, bound):
    """No gradient that passes the verdict becomes inf, NaN or larger by clipping."""
    for gradient in ([2.0**63, -(2.0**62)], [2.0**-126, 0.0], [0.0, 0.0]):
        before = [tf.constant(gradient)]
        [after] = clip(before, global_norm(before), Updates(**{name: bound}))

        assert np.isfinite(after).all()
        assert (np.abs(after) <= np.abs(before[0])).all()
