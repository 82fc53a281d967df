"""L22: a run's folder has one writer."""

import json
import os
import pathlib
import subprocess
import sys

import filelock
import pytest
from helpers import Linear, slopes

from trainer.base.folder_lock import HOLDER, LOCK, only_writer

ROOT = pathlib.Path(__file__).parents[3]
HELD = """
import pathlib, sys
from trainer.base.folder_lock import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.thorough
def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    """The error names the process that holds the folder. When that is killed, the folder is free."""
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            holder = json.loads((tmp_path / HOLDER).read_text())
            trainer = Linear(model_dir=tmp_path, verbose=False)
            with pytest.raises(RuntimeError, match="in use") as error:
                trainer.train(slopes(1.0), steps=1, global_batch=1)
        finally:
            other.kill()
    for told in (
        str(tmp_path),
        f"process {other.pid} on {holder['host']}, since {holder['since']}",
    ):
        assert told in str(error.value)

    assert trainer.train(slopes(1.0), steps=1, global_batch=1).steps_run == 1
    assert not (tmp_path / HOLDER).exists()


@pytest.mark.thorough
def test_a_folder_is_free_between_calls(tmp_path):
    """In one process another trainer can go on, as when a cell of a notebook is run again."""
    for steps in (1, 2):
        trainer = Linear(model_dir=tmp_path, verbose=False)
        assert trainer.train(slopes(1.0), steps=steps, global_batch=1).steps_run == 1


def test_another_trainer_of_the_process_holds_the_folder(tmp_path):
    """Until `save_checkpoint` ends its calls of train_on_batch."""
    first, second = (Linear(model_dir=tmp_path, verbose=False) for _ in range(2))
    first.train_on_batch(slopes(1.0))
    with pytest.raises(RuntimeError, match="`model_dir` must not be in use"):
        second.train(slopes(1.0), steps=2, global_batch=1)
    first.save_checkpoint()
    assert second.train(slopes(1.0), steps=2, global_batch=1).steps_run == 1


def test_a_holder_that_left_no_name(tmp_path):
    """A holder that is just starting has not written who it is."""
    with (
        filelock.FileLock(tmp_path / LOCK),
        pytest.raises(RuntimeError, match="held by another process"),
        only_writer(tmp_path),
    ):
        pass


@pytest.mark.parametrize("error", [OSError(95, "not supported"), NotImplementedError("no flock")])
def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog, error):
    """Where nothing can be locked, the run says so and goes on."""

    def acquire(_):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with only_writer(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked ({error})." in caplog.text


def test_no_folder_needs_no_lock():
    """Without a folder nothing is written."""
    with only_writer(None):
        pass
