"""Records of gradients, and rules played over them, beside plain Python."""

import json
import types

import generators
import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
import tensorflow as tf
from absl import app
from absl.testing import flagsaver
from hypothesis import example, given, settings

import scaling
from scaling import Cause, simulate
from scaling.base.number_formats import HALF_MAX
from scaling.telemetry.play import best_fixed_scale, compare, gather_evidence, play, summarize
from scaling.telemetry.record import read_record, record_line
from scaling.telemetry.stats import COUNTS

OVERFLOWED = (Cause.BACKWARD, Cause.REDUCTION)


def report(steps, gradients=(), first=1):
    """Step reports as a run's log has them.

    Args:
        steps: for each (loss scale, cause, largest magnitude).
        gradients: for each step its elements; by default the largest magnitude alone.
        first: the first step's number.
    """
    scales, causes, magnitudes = zip(*steps, strict=True)
    elements = gradients or [[magnitude] for magnitude in magnitudes]
    one = scaling.FixedLossScale(1.0).initial_state()
    counts = [
        scaling.gradient_stats([tf.constant(row, tf.float32)], one).counts[0] for row in elements
    ]
    return types.SimpleNamespace(
        step=np.arange(first, first + len(steps)),
        loss_scale=np.array(scales, np.float32),
        cause=np.array(causes, np.int32),
        max_magnitude=np.array(magnitudes, np.float32),
        magnitude_counts=np.array(counts, np.float32),
    )


def written(path, *reports, precision="mixed_float16", shares=1):
    """A file with a line for each report, and another line in between, read again."""
    lines = [json.dumps({"step": 1, "split": "train", "loss": 1.0})]
    lines += [json.dumps(record_line(each, precision, shares)) for each in reports]
    path.write_text("\n".join(lines) + "\n")
    return read_record(path)


@pytest.fixture
def path(tmp_path):
    """Where a run's metrics would be."""
    return tmp_path / "metrics.jsonl"


THREE = [(8.0, Cause.NONE, 0.1), (8.0, Cause.FORWARD, np.inf), (8.0, Cause.NONE, 3.0)]


def test_a_record_comes_back_as_it_was(path):
    """Every number survives the file to the last bit; what a skipped step measured does not."""
    record = written(
        path, report(THREE), report(THREE[:1], [[0.0, 2.0**-9, 3 * 2.0**-11]], first=4)
    )

    assert json.loads(path.read_text().splitlines()[1])["cause"] == ["none", "forward", "none"]
    assert record.step.tolist() == [1, 2, 3, 4]
    assert record.loss_scale.tolist() == [8.0] * 4
    assert record.cause.tolist() == [Cause.NONE, Cause.FORWARD, Cause.NONE, Cause.NONE]
    assert record.skipped.tolist() == [False, True, False, False]
    np.testing.assert_array_equal(record.max_magnitude, np.float32([0.1, np.nan, 3.0, 0.1]))
    assert record.interval.tolist() == [0, 0, 0, 1]
    assert record.counts.shape == (2, COUNTS)
    assert record.counts.sum(axis=1).tolist() == [2.0, 3.0]
    assert (
        record.counts[1].tolist()
        == report(THREE[:1], [[0.0, 2.0**-9, 2.0**-9]]).magnitude_counts[0].tolist()
    )
    assert {
        array.dtype.name for array in (record.loss_scale, record.max_magnitude, record.counts)
    } == {"float32"}
    assert (record.step.dtype, record.cause.dtype) == (np.int64, np.int32)
    assert (record.precision, record.shares) == ("mixed_float16", 1)


