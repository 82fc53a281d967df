"""The command `python -m trainer.report`."""

import pytest
from absl import app, flags
from absl.testing import flagsaver
from written_run import TRAIN, write_lines

from trainer.report.__main__ import main


def test_the_command(tmp_path, capsys):
    """It prints the path of the page. Errors end it without a traceback."""
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
        with pytest.raises(SystemExit, match=r"metrics\.jsonl"):
            main(["report", str(tmp_path / "run")])
        flags.FLAGS.output = None
        with pytest.raises(SystemExit, match="`run_dir`"):
            main(["report", str(tmp_path)])
        with pytest.raises(app.UsageError):
            main(["report"])
        write_lines(tmp_path / "other", TRAIN)
        main(["report", str(tmp_path / "run"), str(tmp_path / "other")])
        assert capsys.readouterr().out.endswith(f"comparison in {tmp_path / 'comparison.html'}\n")
