"""Float8 rules over recorded magnitudes, against plain Python and the rules themselves."""

import collections
import json
import math

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from absl import app
from absl.testing import flagsaver

from scaling.float8 import CurrentScaling, DelayedScaling, preset, simulate
from scaling.float8.cast import FORMATS
from scaling.float8.simulate import (
    TensorRecord,
    compare,
    outcome_of,
    parse_float8_rule,
    read_tensors,
    simulate_float8_rule,
    table,
)

NUMPY = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def tensor(amax, dtype="float8_e4m3fn", name="a"):
    """A recorded tensor, whose scale was 1."""
    amax = np.array(amax, np.float32)
    return TensorRecord(name, dtype, np.arange(1, len(amax) + 1), amax, np.ones_like(amax))


def write(path, *lines):
    """Writes lines about float8 tensors, after one of another kind."""
    texts = [{"step": 1, "split": "run"}, *lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in texts))


def line(step, **tensors):
    """A line: by tensor, the largest magnitude, the scale and, if it is another, the format."""
    fields = ("amax", "scale", "format")
    rows = {name: [*values, "float8_e4m3fn"][:3] for name, values in tensors.items()}
    float8 = {name: dict(zip(fields, row, strict=True)) for name, row in rows.items()}
    return {"step": step, "split": "float8", "float8": float8}


def power_above(largest, dtype):
    """The power of two that brings a magnitude to at most the format's largest number."""
    mantissa, exponent = math.frexp(largest / FORMATS[dtype].largest)
    return 2.0 ** (exponent - (mantissa == 0.5))


def scales_by_hand(amax, dtype, length):
    """The scales of the delayed rule in plain Python: each from the magnitudes before its step."""
    queue, scale, scales = collections.deque([0.0] * length, maxlen=length), 1.0, []
    for magnitude in amax:
        scales.append(scale)
        if math.isfinite(magnitude):
            queue.append(float(np.float32(magnitude)))
            scale = power_above(max(queue), dtype) if max(queue) else scale
    return scales


def some_magnitudes(number):
    """Magnitudes of tensors with one to seven lines; some are 0, not finite or at the edge."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        found = np.float32(2.0 ** rng.uniform(-30, 30, rng.integers(1, 8)))
        odd = rng.random(len(found)) < 0.3
        found[odd] = rng.choice([0.0, np.nan, 448.0, 464.0, 480.0], odd.sum())
        yield str(rng.choice([*FORMATS])), found.tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("length", [2, pytest.param(1024, marks=pytest.mark.thorough)])
def test_tensors_of_any_length_are_played_as_in_plain_python(length):
    """Together as alone: the delayed scale is that of a queue, the current one that of the step."""
    tensors = [*some_magnitudes(100)]
    record = [tensor(amax, dtype) for dtype, amax in tensors]
    found = compare(record, [f"delayed:history_length={length}", "current"])
    for (dtype, amax), one, outcomes in zip(tensors, record, found, strict=True):
        recorded, delayed, current = outcomes
        assert recorded.scale.tolist() == [1.0] * len(amax)
        assert delayed.scale.tolist() == scales_by_hand(amax, dtype, length)
        assert current.scale.tolist() == [
            power_above(each, dtype) if math.isfinite(each) and each > 0 else 1.0 for each in amax
        ]
        for outcome in outcomes:
            check_outcome(outcome, one)
        assert not current.saturated.any()


def check_outcome(outcome, one):
    """Asserts what a rule's figures are, in plain Python and with ml_dtypes."""
    ratio = one.amax / outcome.scale
    with np.errstate(over="ignore"):
        plain = ratio.astype(NUMPY[one.dtype]).astype(np.float32)
    finite = np.isfinite(one.amax)
    np.testing.assert_array_equal(outcome.saturated, finite & ~np.isfinite(plain))
    for bits, each, saturates in zip(outcome.unused_bits, ratio, outcome.saturated, strict=True):
        if saturates or not each > 0:
            assert math.isnan(bits)
        else:
            expected = max(math.log2(FORMATS[one.dtype].largest) - math.log2(float(each)), 0.0)
            assert bits == pytest.approx(expected, abs=1e-12)
    assert outcome.moves == sum(
        a != b for a, b in zip(outcome.scale, outcome.scale[1:], strict=False)
    )


