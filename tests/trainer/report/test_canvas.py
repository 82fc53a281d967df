"""What all pictures of a report share."""

import io

import pytest
from matplotlib.image import imread
from written_run import TRAIN, write_lines

from trainer.report import canvas
from trainer.report.reading import read_run


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


def test_a_title_is_not_parsed_as_a_formula():
    """A metric's name with a dollar sign or a backslash is shown as it is."""
    figure, [axes] = canvas.make_panels([1.0], top=0.3)
    canvas.add_title(axes, "$\\frac$")

    assert canvas.to_picture(figure, "a", "b").png
    assert axes.get_title("left") == "$\\frac$"


def test_a_legend_needs_labels():
    """Panels without labeled lines have no legend."""
    _, [axes] = canvas.make_panels([1.0], top=0.3)
    axes.plot([1, 2], [3, 4])
    canvas.add_legend(axes)
    assert axes.get_legend() is None
    axes.plot([1, 2], [3, 4], label="loss")
    canvas.add_legend(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["loss"]
