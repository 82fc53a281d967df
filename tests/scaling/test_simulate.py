"""The program that simulates rules on a recorded run: its table, its plot and its errors."""

import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver
from recorded import step_reports, write_record

from scaling import Cause, simulate
from scaling.telemetry.simulate_rules import compare


@pytest.fixture
def path(tmp_path):
    """The path of a run's `metrics.jsonl`."""
    return tmp_path / "metrics.jsonl"


def example_record(path):
    """A record of four steps, the first of them skipped."""
    steps = [(2.0**16, Cause.BACKWARD, np.inf)] + [(2.0**15, Cause.NONE, 1.0)] * 3
    return write_record(path, step_reports(steps, [[1.0], *[[1.0, 2.0**-39]] * 3]))


TABLE = """\
4 steps in mixed_float16; best fixed scale: 2^15
rule         skipped  below 2^15   lost to underflow  last scale
as recorded        1            0                  -        2^15
2^4                0            4            50.000%         2^4
pytorch            1            0             0.000%        2^15
Lost to underflow: not counting what float16 flushed before it was recorded."""


def test_the_table(path):
    """The table has a row for the recorded run and one for each rule."""
    record = example_record(path)

    assert simulate.table(record, compare(record, ["2^4", "pytorch"])) == TABLE
    halved = write_record(
        path, step_reports([(8.0, Cause.NONE, 0.1)]), precision="float32", shares=2
    )
    assert "Magnitudes were measured on sums over 2 parts" in simulate.table(
        halved, compare(halved, [])
    )
    wide = write_record(path, step_reports([(8.0, Cause.NONE, 0.1)]), precision="float32", shares=8)
    assert simulate.table(wide, compare(wide, [])) == (
        "1 steps in float32; best fixed scale: 2^19\n"
        "rule         skipped  below 2^19   lost to underflow  last scale\n"
        "as recorded        0            1             0.000%         2^3\n"
        "Magnitudes were measured on sums over 8 parts of a batch, but float16 holds one part at a time, so "
        "fewer steps may overflow in reality."
    )


def test_the_picture(path, tmp_path):
    """The plot has a step line with crosses for each rule, and a line for the best fixed scale."""
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
    assert set(lines["best fixed scale"].get_ydata()) == {15}
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.fixture
def parsed():
    """The program's flags, parsed; their values are restored after the test."""
    with flagsaver.flagsaver():
        simulate.flags.FLAGS.mark_as_parsed()
        yield simulate.flags.FLAGS


def test_the_program(path, parsed, capsys):
    """The program prints the table and plots beside the metrics; an empty `--plot` turns plotting off."""
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


def test_errors_of_the_program(path, parsed, capsys, monkeypatch):
    """Missing files, rules, packages and arguments end the program with a message."""
    with pytest.raises(SystemExit, match="No such file"):
        simulate.main(["simulate", str(path)])
    example_record(path)
    parsed.rules = ["nonsense"]
    with pytest.raises(SystemExit, match="`loss_scale` must be a number or one of"):
        simulate.main(["simulate", str(path)])
    parsed.rules = []
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="matplotlib"):
        simulate.main(["simulate", str(path)])
    assert "as recorded" in capsys.readouterr().out
    with pytest.raises(app.UsageError):
        simulate.main(["simulate"])
