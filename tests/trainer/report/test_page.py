"""The HTML page of a run, as a file and in a browser, and the page that compares runs."""

import base64
import html
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import written_run
from helpers import STEEP, Linear, overflowing, slopes
from written_run import SETTING, SKIP, TRAIN, write_lines

from scaling.telemetry.record import read_record
from trainer import Monitoring, Skips, TrainingStuckError
from trainer.report import facts, write_report
from trainer.report.page import (
    compare_runs,
    differing_settings,
)
from trainer.report.reading import read_run

HEADINGS = [
    "Loss and metrics",
    "Loss scale",
    "Headroom",
    "Underflow",
    "Gradient norm",
    "Learning rate",
    "Recommended scale",
    "Skipped steps",
    "Settings",
    "Model",
]


def page_of(folder):
    """Returns the HTML of a run's page."""
    return pathlib.Path(write_report(folder)).read_text()


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """The folder of a run that has recorded everything, with its report."""
    folder = written_run.write(tmp_path_factory.mktemp("runs") / "rich")
    write_report(folder)
    return folder


def test_the_pictures_beside_the_page_are_those_on_it(rich):
    """The PNG files are byte for byte those in the page, and each has a text description."""
    page = (rich / "report" / "report.html").read_text()
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)"', page)
    names = ["loss", "loss_scale", "headroom", "underflow", "gradient_norm"]
    names.append("learning_rate")

    assert len(found) == 6
    for name, (data, alt) in zip(names, found, strict=True):
        assert (rich / "report" / f"{name}.png").read_bytes() == base64.b64decode(data)
        assert len(alt) > 40
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", page)


def test_a_section_without_data_names_the_flag_that_records_it(tmp_path):
    """The page of a run with one log line has all sections, and each says what is missing."""
    page = page_of(write_lines(tmp_path, TRAIN | {"skipped": 0}))

    assert re.findall(r"<h2[^>]*>(.*)</h2>", page) == HEADINGS
    assert page.count("<img ") == 2
    assert page.count("<code>Monitoring(record_gradients=True)</code>") == 3


@pytest.mark.thorough
def test_the_page_of_a_run_that_never_applied_a_step(tmp_path):
    """It says by which error the run ended, and does not ask for a flag that was given."""
    trainer = Linear(
        model_dir=tmp_path,
        precision="mixed_float16",
        loss_scale=2.0**24,
        skips=Skips(max_consecutive=3),
        monitoring=Monitoring(record_gradients=True),
        log_interval=1,
        verbose=False,
    )
    with pytest.raises(TrainingStuckError):
        trainer.train(slopes(3.0), steps=9, global_batch=1)
    page = page_of(tmp_path)

    assert "ended by TrainingStuckError" in page
    assert "Ended by an error after step 3: TrainingStuckError: 3 steps" in page
    assert page.count("<img ") == 2  # the scale and the learning rate
    assert "record_gradients</code>" not in page


def test_only_the_first_skips_are_listed(tmp_path):
    """The table has fifty rows, and the number of further skipped steps follows."""
    lines = [SKIP | {"step": step, "replica": None} for step in range(1, 1063)]
    page = page_of(write_lines(tmp_path, *lines))

    assert page.count("<td>backward</td>") == 50
    assert '<td class="number">50</td>' in page
    assert '<td class="number">51</td>' not in page
    assert "More skipped steps, not shown: 1,012." in page


