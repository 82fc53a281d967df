"""The heat map of underflow."""

import math

import numpy as np
import written_run
from report_figures import figure_of

from trainer.report import heat
from trainer.report.reading import Underflow, read_run


def test_the_heat_map_has_a_row_for_each_variable(tmp_path, monkeypatch):
    """A cell shows the share of a variable up to a log line. Cells without a share are masked."""
    run = read_run(written_run.write(tmp_path / "rich"))
    figure = figure_of(monkeypatch, heat, lambda: heat.draw_underflow(run.underflow, 600))
    [mesh] = figure.axes[0].collections
    shares = mesh.get_array().reshape(7, 30)
    expected = [list(line.share.values())[:6] for line in run.underflow]

    assert np.array_equal(shares[:6].T, expected)
    assert shares.mask[6].all()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["conv2d/kernel", "batch_normalization/gamma"]
    assert max(map(len, labels)) == heat.MAX_NAME


def test_the_heat_map_shows_the_variables_that_lost_most(monkeypatch):
    """If there are too many variables, those that lost most are shown, in the order of the model."""
    shares = {f"layer_{row}/kernel": 0.5 if row % 2 else 0.1 for row in range(2 * heat.MAX_ROWS)}
    lines = [Underflow(10, shares)]
    figure = figure_of(monkeypatch, heat, lambda: heat.draw_underflow(lines, 10))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]

    assert labels == [f"layer_{row}/kernel" for row in range(1, 2 * heat.MAX_ROWS, 2)]


def test_without_shares_there_is_no_heat_map():
    """There is none without log lines, and none if the lines have no variables."""
    assert heat.draw_underflow([], 10) is None
    assert heat.draw_underflow([Underflow(10, {})], 10) is None


def test_the_matrix_of_shares():
    """Its rows are the variables in the order in which they appear. Missing shares are NaN."""
    lines = [Underflow(1, {"b": 0.5}), Underflow(2, {"a": 0.25, "b": math.nan})]
    names, shares = heat.share_matrix(lines)

    assert names == ["b", "a"]
    assert np.array_equal(shares, [[0.5, math.nan], [math.nan, 0.25]], equal_nan=True)


def test_long_names_lose_their_middle():
    """A shortened name has the maximum length, and keeps its start and its end."""
    exact, long = "a" * heat.MAX_NAME, "a" * 40 + "b" * 40

    assert heat.shorten(exact) == exact
    assert len(heat.shorten(long)) == heat.MAX_NAME
    assert heat.shorten(long).startswith("aaa")
    assert heat.shorten(long).endswith("bbb")


def test_the_mean_of_a_variable_is_over_what_was_measured():
    """A variable that was never measured has 0, and the order is the model's."""
    lines = [Underflow(1, {"b": 0.5, "c": math.nan}), Underflow(2, {"a": 0.25, "b": math.nan})]

    assert list(heat.mean_shares(lines).items()) == [("b", 0.5), ("c", 0.0), ("a", 0.25)]
