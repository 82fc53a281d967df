"""Files and folders that are written completely or not at all, and by one run at a time."""

import os
import pathlib
import subprocess
import sys

import filelock
import pytest
from helpers import Linear, slopes

from trainer.base import atomic_files
from trainer.base.atomic_files import (
    begin_folder,
    clean_up_folders,
    discard_folder,
    exchange,
    only_writer,
    publish_folder,
    unfinished,
    write_atomically,
)


def publish(path, **files):
    """Writes a folder with these files, by name, and publishes it."""
    folder = begin_folder(path)
    for name, text in files.items():
        (folder / name).write_text(text)
    publish_folder(path)


def contents(path):
    """The files under a path with their text, by name."""
    return {
        file.relative_to(path).as_posix(): file.read_text()
        for file in path.rglob("*")
        if file.is_file()
    }


def test_a_file_is_written_with_its_folders_and_replaced(tmp_path):
    """Missing parent folders are created, an old file is replaced, and nothing else is left."""
    path = tmp_path / "deep" / "er" / "notes.txt"
    write_atomically(path, "first")
    write_atomically(path, "second")

    assert contents(tmp_path) == {"deep/er/notes.txt": "second"}


def test_a_file_whose_writing_fails_keeps_its_old_text(tmp_path, monkeypatch):
    """The old file is intact whether writing or renaming fails."""
    path = tmp_path / "notes.txt"
    write_atomically(path, "old")
    for method in ("open", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, method, fail)
            with pytest.raises(OSError, match="No space left"):
                write_atomically(path, "new")
        assert contents(tmp_path) == {"notes.txt": "old"}


def fail(*args):
    """Stands for a full disk."""
    del args
    raise OSError(28, "No space left on device")


def test_a_folder_appears_when_it_is_published(tmp_path):
    """Until then it is at its temporary path only."""
    path = tmp_path / "runs" / "ckpt-3"
    folder = begin_folder(path)
    (folder / "a").write_text("text")

    assert folder == unfinished(path) == tmp_path / "runs" / "ckpt-3.tmp"
    assert not path.exists()
    publish_folder(path)
    assert contents(tmp_path) == {"runs/ckpt-3/a": "text"}


def test_a_published_folder_replaces_the_old_one(tmp_path):
    """No file of the old folder, or of an earlier unfinished one, is left."""
    path = tmp_path / "ckpt-3"
    publish(path, a="old", b="old")
    (begin_folder(path) / "c").write_text("from a killed process")
    publish(path, a="new")

    assert contents(tmp_path) == {"ckpt-3/a": "new"}


@pytest.mark.parametrize("can", [True, False])
def test_a_folder_that_is_replaced_always_has_its_name(tmp_path, monkeypatch, can):
    """Where the system can exchange folders, a reader finds the old or the new one at any time;
    elsewhere the name is missing for a moment.
    """
    path, exchanged, missing = tmp_path / "ckpt-1", [], []
    publish(path, data="old")
    real = {name: getattr(os, name) for name in ("rename", "fsync", "unlink", "rmdir")}

    def watching(name):
        def call(*arguments, **named):
            missing.append(not path.exists())
            return real[name](*arguments, **named)

        return call

    def swap(one, other):
        exchanged.append(can and exchange(one, other))
        return exchanged[-1]

    for name in real:
        monkeypatch.setattr(os, name, watching(name))
    monkeypatch.setattr(atomic_files, "exchange", swap)
    publish(path, data="new")

    assert exchanged == [can and sys.platform == "linux"]
    assert any(missing) != exchanged[0]
    assert contents(tmp_path) == {"ckpt-1/data": "new"}


def test_an_unfinished_folder_can_be_discarded(tmp_path):
    """The published folder is unchanged, and discarding nothing is no error."""
    path = tmp_path / "ckpt-3"
    publish(path, a="old")
    (begin_folder(path) / "a").write_text("new")
    discard_folder(path)
    discard_folder(tmp_path / "ckpt-4")

    assert contents(tmp_path) == {"ckpt-3/a": "old"}


def test_clean_up_leaves_everything_else_alone(tmp_path):
    """Published folders, folders with another prefix, and files are not touched."""
    publish(tmp_path / "ckpt-3", a="text")
    begin_folder(tmp_path / "ckpt-7")
    begin_folder(tmp_path / "step-7")
    (tmp_path / "notes.tmp").write_text("mine")
    clean_up_folders(tmp_path, "ckpt")
    clean_up_folders(tmp_path / "none", "ckpt")

    assert {entry.name for entry in tmp_path.iterdir()} == {"ckpt-3", "step-7.tmp", "notes.tmp"}
    assert contents(tmp_path / "ckpt-3") == {"a": "text"}


@pytest.mark.parametrize("link", ["page.html", "page.html.tmp"])
@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_links_are_replaced_and_not_followed(tmp_path, link, kind):
    """The file that a link leads to keeps its text, and no temporary file is left."""
    other, folder = tmp_path / "other.txt", tmp_path / "folder"
    other.write_text("precious")
    folder.mkdir()
    getattr(folder / link, kind)(other)
    write_atomically(folder / "page.html", "new")

    assert contents(tmp_path) == {"other.txt": "precious", "folder/page.html": "new"}
    assert not (folder / "page.html").is_symlink()


HELD = """
import pathlib, sys
from trainer.base.atomic_files import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.thorough
def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    """L22: a run's folder has one writer. When that is killed, the folder is free."""
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    trainer = Linear(model_dir=tmp_path, verbose=False)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(RuntimeError, match="`model_dir`"):
                trainer.train(slopes(1.0), steps=1, global_batch=1)
        finally:
            other.kill()

    assert trainer.train(slopes(1.0), steps=1, global_batch=1).steps_run == 1


@pytest.mark.thorough
def test_another_trainer_of_the_process_holds_the_folder(tmp_path):
    """L22: until `save_checkpoint` ends its calls of train_on_batch."""
    first, second = (Linear(model_dir=tmp_path, verbose=False) for _ in range(2))
    first.train_on_batch(slopes(1.0))
    with pytest.raises(RuntimeError, match="`model_dir`"):
        second.train(slopes(1.0), steps=2, global_batch=1)
    first.save_checkpoint()
    assert second.train(slopes(1.0), steps=2, global_batch=1).steps_run == 1


@pytest.mark.parametrize("error", [OSError(95, "not supported"), NotImplementedError("no flock")])
def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog, error):
    """Where nothing can be locked, the run says so and goes on."""

    def acquire(_):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with only_writer(tmp_path):
        pass
    assert str(tmp_path) in caplog.text