def test_a_step_written_twice_counts_as_the_later_line_tells_it(path):
    """A run that was stopped and taken up again has written some steps twice."""
    again = [(2.0, Cause.NONE, 7.0)]
    record = written(path, report(THREE), report(again * 2, first=2), precision="float32")

    assert record.step.tolist() == [1, 2, 3]
    assert record.loss_scale.tolist() == [8.0, 2.0, 2.0]
    assert record.interval.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"step": 3', "JSONDecodeError"),
        ("3", "TypeError"),
        ('{"step": 3}', "KeyError('split')"),
        ('{"step": 1, "split": "gradients", "loss_scale": [1.0]}', "KeyError('cause')"),
        (
            '{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": ["bad"]}',
            "KeyError('BAD')",
        ),
        ('{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": []}', "KeyError"),
        (
            '{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": ["none"], "max_magnitude": []}',
            "IndexError",
        ),
    ],
)
def test_a_damaged_line_is_refused_by_its_number(path, line, why):
    """The file, the line and what is wrong with it are named."""
    path.write_text('{"step": 1, "split": "train"}\n' + line + "\n")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        read_record(path)

    assert str(error.value).startswith(f"Line 2 of {path} is damaged ({why}")
    assert str(error.value).endswith(
        f"): {line[:60]!r}. A run that is killed can leave a line unfinished. Delete the line."
    )


def test_a_file_without_gradients_is_refused(path):
    """The error says how to get them."""
    path.write_text('{"step": 1, "split": "train"}\n')
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        read_record(path)

    assert str(error.value) == (
        f"{path} has no recorded gradients. Recording takes another pass over the gradients at every "
        "step, so it is off by default. Train with record_gradients=True, or --record_gradients."
    )


def test_what_a_record_tells_of_other_scales(path):
    """A skipped step has the next applied one's magnitude, or the last one's; float16 fits where it
    did, no more; a wider format has nothing to cure.
    """
    steps = [
        (16.0, Cause.BACKWARD, np.inf),
        (8.0, Cause.FORWARD, np.nan),
        (4.0, Cause.NONE, 3.0),
        (4.0, Cause.REDUCTION, np.nan),
    ]
    known = gather_evidence(written(path, report(steps)))

    assert known.magnitude.tolist() == [3.0, 3.0, 3.0, 3.0]
    assert known.fits_at.tolist() == [0.0, 0.0, 4.0, 0.0]
    assert known.overflows_at.tolist() == [16.0, np.inf, np.inf, 4.0]
    assert known.incurable.tolist() == [Cause.NONE, Cause.FORWARD, Cause.NONE, Cause.NONE]
    wide = gather_evidence(written(path, report(steps), precision="float32"))
    assert wide.fits_at.tolist() == [0.0] * 4
    assert wide.overflows_at.tolist() == [np.inf] * 4
    assert wide.incurable.tolist() == [Cause.MODEL, Cause.FORWARD, Cause.NONE, Cause.MODEL]
    assert gather_evidence(written(path, report(steps[:2]))).magnitude.tolist() == [0.0, 0.0]


def steps_of_a_run():
    """Steps of any kind, at scales and magnitudes that overflow now and then."""
    finite = st.tuples(
        generators.powers_of_two(-4, 20),
        st.just(Cause.NONE),
        st.floats(2.0**-20, 2.0**20, width=32),
    )
    skipped = st.tuples(
        generators.powers_of_two(-4, 20),
        st.sampled_from([Cause.BACKWARD, Cause.REDUCTION, Cause.FORWARD]),
        st.just(np.inf),
    )
    return st.lists(st.one_of(finite, finite, skipped), min_size=1, max_size=25)


def would_overflow(steps, index, scale, precision):
    """Whether a step would have overflowed at a scale, in plain Python."""
    own, cause, magnitude = steps[index]
    if cause in OVERFLOWED and scale >= own:
        return True
    if cause == Cause.NONE and precision == "mixed_float16" and scale <= own:
        return False
    if cause != Cause.NONE:
        later = [each[2] for each in steps[index:] if each[1] == Cause.NONE]
        earlier = [each[2] for each in steps[:index] if each[1] == Cause.NONE]
        magnitude = (later[:1] or earlier[-1:] or [0.0])[0]
    return magnitude * scale > HALF_MAX