@pytest.mark.parametrize(
    "rule",
    [
        preset("keras3"),
        DelayedScaling("float8_e5m2", 1024, margin=1),
        DelayedScaling(history_length=2, algorithm="most_recent", includes_newest=False),
        CurrentScaling(power_of_two=False),
    ],
)
def test_a_rule_moves_as_in_a_loop_of_its_own(rule):
    """With its whole history, although the simulation leaves out what no step can reach."""
    rng = np.random.default_rng(0)
    amax = np.float32(2.0 ** rng.uniform(-20, 20, (12, 2)))
    amax[4, 0], amax[5, 1], amax[7] = np.nan, np.inf, 0.0

    @tf.function
    def loop(steps):
        state, scales = rule.initial_state((2,)), tf.TensorArray(tf.float32, 12)
        for at in tf.range(12):
            scales = scales.write(at, rule.choose_scale(state, steps[at]))
            state = rule.advance(state, steps[at])
        return scales.stack()

    np.testing.assert_array_equal(simulate_float8_rule(rule, amax), loop(tf.constant(amax)))


def test_a_step_saturates_where_rounding_does_not_help():
    """464 is rounded to 448 and 480 is not; a rounded scale that is an ulp too small saturates
    nothing.
    """
    outcome = outcome_of("a", np.ones(4, np.float32), tensor([448.0, 464.0, 480.0, np.nan]))
    assert outcome.saturated.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(outcome.unused_bits, [0.0, 0.0, np.nan, np.nan])
    [[_, keras]] = compare([tensor(np.full(50, 0.3))], ["keras3"])
    assert not keras.saturated.any()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("delayed", DelayedScaling("float8_e5m2")),
        (
            " delayed:history_length=2^4:margin=-1:algorithm=most_recent",
            DelayedScaling("float8_e5m2", 16, "most_recent", -1),
        ),
        ("keras3", preset("keras3", "float8_e5m2")),
        ("current:power_of_two=False", CurrentScaling("float8_e5m2", power_of_two=False)),
    ],
)
def test_a_text_gives_a_rule(text, rule):
    """A name, then fields behind colons; the format is the tensor's."""
    assert parse_float8_rule(text, "float8_e5m2") == rule


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("delay", "^`float8_rules`"),
        ("delayed:16", "16"),
        ("delayed:history_length=16;margin=1", "^`history_length`"),
        ("current:history_length=16", "history_length"),
        ("delayed:margin=much", "^`margin`"),
    ],
)
def test_other_texts_are_refused(text, word):
    """Before any rule is simulated."""
    with pytest.raises((TypeError, ValueError), match=word):
        compare([tensor([1.0])], ["delayed", text])


@pytest.fixture
def path(tmp_path):
    """The path of a run's `metrics.jsonl`."""
    return tmp_path / "metrics.jsonl"


def test_the_later_line_of_a_step_counts(path):
    """A run that is resumed from step 10 writes step 20 again; another tensor keeps its lines. A
    magnitude that was not finite is NaN.
    """
    write(
        path,
        line(10, a=(1.0, 1.0), b=(None, 2.0, "float8_e5m2")),
        line(20, a=(2.0, 1.0)),
        line(30, a=(3.0, 1.0)),
        line(20, a=(4.0, 0.5)),
    )
    [a, b] = read_tensors(path)
    assert (a.step.tolist(), a.amax.tolist(), a.scale.tolist()) == (
        [10, 20],
        [1.0, 4.0],
        [1.0, 0.5],
    )
    assert (b.step.tolist(), b.dtype, b.scale.tolist()) == ([10], "float8_e5m2", [2.0])
    np.testing.assert_array_equal(b.amax, [np.nan])


TABLE = """\
2 float8 tensors, steps 10 to 30
               saturated  unused bits  scale moves
all tensors
  as recorded          2         1.50            0
  delayed              1         1.20            2
  current              0         0.00            1
dense/inputs, float8_e4m3fn
  as recorded          2         6.00            0
  delayed              1         3.00            2
  current              0         0.00            1
dense/gradients, float8_e5m2
  as recorded          0         0.00            0
  delayed              0         0.00            0
  current              0         0.00            0
"""


def test_the_program(path, capsys):
    """It prints all tensors together, then each; errors end it with a line."""
    gradients = {"dense/gradients": (57344.0, 1.0, "float8_e5m2")}
    magnitudes = enumerate((7.0, 896.0, 896.0), 1)
    write(path, *(line(10 * at, **{"dense/inputs": (x, 1.0)}, **gradients) for at, x in magnitudes))
    with flagsaver.flagsaver():
        simulate.flags.FLAGS.mark_as_parsed()
        simulate.main(["simulate", str(path)])
        printed = capsys.readouterr().out
        path.write_text("{}\n")
        with pytest.raises(SystemExit, match="mixed_float8"):
            simulate.main(["simulate", str(path)])
        with pytest.raises(app.UsageError):
            simulate.main(["simulate"])

    assert printed.startswith(TABLE)
    assert "up to 10 steps apart" in printed
    nothing = tensor([np.nan])
    assert "\n  as recorded          0            -" in table([nothing], compare([nothing], []))
