"""The table and the picture of simulated float8 rules, and names that are no names."""

import numpy as np
import pytest
from recorded import float8_line, write_float8

from scaling.telemetry.float8_table import draw_float8, float8_table, short
from scaling.telemetry.simulate_float8 import compare_float8

HOSTILE = "\x1b[2J\u202e\n$\\frac{1}{0}$" + "y" * 200
MARKUP = "[red]\u4e2d[/red] <b>&amp;"


@pytest.fixture
def path(tmp_path):
    """The path of a run's `metrics.jsonl`."""
    return tmp_path / "metrics.jsonl"


def example_record(path):
    """Two tensors over three steps: one grows, the other is always at its largest number."""
    magnitudes = (7.0, 896.0, 896.0)
    return write_float8(
        path,
        *(
            float8_line(
                10 * step,
                **{
                    "dense/inputs": (amax, 1.0, "float8_e4m3fn", 0.25, 0.5),
                    "dense/gradients": (57344.0, 1.0, "float8_e5m2", None, None),
                },
            )
            for step, amax in enumerate(magnitudes, 1)
        ),
    )


TABLE = """\
2 float8 tensors, steps 10 to 30
               saturated  unused bits  scale moves
all tensors
  as recorded          2         1.50            0
  delayed              1         1.20            2
  current              0         0.00            1
dense/inputs, float8_e4m3fn: of its numbers, 25.000% saturated and 50.000% became 0
  as recorded          2         6.00            0
  delayed              1         3.00            2
  current              0         0.00            1
dense/gradients, float8_e5m2
  as recorded          0         0.00            0
  delayed              0         0.00            0
  current              0         0.00            0
Saturated counts the steps whose largest magnitude was beyond the format. In the others, the scale left \
so many factors of two above it unused, on average: unused bits.
Lines are up to 10 steps apart. Unless the steps between them were skipped, what happened there is not \
known. The rules take each line for one step: a history of 16 is one of 16 lines."""


def test_the_table(path):
    """It has all tensors together, then each with its shares; notes say what is not known."""
    record = example_record(path)
    assert float8_table(record, compare_float8(record.tensors, ["delayed", "current"])) == TABLE
    record = write_float8(path, *(float8_line(step, a=(None, 1.0)) for step in (5, 6)))
    shown = float8_table(record._replace(left_out=7), compare_float8(record.tensors, []))
    assert "\n  as recorded          0            -            0\n" in shown
    assert shown.endswith("unused bits.\n7 more tensors were left out.")


def test_the_picture(path, tmp_path):
    """A panel for each tensor, the worst first: a line for each rule with crosses where it saturates,
    and the scale that the magnitudes call for.
    """
    record = example_record(path)
    outcomes = compare_float8(record.tensors, ["delayed"])
    figure = draw_float8(record, outcomes, tmp_path / "a.svg")
    assert [axes.get_title() for axes in figure.axes] == [
        "dense/inputs, float8_e4m3fn",
        "dense/gradients, float8_e5m2",
    ]
    [axes, last] = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert list(lines["amax / largest number"].get_ydata()) == [-6, 1, 1]
    assert list(lines["as recorded"].get_ydata()) == [0, 0, 0]
    assert list(lines["delayed"].get_ydata()) == [0, -6, 1]
    assert [list(line.get_xdata()) for line in crosses] == [[20, 30], [20]]
    assert [list(line.get_ydata()) for line in crosses] == [[0, 0], [-6]]
    assert crosses[1].get_color() == lines["delayed"].get_color()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["amax / largest number", "as recorded", "delayed"]
    assert (last.get_xlabel(), axes.get_ylabel()) == ("step", "scale")
    assert axes.yaxis.get_major_formatter()(-6, 0) == "$2^{-6}$"
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_only_the_worst_tensors_are_drawn(path, tmp_path):
    """Those that saturate most, and then those that leave most bits unused."""
    amax = {"a": 448.0, "b": 1.0, "c": 900.0, "d": 2.0, "e": 224.0, "f": 0.0}
    record = write_float8(
        path, float8_line(1, **{name: (each, 1.0) for name, each in amax.items()})
    )
    figure = draw_float8(record, compare_float8(record.tensors, []), tmp_path / "a.png")
    assert [axes.get_title()[0] for axes in figure.axes] == ["c", "b", "d", "e"]


def test_names_are_text(path, tmp_path):
    """Nothing in a name is a formula, a color or a code for the terminal, and long ones are cut."""
    record = write_float8(
        path, float8_line(1, **{HOSTILE: (0.0, 0.0), MARKUP: (None, 1.0), "": (1.0, 1.0)})
    )
    outcomes = compare_float8(record.tensors, ["current"])
    text = float8_table(record, outcomes)
    assert "\n\\x1b[2J\\u202e\\n$\\frac{1}{0}$y...y" in text
    assert f"\n{MARKUP}, float8_e4m3fn" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) < 250
    figure = draw_float8(record, outcomes, tmp_path / "a.png")
    titles = [axes.title for axes in figure.axes]
    assert not any(title.get_parse_math() for title in titles)
    assert {title.get_text()[:20] for title in titles} == {
        r"\x1b[2J\u202e\n$\fra",
        r"[red]\u4e2d[/red] <b",
        ", float8_e4m3fn",
    }
    assert all(title.get_text().isascii() for title in titles)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("length", [0, 59, 60, 61, 500])
def test_a_long_name_keeps_its_ends(length):
    """At most 60 characters; shorter names are as they are."""
    name = "".join(chr(97 + at % 26) for at in range(length))
    found = short(name)
    assert len(found) == min(length, 60 if length <= 60 else len(found)) <= 60
    assert found == name or (found[:25], found[-25:]) == (name[:25], name[-25:])


def test_scales_of_zero_are_not_drawn(path, tmp_path):
    """A logarithm of 0 has no place."""
    record = write_float8(path, *(float8_line(step, a=(1.0, 0.0)) for step in (1, 2)))
    figure = draw_float8(record, compare_float8(record.tensors, []), tmp_path / "a.png")
    [line] = [line for line in figure.axes[0].get_lines() if line.get_label() == "as recorded"]
    assert np.isnan(line.get_ydata()).all()
