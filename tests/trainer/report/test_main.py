"""The command `python -m trainer.report`."""

import sys

import pytest
from absl import app, flags
from absl.testing import flagsaver
from written_run import TRAIN, write_lines

from trainer.report.__main__ import main


def test_the_command(tmp_path, capsys, monkeypatch):
    """It prints the path of the page. Errors end it without a traceback, also a missing extra."""
    write_lines(tmp_path / "run", TRAIN)
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        main(["report", str(tmp_path / "run")])
        page = tmp_path / "run" / "report" / "report.html"
        assert capsys.readouterr().out == f"report in {page}\n"
        assert page.exists()
        flags.FLAGS.output = str(tmp_path / "a" / "b")
        main(["report", str(tmp_path / "run")])
        assert (tmp_path / "a" / "b" / "loss.png").exists()
        flags.FLAGS.output = str(tmp_path / "run" / "metrics.jsonl")
        with pytest.raises(SystemExit) as error:
            main(["report", str(tmp_path / "run")])
        assert str(error.value) == (
            "`output` must be a folder that can be created or written to; got "
            f"{flags.FLAGS.output!r}: File exists. The page and its pictures are written there. "
            "Pass another folder."
        )
        flags.FLAGS.output = ""
        with pytest.raises(SystemExit, match="`output` must be a"):
            main(["report", str(tmp_path / "run")])
        flags.FLAGS.output = None
        with pytest.raises(SystemExit, match="`run_dir` must be a folder"):
            main(["report", str(tmp_path)])
        with pytest.raises(app.UsageError):
            main(["report"])
        write_lines(tmp_path / "other", TRAIN)
        main(["report", str(tmp_path / "run"), str(tmp_path / "other")])
        assert capsys.readouterr().out.endswith(f"comparison in {tmp_path / 'comparison.html'}\n")
        monkeypatch.delitem(sys.modules, "trainer.report.page")
        monkeypatch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(SystemExit) as error:
            main(["report", str(tmp_path / "run")])
        assert str(error.value) == (
            "Writing a report needs jinja2, which is not installed. "
            "Run pip install 'halfstep[report]'."
        )