def curable(cause, precision):
    """Whether another scale might have changed a step."""
    return cause == Cause.NONE or (cause in OVERFLOWED and precision == "mixed_float16")


EIGHT = scaling.DynamicLossScale(8.0)


# At its own scale a step does what it did, whatever its magnitude says.
@example(EIGHT, [(8.0, Cause.BACKWARD, np.inf), (8.0, Cause.NONE, 1.0)], "mixed_float16")
@example(EIGHT, [(8.0, Cause.NONE, HALF_MAX)], "mixed_float16")
# The largest float16 is one.
@example(EIGHT, [(4.0, Cause.NONE, HALF_MAX / 8)], "mixed_float16")
@settings(max_examples=30)  # each compiles a loop
@given(generators.rules(), steps_of_a_run(), st.sampled_from(["mixed_float16", "float32"]))
def test_a_rule_played_agrees_with_plain_python(tmp_path_factory, rule, steps, precision):
    """L4: scale by scale and skip by skip, what a rule would have done is what its oracle does."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    scales, skipped = play(rule, written(path, report(steps), precision=precision))
    state = oracle.start(rule)
    for index, (_, cause, _) in enumerate(steps):
        incurable = not curable(cause, precision)
        overflow = not incurable and would_overflow(steps, index, state[0], precision)

        assert state[0] == scales[index], index
        assert skipped[index] == (overflow or incurable), index
        if not incurable:
            state = oracle.advance(*state, not overflow, rule)


def test_magnitudes_reach_the_rule(path):
    """A rule that looks at magnitudes is told those of the record."""
    steps = [(2.0**10, Cause.NONE, 1.0), (2.0**10, Cause.NONE, 1.0)]
    scales, _ = play(scaling.HeadroomLossScale(headroom_bits=3), written(path, report(steps)))

    assert scales.tolist() == [2.0**15, 2.0**12]


@given(steps_of_a_run(), st.sampled_from(["mixed_float16", "float32"]))
def test_the_best_fixed_scale_is_the_largest_that_never_overflows(
    tmp_path_factory, steps, precision
):
    """By trying all powers of two."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    record = written(path, report(steps), precision=precision)
    hopeful = [index for index, step in enumerate(steps) if curable(step[1], precision)]

    def never_overflows(scale):
        return not any(would_overflow(steps, index, scale, precision) for index in hopeful)

    best = max(filter(never_overflows, 2.0 ** np.arange(-126, 127)), default=2.0**-126)

    assert best == best_fixed_scale(record)


def test_an_account_adds_up(path):
    """Skips, steps below the best scale, and what float16 flushes in the steps that were applied."""
    first = [[1.0, 2.0**-30, 0.0, 2.0**-20]] * 2
    second = [[0.5, 2.0**-28]]
    record = written(
        path,
        report([(2.0**4, Cause.NONE, 1.0)] * 2, first),
        report([(2.0**4, Cause.NONE, 0.5)], second, first=3),
        precision="float32",
    )
    scales = np.float32([2.0**16, 2.0**2, 2.0**4])
    outcome = summarize("mine", scales, np.array([True, False, False]), record)

    assert (outcome.name, outcome.below_best) == ("mine", 2)
    assert outcome.lost == pytest.approx(
        (1 / 4 + 0) / 2 if 2.0**-28 * 16 > 2.0**-25 else (1 / 4 + 1 / 2) / 2
    )
    assert np.isnan(summarize("none", scales, np.array([True] * 3), record).lost)


def example_record(path):
    """Four steps, one of them skipped."""
    steps = [(2.0**16, Cause.BACKWARD, np.inf)] + [(2.0**15, Cause.NONE, 1.0)] * 3
    return written(path, report(steps, [[1.0], *[[1.0, 2.0**-39]] * 3]))


