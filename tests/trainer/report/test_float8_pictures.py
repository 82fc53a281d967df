"""The pictures of float8 tensors."""

import math
import pathlib

import numpy as np
import pytest
from report_figures import figure_of
from written_run import TRAIN, write_lines

from trainer.report import canvas, write_report
from trainer.report import float8_pictures as pictures
from trainer.report.reading import read_run

FORMS = {"inputs": "float8_e4m3fn", "kernel": "float8_e4m3fn", "outputs_grad": "float8_e5m2"}


def values(kind, **fields):
    """The fields of a tensor."""
    return {
        "format": FORMS[kind],
        "amax": 3.0,
        "scale": 2.0**-7,
        "saturated": 0.0,
        "flushed": 0.0,
        "saturated_steps": 0,
    } | fields


def line(step, layers=1, **fields):
    """A line about the tensors of some layers; the fields are those of the last layer's inputs."""
    found = {
        f"model/dense_{layer}/{kind}": values(kind) for layer in range(layers) for kind in FORMS
    }
    found[f"model/dense_{layers - 1}/inputs"] |= fields
    return {"split": "float8", "step": step, "float8": found}


def test_a_panel_shows_magnitudes_below_the_limit(tmp_path, monkeypatch):
    """The limit is the scale times the largest number of the format; a mark says what saturated."""
    run = read_run(write_lines(tmp_path, line(10), line(20, amax=9.0, saturated_steps=2)))
    figure = figure_of(monkeypatch, pictures, lambda: pictures.draw_ranges(run))
    inputs, kernel, gradient = figure.axes
    limit, amax, marks = inputs.get_lines()

    assert list(limit.get_ydata()) == [math.log2(448 * 2.0**-7)] * 2
    assert list(amax.get_ydata()) == [math.log2(3), math.log2(9)]
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([20], [math.log2(9)])
    assert gradient.get_lines()[0].get_ydata()[0] == math.log2(57344 * 2.0**-7)
    assert not len(kernel.get_lines()[2].get_xdata())
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"model/dense_0/{kind}" for kind in FORMS
    ]


@pytest.mark.parametrize(
    "layers",
    [
        1,
        pytest.param(24, marks=pytest.mark.slow),
        pytest.param(30, marks=pytest.mark.slow),
    ],
)
def test_layers_that_saturated_are_shown(tmp_path, monkeypatch, layers):
    """There is a row for each layer, and no text covers another; of too many, the calmest are left out."""
    run = read_run(write_lines(tmp_path, line(5, layers, saturated_steps=1)))
    figure = figure_of(monkeypatch, pictures, lambda: pictures.draw_ranges(run))
    titles = [axes.get_title("left") for axes in figure.axes[::3]]

    assert len(titles) == min(layers, pictures.MAX_LAYERS)
    assert titles[-1] == f"model/dense_{layers - 1}/inputs"
    assert pictures.layers_left_out(run) == layers - len(titles)
    [legend] = figure.legends
    texts = [axes._left_title for axes in figure.axes]
    boxes = [legend.get_window_extent(), *(text.get_window_extent() for text in texts)]
    for at, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:at])
        assert figure.bbox.contains(*box.min)
        assert figure.bbox.contains(*box.max)


def test_heat_maps_show_what_was_lost(tmp_path, monkeypatch):
    """Only tensors that lost something have a row."""
    lines = [line(10, 2, flushed=0.25), line(20, 2, flushed=None)]
    run = read_run(write_lines(tmp_path, *lines))
    figure = figure_of(monkeypatch, canvas, lambda: pictures.draw_lost(run, "flushed", "became 0"))
    [mesh] = figure.axes[0].collections
    assert mesh.get_array().reshape(2).tolist() == [0.25, None]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "model/dense_1/inputs"
    ]
    assert pictures.draw_lost(run, "saturated", "were too large") is None


def test_without_float8_there_are_no_pictures(tmp_path):
    """A run without float8 tensors has none, and a line without tensors neither."""
    empty = {"split": "float8", "step": 1, "float8": {}}
    for lines in ([TRAIN], [TRAIN, empty]):
        assert pictures.draw_ranges(read_run(write_lines(tmp_path, *lines))) is None
        assert "Float8" not in pathlib.Path(write_report(tmp_path)).read_text()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"saturated": None, "flushed": None},
            "was not counted. <code>Monitoring(record_gradients=True)</code>",
        ),
        ({}, "No recorded numbers were not 0 and became 0"),
        ({"flushed": 0.5}, "float8_flushed"),
    ],
)
def test_the_section_says_what_was_counted(tmp_path, fields, text):
    """Shares that were not counted are not taken for zeros."""
    tensors = {"model/dense/inputs": values("inputs", **fields)}
    write_lines(tmp_path, TRAIN, {"split": "float8", "step": 10, "float8": tensors})
    page = pathlib.Path(write_report(tmp_path)).read_text()
    assert '<h2 id="float8">Float8</h2>' in page
    if text == "float8_flushed":
        assert (tmp_path / "report" / "float8_flushed.png").exists()
    else:
        assert text in page


def test_magnitudes_may_be_missing(tmp_path, monkeypatch):
    """A tensor of zeros has no logarithm, and an inf was written as null: both leave gaps."""
    run = read_run(write_lines(tmp_path, line(5, amax=0.0), line(6, amax=None), line(7, amax=2.0)))
    figure = figure_of(monkeypatch, pictures, lambda: pictures.draw_ranges(run))
    drawn = figure.axes[0].get_lines()[1].get_ydata()
    np.testing.assert_array_equal(drawn, [math.nan, math.nan, 1.0])
