"""The line plots of a report."""

import numpy as np
import pytest
import written_run
from matplotlib.figure import Figure
from report_figures import figure_of
from written_run import TRAIN, write_lines

from scaling import Cause
from trainer.report import facts, pictures
from trainer.report.canvas import MAX_LABEL
from trainer.report.reading import Curve, read_run


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """A run that has recorded everything."""
    return read_run(written_run.write(tmp_path_factory.mktemp("runs") / "rich"))


def test_the_loss_scale_is_a_step_function_with_a_mark_for_each_skip(rich, monkeypatch):
    """Marks differ in color and shape by cause, are at the skipped steps, and are counted in the legend."""
    [axes] = figure_of(monkeypatch, pictures, lambda: pictures.draw_scale(rich)).axes
    line = axes.get_lines()[0]
    marks = {mark.get_label(): mark for mark in axes.collections}

    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_xdata()) == [*rich.scale.step, 600]
    assert list(line.get_ydata())[:-1] == list(np.log2(rich.scale.value))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["skipped:", *marks]
    assert list(marks) == [
        "1 weights",
        "1 forward",
        "10 backward",
        "1 reduction",
        "3 unscaling",
        "2 model",
    ]
    for label, mark in marks.items():
        places = [
            (skip.step, np.log2(skip.loss_scale))
            for skip in rich.skips
            if skip.cause == label.split()[1]
        ]
        assert mark.get_offsets().tolist() == [list(place) for place in places]
    assert len({tuple(mark.get_facecolor()[0]) for mark in marks.values()}) == len(marks)
    assert len({mark.get_paths()[0].vertices.tobytes() for mark in marks.values()}) == len(marks)
    assert axes.yaxis.get_major_formatter()(15, 0) == "$2^{15}$"
    assert set(pictures.CAUSES) == {cause.name.lower() for cause in Cause} - {"none"}


@pytest.mark.parametrize("scales", [[2.0**15], [2.0**15, 2.0**16], [2.0**-3, 2.0**30]])
def test_every_tick_of_the_scale_is_a_power_of_two(tmp_path, monkeypatch, scales):
    """No power appears twice, and a constant scale has at least three ticks, too."""
    lines = [{"split": "scale", "step": n, "loss_scale": s} for n, s in enumerate(scales, start=1)]
    run = read_run(write_lines(tmp_path, TRAIN, *lines))
    [axes] = figure_of(monkeypatch, pictures, lambda: pictures.draw_scale(run)).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]

    assert len(labels) == len(set(labels)) >= 3
    assert all(tick == round(tick) for tick in axes.get_yticks())


@pytest.mark.parametrize("draw", ["draw_curves", "draw_scale", "draw_headroom", "draw_norm"])
def test_nothing_overlaps(rich, monkeypatch, draw):
    """Legends and titles are inside the picture, outside the axes, and do not overlap each other."""
    figure = figure_of(monkeypatch, pictures, lambda: getattr(pictures, draw)(rich))
    for axes in figure.axes:
        inside = axes.get_window_extent()
        outside = [axes.get_legend(), axes.title]
        boxes = [x.get_window_extent() for x in outside if x is not None]
        boxes = [box for box in boxes if box.width > 0]
        assert all(figure.bbox.contains(*box.min) for box in boxes)
        assert all(figure.bbox.contains(*box.max) for box in boxes)
        assert not any(box.y0 < inside.y1 - 1 for box in boxes)
        assert len(boxes) < 2 or not boxes[0].overlaps(boxes[1])
        assert axes.get_xlim() == (-6, 606)


def test_training_and_validation_share_axes(rich, monkeypatch):
    """The loss and each metric have a panel, with the name as its title, unchanged."""
    figure = figure_of(monkeypatch, pictures, lambda: pictures.draw_curves(rich))

    assert [axes.get_title("left") for axes in figure.axes] == [
        "loss",
        "accuracy",
        written_run.METRIC,
    ]
    for axes in figure.axes:
        name = axes.get_title("left")
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines["training"].get_ydata()) == list(rich.train[name].value)
        assert list(lines["validation"].get_xdata()) == list(rich.validation[name].step)
        assert ("regularization" in lines) == (name == "loss")