TABLE = """\
4 steps in mixed_float16; best fixed scale: 2^15
rule         skipped  below 2^15   lost to underflow  last scale
as recorded        1            0                  -        2^15
2^4                0            4            50.000%         2^4
pytorch            1            0             0.000%        2^15
Lost to underflow: in addition to what the run's own float16 had already flushed."""


def test_the_table(path):
    """A row for the run as it was, and one for each rule."""
    record = example_record(path)

    assert simulate.table(record, compare(record, ["2^4", "pytorch"])) == TABLE
    halved = written(path, report(THREE[:1]), precision="float32", shares=2)
    assert "Magnitudes are of sums over 2 parts" in simulate.table(halved, compare(halved, []))
    wide = written(path, report(THREE[:1]), precision="float32", shares=8)
    assert simulate.table(wide, compare(wide, [])) == (
        "1 steps in float32; best fixed scale: 2^19\n"
        "rule         skipped  below 2^19   lost to underflow  last scale\n"
        "as recorded        0            1             0.000%         2^3\n"
        "Magnitudes are of sums over 8 parts of a batch, but float16 holds one part at a time, so "
        "fewer steps may overflow in reality."
    )


def test_the_picture(path, tmp_path):
    """A step line and crosses for each rule, and the best fixed scale, under their names."""
    record = example_record(path)
    figure = simulate.draw(record, compare(record, ["2^4"]), tmp_path / "a.svg")
    [axes] = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x"]

    assert list(lines["as recorded"].get_ydata()) == [16, 15, 15, 15]
    assert list(lines["2^4"].get_ydata()) == [4] * 4
    assert list(lines["2^4"].get_xdata()) == [1, 2, 3, 4]
    assert [list(line.get_xdata()) for line in crosses] == [[1], []]
    assert [list(line.get_ydata()) for line in crosses] == [[16], []]
    assert crosses[0].get_color() == lines["as recorded"].get_color()
    assert set(lines["best fixed scale"].get_ydata()) == {15}
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["as recorded", "2^4", "best fixed scale"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss scale")
    assert axes.get_title() == "Loss scale by rule; a cross is a skipped step"
    assert axes.yaxis.get_major_formatter()(15, 0) == "$2^{15}$"
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.fixture
def parsed():
    """The program's flags, parsed, and as they were afterwards."""
    with flagsaver.flagsaver():
        simulate.flags.FLAGS.mark_as_parsed()
        yield simulate.flags.FLAGS


def test_the_program(path, parsed, capsys):
    """Prints the table and draws beside the metrics, or where it is told to, or not at all."""
    example_record(path)
    parsed.rules = ["2^4", "pytorch"]
    simulate.main(["simulate", str(path)])
    picture = path.with_name("scales.png")

    assert capsys.readouterr().out == f"{TABLE}\nPlot written to {picture}\n"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    picture.unlink()
    parsed.plot = ""
    simulate.main(["simulate", str(path)])
    assert capsys.readouterr().out == f"{TABLE}\n"
    assert not picture.exists()


def test_the_program_says_what_is_wrong(path, parsed, capsys, monkeypatch):
    """Errors are one sentence on stderr: no file, no rule, no matplotlib, no argument."""
    with pytest.raises(SystemExit, match="No such file"):
        simulate.main(["simulate", str(path)])
    example_record(path)
    parsed.rules = ["nonsense"]
    with pytest.raises(SystemExit, match="`loss_scale` must be a number or one of"):
        simulate.main(["simulate", str(path)])
    parsed.rules = []
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as error:
        simulate.main(["simulate", str(path)])
    assert str(error.value) == (
        "Plotting the scales needs matplotlib, which is not installed. Run pip install "
        "'halfstep[plot]', or pass --plot= for no plot."
    )
    assert "as recorded" in capsys.readouterr().out
    with pytest.raises(app.UsageError) as usage:
        simulate.main(["simulate"])
    assert str(usage.value) == "Pass one file: python -m scaling.simulate RUN/metrics.jsonl"
