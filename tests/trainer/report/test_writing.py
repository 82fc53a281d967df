"""Writing the report of a run, from its folder to the page and its pictures."""

import pathlib

import numpy as np
import pytest
from helpers import STEEP, overflowing
from written_run import TRAIN, write_lines

from scaling.telemetry.record import read_record
from trainer import Monitoring
from trainer.report import facts, write_report
from trainer.report.reading import read_run


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
    assert list(facts.scale_path(run)[0].value) == [2.0**17, 2.0**16, 2.0**15, 2.0**14]
    assert run.starts[0].settings["best_metric"] == "loss"
    shown = {name: value for name, value, _ in facts.settings_rows(run)}
    assert shown["data_content.0"] == "float32 (4,), norm 6, projection -3.1073"
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
        assert names == ["gradient_norm.png", "loss.png", "loss_scale.png", "report.html"]


def test_arguments_must_be_paths(tmp_path):
    """Neither folder may be a number."""
    with pytest.raises(TypeError, match=r"^`run_dir` must be "):
        write_report(3)
    with pytest.raises(TypeError, match=r"^`output` must be "):
        write_report(write_lines(tmp_path, TRAIN), output=3)


def test_links_in_the_folder_of_the_run_are_not_followed(tmp_path):
    """A link in place of a file is replaced. One in place of the report's folder is refused, unless
    that folder was asked for.
    """
    run, mine = write_lines(tmp_path / "run", TRAIN), tmp_path / "mine"
    mine.mkdir()
    (mine / "loss.png").write_text("precious")
    (run / "report").symlink_to(mine)
    with pytest.raises(ValueError, match="output") as error:
        write_report(run)
    assert str(error.value) == (
        f"`output` must be passed for this run; got None, and '{run / 'report'}' is a link. It could "
        "lead to files of yours, which the report would replace. Remove the link, or pass the folder "
        "to write to."
    )
    assert (mine / "loss.png").read_text() == "precious"
    (run / "report").unlink()
    (run / "report").mkdir()
    (run / "report" / "loss.png").symlink_to(mine / "loss.png")
    write_report(run)
    assert (run / "report" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert (mine / "loss.png").read_text() == "precious"
    write_report(run, mine)
    assert (mine / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_read_or_written_is_an_error(tmp_path, monkeypatch):
    """The error names the argument and the folder."""
    run = write_lines(tmp_path / "run", TRAIN)
    (run / "report" / "loss.png").mkdir(parents=True)
    with pytest.raises(ValueError, match="output") as error:
        write_report(run)
    assert str(error.value) == (
        f"`output` must be a folder that can be created or written to; got '{run / 'report'}': Is a "
        "directory. The page and its pictures are written there. Pass another folder."
    )

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(ValueError, match="run_dir") as error:
        write_report(run)
    assert str(error.value) == (
        f"`run_dir` must be a folder that you may read; got '{run}': Permission denied. The report is "
        "made from its metrics.jsonl. Ask its owner for the permission to read it, or pass another "
        "folder."
    )
