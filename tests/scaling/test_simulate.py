"""The program that simulates rules on a recorded run: its table, its plot and its errors."""

import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver
from recorded import float8_line, step_reports, write_float8, write_record

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


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_a_link_in_place_of_the_plot_is_replaced(path, parsed, kind):
    """What it leads to stays as it is. A folder in its place is an error that names it."""
    example_record(path)
    parsed.rules = ["2^4"]
    other, picture = path.with_name("other.txt"), path.with_name("scales.png")
    other.write_text("precious")
    getattr(picture, kind)(other)
    simulate.main(["simulate", str(path)])

    assert other.read_text() == "precious"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    picture.unlink()
    picture.mkdir()
    with pytest.raises(SystemExit) as error:
        simulate.main(["simulate", str(path)])
    assert str(error.value).startswith(f"{picture} cannot be read or written: Is a directory. ")
    assert not picture.with_name("scales.png.tmp").exists()


def test_a_folder_with_an_odd_name_does_not_act_on_the_terminal(tmp_path, parsed, capsys):
    """Its name is printed with escapes, in errors, too."""
    path = tmp_path / "a\x1b[2J\udcff" / "metrics.jsonl"
    path.parent.mkdir()
    parsed.rules = []
    for text in ("", '{"split"'):
        path.write_text(text)
        with pytest.raises(SystemExit) as error:
            simulate.main(["simulate", str(path)])
        assert r"a\x1b[2J\udcff" in str(error.value)
    example_record(path)
    simulate.main(["simulate", str(path)])
    assert r"a\x1b[2J\udcff" in capsys.readouterr().out


def test_the_program_simulates_float8_rules(path, parsed, capsys):
    """With `--float8_rules` it prints their table instead, and has a plot of its own."""
    write_float8(path, *(float8_line(step, a=(900.0, 1.0)) for step in (1, 2, 3)))
    parsed.float8_rules = ["delayed:history_length=2:margin=1", "keras3"]
    simulate.main(["simulate", str(path)])
    picture, printed = path.with_name("float8_scales.png"), capsys.readouterr().out

    assert printed.splitlines()[:6] == [
        "1 float8 tensors, steps 1 to 3",
        "                                     saturated  unused bits  scale moves",
        "all tensors",
        "  as recorded                                3            -            0",
        "  delayed:history_length=2:margin=1          1         1.99            1",
        "  keras3                                     2         0.00            1",
    ]
    assert printed.endswith(f"unused bits.\nPlot written to {picture}\n")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert not path.with_name("scales.png").exists()
    parsed.float8_rules = ["block"]
    with pytest.raises(SystemExit, match="must be rules for whole tensors"):
        simulate.main(["simulate", str(path)])
    parsed.float8_rules = ["current:power_of_two=1"]
    with pytest.raises(SystemExit, match="`power_of_two` must be True or False; got 1"):
        simulate.main(["simulate", str(path)])
    path.write_text("{}\n")
    with pytest.raises(SystemExit, match="says nothing about float8 tensors"):
        simulate.main(["simulate", str(path)])