def browse(page, *, dark):
    """Returns what a browser shows of a page; see `tests/browser.py`."""
    wanted = {"width": 800, "dark": dark, "pages": {str(page): ""}}
    program = pathlib.Path(__file__).parents[2] / "browser.py"
    result = subprocess.run(
        [sys.executable, str(program), json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": ""},
    )
    lines = result.stdout.splitlines()
    if "started" not in lines:
        pytest.skip(f"no browser (extra `browser`): {result.stderr.strip()[-200:]}")
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(lines[-1])[str(page)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dark", "background"), [(False, "rgb(246, 247, 249)"), (True, "rgb(20, 23, 27)")]
)
def test_a_browser_shows_the_page(rich, dark, background):
    """The browser requests nothing else, all images load and have a description, names from the run
    are shown as text, and 800 pixels are wide enough. The page follows the browser's dark mode.
    """
    page = rich / "report" / "report.html"
    seen = browse(page, dark=dark)

    assert [url for url in seen["requested"] if url != f"file://{page}"] == []
    assert (seen["broken"], seen["images"], seen["active"]) == ([], 6, [])
    assert seen["headings"] == [["H1", "rich"], *[["H2", heading] for heading in HEADINGS]]
    assert (seen["title"], seen["background"]) == ("rich: report of a run", background)
    for name in (written_run.SCRIPT, written_run.METRIC, written_run.SETTING):
        assert name in seen["text"]
    assert seen["page_width"] <= seen["window_width"]


def test_a_real_run_has_a_report(tmp_path):
    """Every line that a trainer writes is read, and its gradient record covers the same steps."""
    trainer = overflowing(
        model_dir=tmp_path,
        steps_per_loop=4,
        verbose=False,
        monitoring=Monitoring(record_gradients=True),
    )
    trainer.train(STEEP, steps=12, global_batch=4, eval_data=STEEP, eval_interval=12)
    run = read_run(tmp_path)

    assert run.unreadable == 0
    assert list(run.train["loss"].value) == [3.0, -19.5, -55.5]
    assert list(run.validation["loss"].step) == [12]
    assert [skip.step for skip in run.skips] == [1, 2, 3]
    assert np.array_equal(run.record.step, read_record(tmp_path / "metrics.jsonl").step)
    assert list(run.scale.value) == [2.0**17, 2.0**16, 2.0**15, 2.0**14]
    assert run.starts[0].settings["best_metric"] == "loss"
    shown = {name: value for name, value, _ in facts.settings_rows(run)}
    assert any("float32 (4,), norm 6, projection -3.1" in value for value in shown.values())
    assert run.starts[0].model[0]["shape"] == [1, 1]
    assert (run.end.step, run.end.stopped) == (12, False)
    assert [line.step for line in run.underflow] == [4, 8, 12]
    assert [name for name in run.train if facts.is_metric(name)] == ["loss"]
    assert list(run.train["learning_rate"].value) == [1.0, 1.0, 1.0]
    assert pathlib.Path(write_report(tmp_path)).read_text().count("<img ") >= 4


def test_the_report_is_written_to_the_folder_that_was_asked_for(tmp_path):
    """The default is a folder in the run's. A second report replaces the first."""
    run = write_lines(tmp_path / "run", TRAIN)

    for output, expected in (
        (None, run / "report"),
        (tmp_path / "a" / "b", tmp_path / "a" / "b"),
        (str(tmp_path / "a" / "b"), tmp_path / "a" / "b"),
    ):
        assert write_report(run, output) == str(expected / "report.html")
        names = sorted(path.name for path in expected.iterdir())
        assert names == ["gradient_norm.png", "loss.png", "report.html"]


def test_links_in_the_folder_of_the_run_are_not_followed(tmp_path):
    """A link in place of a file is replaced. One in place of the report's folder is refused, unless
    that folder was asked for.
    """
    run, mine = write_lines(tmp_path / "run", TRAIN), tmp_path / "mine"
    mine.mkdir()
    (mine / "loss.png").write_text("precious")
    (run / "report").symlink_to(mine)
    with pytest.raises(ValueError, match="`output`"):
        write_report(run)
    assert (mine / "loss.png").read_text() == "precious"
    (run / "report").unlink()
    (run / "report").mkdir()
    (run / "report" / "loss.png").symlink_to(mine / "loss.png")
    write_report(run)
    assert (run / "report" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert (mine / "loss.png").read_text() == "precious"
    write_report(run, mine)
    assert (mine / "loss.png").read_bytes()[:4] == b"\x89PNG"


# Comparisons.


def start(**settings):
    """The line that a run writes when it starts."""
    time = "2026-11-22T02:30:00+00:00"
    return {"split": "run", "step": 0, "time": time, "settings": settings, "model": []}


def test_the_page_of_a_comparison(tmp_path):
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


def test_what_runs_wrote_is_escaped_in_a_comparison(tmp_path):
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
