"""What all pictures of a report share."""

import io

import numpy as np
import written_run
from matplotlib.image import imread
from report_figures import figure_of
from written_run import TRAIN, write_lines

from trainer.report import canvas
from trainer.report.reading import Underflow, read_run


def test_a_dotted_line_marks_each_time_the_run_was_resumed(tmp_path):
    """The first start has no line. Only the lowest panel has numbers on its step axis."""
    starts = [
        {"split": "run", "step": step, "time": "2026", "settings": {}, "model": []}
        for step in (0, 4, 8)
    ]
    run = read_run(write_lines(tmp_path, TRAIN, *starts))
    _, rows = canvas.make_panels([1.0, 1.0])
    canvas.style_panels(rows, run)

    for [axes] in rows:
        assert [line.get_xdata()[0] for line in axes.get_lines()] == [4, 8]
    assert [axes.get_xlabel() for [axes] in rows] == ["", "step"]
    assert [axes.xaxis.get_tick_params()["labelbottom"] for [axes] in rows] == [False, True]


def test_a_picture_knows_its_size():
    """Width and height are those of the PNG file."""
    figure, _ = canvas.make_panels([1.0])
    picture = canvas.to_picture(figure, "norm", "A norm.")

    assert (picture.file, picture.alt) == ("norm.png", "A norm.")
    assert imread(io.BytesIO(picture.png)).shape[:2] == (picture.height, picture.width)


def test_a_legend_needs_labels():
    """Panels without labeled lines have no legend."""
    _, [[axes]] = canvas.make_panels([1.0])
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


def test_long_names_lose_their_middle():
    """A shortened name has the maximum length, and keeps its start and its end."""
    assert canvas.shorten("a" * 34, 34) == "a" * 34
    shortened = canvas.shorten("a" * 40 + "b" * 40, 34)
    assert (len(shortened), shortened[:3], shortened[-3:]) == (34, "aaa", "bbb")
