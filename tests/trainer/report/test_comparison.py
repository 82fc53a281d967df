"""The page that compares runs."""

import html

import numpy as np
import pytest
from written_run import SETTING, TRAIN, write_lines

from trainer.report import comparison
from trainer.report.comparison import by_quantity, compare_runs, differing_settings, scale_of
from trainer.report.reading import Curve, read_run


def start(**settings):
    """The line that a run writes when it starts."""
    time = "2026-11-22T02:30:00+00:00"
    return {"split": "run", "step": 0, "time": time, "settings": settings, "model": []}


def test_the_page(tmp_path):
    """It has a row for each run, the settings that differ and no others, and the runs' curves."""
    result = {"split": "validation", "step": 10, "accuracy": 0.75}
    scale = {"split": "scale", "step": 1, "loss_scale": 2.0}
    speed = {"examples_per_second": 5}
    first = write_lines(tmp_path / "a", start(seed=0, rule="x"), scale, TRAIN | speed)
    second = write_lines(tmp_path / "b", start(seed=1, rule="x"), TRAIN, result)

    page = compare_runs([first, second], tmp_path / "new" / "folder")
    text = (tmp_path / "new" / "folder" / "comparison.html").read_text()

    assert page == str(tmp_path / "new" / "folder" / "comparison.html")
    assert ">seed<" in text
    assert ">rule<" not in text
    for title in ("Training", "Evaluations", "Loss scale", "Throughput"):
        assert f"<h2>{title}</h2>" in text
    assert text.count("<img ") == 4


def test_what_runs_wrote_is_escaped(tmp_path):
    """Settings and names cannot add elements to the page."""
    first = write_lines(tmp_path / "a", start(text=SETTING), TRAIN)
    second = write_lines(tmp_path / "b", TRAIN)

    compare_runs([first, second], tmp_path)
    text = (tmp_path / "comparison.html").read_text()

    assert SETTING not in text
    assert html.unescape(SETTING) in html.unescape(text)


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    """Folders of one name are shown with their paths."""
    runs = [write_lines(tmp_path / place / "run", TRAIN) for place in ("one", "two")]

    compare_runs(runs, tmp_path)

    for run in runs:
        assert f">{run}<" in (tmp_path / "comparison.html").read_text()


def test_settings_that_only_one_run_has_differ(tmp_path):
    """The others have "-" there; a run without recorded settings is compared too."""
    runs = {
        "a": read_run(write_lines(tmp_path / "a", start(seed=0, old=1), TRAIN)),
        "b": read_run(write_lines(tmp_path / "b", start(seed=0), TRAIN)),
    }

    assert differing_settings(runs) == [("old", ["1", "-"])]
    runs["c"] = read_run(write_lines(tmp_path / "c", TRAIN))
    assert differing_settings(runs) == [("seed", ["0", "0", "-"]), ("old", ["1", "-", "-"])]


def test_curves_by_quantity():
    """Each quantity has the curves of the runs that know it."""
    known, unknown = (Curve(np.array([1]), np.array([value])) for value in (0.5, np.nan))

    found = by_quantity({"a": {"loss": known, "mae": unknown}, "b": {"loss": known}})

    assert found == {"loss": {"a": known, "b": known}}


def test_a_scale_has_corners(tmp_path):
    """The scale holds until the step that changes it."""
    changes = [
        {"split": "scale", "step": step, "loss_scale": 2.0**k} for step, k in ((1, 4), (6, 3))
    ]
    run = read_run(write_lines(tmp_path, *changes, TRAIN))

    curve = scale_of(run)[comparison.LOSS_SCALE]

    assert curve.step[0] == 1
    assert curve.step[-1] == 10
    assert set(curve.value) >= {4.0, 3.0}
    assert (np.diff(curve.step) >= 0).all()


def test_a_run_that_cannot_be_read_is_named(tmp_path):
    """A folder without a metrics.jsonl is no run."""
    with pytest.raises(ValueError, match="`run_dir`"):
        compare_runs([write_lines(tmp_path / "a", TRAIN), tmp_path / "b"], tmp_path)