def test_a_run_without_data_has_no_pictures(tmp_path):
    """A picture is drawn only if its data were recorded."""
    assert pictures.draw_all(read_run(write_lines(tmp_path, '{"split": "x", "step": 1}'))) == {}
    drawn = pictures.draw_all(read_run(write_lines(tmp_path, TRAIN)))
    assert list(drawn) == ["loss", "gradient_norm"]


def test_learning_rates_are_drawn_by_optimizer(tmp_path, rich, monkeypatch):
    """Each optimizer has a curve, with its name if there are several; the metrics have none."""
    [axes] = figure_of(monkeypatch, pictures, lambda: pictures.draw_learning_rates(rich)).axes
    [line] = axes.get_lines()[:1]
    assert list(line.get_ydata()) == list(rich.train["learning_rate"].value)

    rates = {"learning_rate/generator": 0.1, "learning_rate/critic": 0.001}
    run = read_run(write_lines(tmp_path, TRAIN | rates, TRAIN | rates | {"step": 200}))
    [axes] = figure_of(monkeypatch, pictures, lambda: pictures.draw_learning_rates(run)).axes
    assert [line.get_label() for line in axes.get_lines()[:2]] == ["generator", "critic"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["generator", "critic"]
    assert axes.get_yscale() == "log"
    assert not facts.is_metric("learning_rate/critic")


def test_names_in_a_legend_are_shown_as_they_are(tmp_path, monkeypatch):
    """Matplotlib leaves out names that begin with an underscore, and would draw formulas."""
    rates = {f"learning_rate/{name}": 0.1 for name in ("_hidden", "$\\x$ \n" + "a" * 200)}
    run = read_run(write_lines(tmp_path, TRAIN | rates))
    [axes] = figure_of(monkeypatch, pictures, lambda: pictures.draw_learning_rates(run)).axes
    hidden, long = axes.get_legend().get_texts()

    assert hidden.get_text() == " _hidden"
    assert long.get_text().startswith("$\\x$  aaa")
    assert len(long.get_text()) == MAX_LABEL
    assert not long.get_parse_math()


def test_values_over_a_wide_range_have_a_logarithmic_axis():
    """Positive values that differ by more than a factor of 20 do; zero and negative values do not."""
    for values, expected in (
        ([1.0, 21.0], "log"),
        ([1.0, 20.0], "linear"),
        ([0.0, 100.0], "linear"),
        ([np.nan, np.nan], "linear"),
    ):
        axes = Figure().add_subplot()
        pictures.choose_scale(axes, [Curve(np.arange(2), np.array(values))])
        assert axes.get_yscale() == expected


@pytest.mark.slow
def test_there_is_a_limit_to_what_is_drawn(tmp_path, monkeypatch):
    """Of thousands of metrics, data sets and learning rates the first are drawn."""
    numbers = range(1, 2001)
    names = {f"m{n}": 1.0 for n in numbers} | {f"learning_rate/{n}": 1.0 for n in numbers}
    validation = {"split": "validation", "step": 5} | {f"set{n}/m1": 1.0 for n in numbers}
    run = read_run(write_lines(tmp_path, TRAIN | names, validation))
    curves = figure_of(monkeypatch, pictures, lambda: pictures.draw_curves(run)).axes
    [rates] = figure_of(monkeypatch, pictures, lambda: pictures.draw_learning_rates(run)).axes

    assert len(curves) == pictures.MAX_PANELS
    assert len(curves[1].get_legend().get_texts()) == 1 + pictures.MAX_CURVES
    assert len(rates.get_legend().get_texts()) == pictures.MAX_CURVES
    drawn = pictures.MAX_PANELS + pictures.MAX_CURVES
    assert pictures.curves_left_out(run) == 2001 + 2000 - drawn
