"""What all pictures of a report share."""

import io
import math

import numpy as np
import pytest
import written_run
from matplotlib.image import imread
from report_figures import figure_of
from written_run import TRAIN, write_lines

from trainer.report import canvas
from trainer.report.reading import Underflow, read_run


def test_panels_are_stacked_and_share_the_step_axis():
    """Panels have the given heights and the same margins, and the figure holds all of them."""
    figure, panels = canvas.make_panels([2.0, 1.0], top=0.5)
    boxes = [axes.get_window_extent() for axes in panels]

    assert figure.get_size_inches().tolist() == pytest.approx([canvas.WIDTH, 4.0 + canvas.BOTTOM])
    assert [box.height / canvas.DPI for box in boxes] == pytest.approx([2.0, 1.0])
    assert {(round(box.x0), round(box.x1)) for box in boxes} == {(108, 1390)}
    assert (boxes[0].y0 - boxes[1].y1) / canvas.DPI == pytest.approx(0.5)
    panels[0].set_xlim(3, 7)
    assert panels[1].get_xlim() == (3, 7)


def test_a_dotted_line_marks_each_time_the_run_was_resumed(tmp_path):
    """The first start has no line. Only the lowest panel has numbers on its step axis."""
    starts = [
        {"split": "run", "step": step, "time": "2026", "settings": {}, "model": []}
        for step in (0, 4, 8)
    ]
    run = read_run(write_lines(tmp_path, TRAIN, *starts))
    _, panels = canvas.make_panels([1.0, 1.0], top=0.1)
    canvas.style_panels(panels, run)

    for axes in panels:
        assert [line.get_xdata()[0] for line in axes.get_lines()] == [4, 8]
    assert [axes.get_xlabel() for axes in panels] == ["", "step"]
    assert [axes.xaxis.get_tick_params()["labelbottom"] for axes in panels] == [False, True]


def test_a_picture_knows_its_size():
    """Width and height are those of the PNG file."""
    figure, _ = canvas.make_panels([1.0], top=0.1)
    picture = canvas.to_picture(figure, "norm", "A norm.")

    assert (picture.file, picture.alt) == ("norm.png", "A norm.")
    assert imread(io.BytesIO(picture.png)).shape[:2] == (picture.height, picture.width)


def test_a_legend_needs_labels():
    """Panels without labeled lines have no legend."""
    _, [axes] = canvas.make_panels([1.0], top=0.3)
    axes.plot([1, 2], [3, 4])
    canvas.add_legend(axes)
    assert axes.get_legend() is None
    axes.plot([1, 2], [3, 4], label="loss")
    canvas.add_legend(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["loss"]


def test_the_heat_map_has_a_row_for_each_variable(tmp_path, monkeypatch):
    """A cell shows the share of a variable up to a log line. Cells without a share are masked."""
    run = read_run(written_run.write(tmp_path / "rich"))
    figure = figure_of(
        monkeypatch, canvas, lambda: canvas.draw_shares(run.underflow, 600, "a", "b")
    )
    [mesh] = figure.axes[0].collections
    shares = mesh.get_array().reshape(7, 30)
    expected = [list(line.share.values())[:6] for line in run.underflow]

    assert np.array_equal(shares[:6].T, expected)
    assert shares.mask[6].all()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["conv2d/kernel", "batch_normalization/gamma"]
    assert max(map(len, labels)) == canvas.MAX_NAME


def test_the_heat_map_shows_the_variables_that_lost_most(monkeypatch):
    """If there are too many variables, those that lost most are shown, in the order of the model."""
    shares = {f"layer_{row}/kernel": 0.5 if row % 2 else 0.1 for row in range(2 * canvas.MAX_ROWS)}
    lines = [Underflow(10, shares)]
    figure = figure_of(monkeypatch, canvas, lambda: canvas.draw_shares(lines, 10, "a", "b"))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]

    assert labels == [f"layer_{row}/kernel" for row in range(1, 2 * canvas.MAX_ROWS, 2)]


def test_without_shares_there_is_no_heat_map():
    """There is none without log lines, and none if the lines have no variables."""
    assert canvas.draw_shares([], 10, "a", "b") is None
    assert canvas.draw_shares([Underflow(10, {})], 10, "a", "b") is None


def test_the_matrix_of_shares():
    """Its rows are the variables in the order in which they appear. Missing shares are NaN."""
    lines = [Underflow(1, {"b": 0.5}), Underflow(2, {"a": 0.25, "b": None})]
    names, shares = canvas.share_matrix(lines)

    assert names == ["b", "a"]
    assert np.array_equal(shares, [[0.5, math.nan], [math.nan, 0.25]], equal_nan=True)


def test_long_names_lose_their_middle():
    """A shortened name has the maximum length, and keeps its start and its end."""
    assert canvas.shorten("a" * 34, 34) == "a" * 34
    shortened = canvas.shorten("a" * 40 + "b" * 40, 34)
    assert (len(shortened), shortened[:3], shortened[-3:]) == (34, "aaa", "bbb")


def test_the_mean_of_a_variable_is_over_what_was_measured():
    """A variable that was never measured has 0, and the order is the model's."""
    lines = [Underflow(1, {"b": 0.5, "c": None}), Underflow(2, {"a": 0.25, "b": None})]

    assert list(canvas.mean_shares(lines).items()) == [("b", 0.5), ("c", 0.0), ("a", 0.25)]
