"""Checkpoint folders are written completely or not at all, and every damaged bit is detected."""

import os
import pathlib
import shutil

import pytest

from trainer.base.atomic_files import begin_folder, clean_up_folders
from trainer.checkpoint import folder

FACTS = {"step": 12, "scale": 32768.0, "loss": 0.1, "none": None, "deep": {"list": [1, [2.5]]}}
FILES = {"variables.index": bytes(range(256)), "deep/er/notes": b"some text\n", "empty": b""}


class Killed(BaseException):
    """Stands for a kill: no `except Exception` catches it."""


def write(path, files=FILES, facts=FACTS):
    """Writes and commits a folder."""
    unfinished = begin_folder(path)
    for name, content in files.items():
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).write_bytes(content)
    folder.commit(path, facts)


def contents(path):
    """Every file under a path except the manifest, by name."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != folder.MANIFEST
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A committed folder. A test that changes it restores it."""
    path = tmp_path_factory.mktemp("parent") / "ckpt-12"
    write(path)
    return path


def test_a_manifest_returns_the_facts_and_describes_every_file(sound):
    """A manifest holds the facts, and the size and checksum of every file at any depth."""
    facts = folder.read_manifest(sound)
    files = facts.pop("files")

    assert facts == FACTS
    assert contents(sound) == FILES
    assert {name: file["bytes"] for name, file in files.items()} == {
        name: len(content) for name, content in FILES.items()
    }
    # The well-known SHA-256 of no bytes.
    assert files["empty"]["sha256"].startswith("e3b0c44298fc1c149afbf4c8996fb924")
    assert folder.MANIFEST not in files


def assert_found(sound, name, damaged):
    """Damages a file, checks that the error names it, and restores the file."""
    file = sound / name
    before = file.read_bytes()
    file.write_bytes(damaged)
    try:
        with pytest.raises(folder.DamagedError) as error:
            folder.read_manifest(sound)
    finally:
        file.write_bytes(before)
    assert str(error.value).startswith(f"{file} "), error.value


@pytest.mark.parametrize("name", [*FILES, folder.MANIFEST])
def test_every_flipped_bit_is_found(sound, name, full):
    """Any flipped bit is detected in any byte of any file, including the manifest and its blanks."""
    right = (sound / name).read_bytes()
    for place in range(len(right)):
        for bit in range(8) if full else [place % 8]:
            wrong = bytearray(right)
            wrong[place] ^= 1 << bit
            assert_found(sound, name, bytes(wrong))
    folder.read_manifest(sound)


@pytest.mark.parametrize("name", [*FILES, folder.MANIFEST])
def test_every_truncation_is_found(sound, name):
    """A file cut to any length, one with an extra byte, a missing one, and a folder in its place."""
    right = (sound / name).read_bytes()
    for length in range(len(right)):
        assert_found(sound, name, right[:length])
    assert_found(sound, name, right + b"\n")
    aside = (sound / name).rename(sound.parent / "aside")
    with pytest.raises(folder.DamagedError, match="cannot be read"):
        folder.read_manifest(sound)
    (sound / name).mkdir()
    with pytest.raises(folder.DamagedError, match="cannot be read"):
        folder.read_manifest(sound)
    (sound / name).rmdir()
    aside.rename(sound / name)
    folder.read_manifest(sound)


def test_a_file_that_cannot_be_read_counts_as_damaged(sound, monkeypatch):
    """A read error of the disk is damage, so that an earlier checkpoint can be used instead."""

    def failing(file):
        raise OSError(5, "Input/output error", str(file))

    monkeypatch.setattr(folder, "checksum", failing)
    with pytest.raises(folder.DamagedError) as error:
        folder.read_manifest(sound)

    assert str(error.value).startswith(str(sound / "deep/er/notes"))


def kill_at(monkeypatch, call):
    """Kills the process when it enters one call, given by number, of all calls that use the disk."""
    calls = [0]

    def dying(owner, name):
        real = getattr(owner, name)

        def replacement(*args, **kwargs):
            if calls[0] == call:
                if name == "rmtree":  # dies halfway
                    for file in list(pathlib.Path(args[0]).rglob("*.index")):
                        file.unlink()
                raise Killed
            calls[0] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, replacement)

    dying(pathlib.Path, "rename")
    dying(pathlib.Path, "mkdir")
    dying(pathlib.Path, "write_text")
    dying(shutil, "rmtree")
    dying(folder, "checksum")
    dying(os, "fsync")


@pytest.mark.parametrize("replacing", [False, True])
def test_a_commit_is_all_or_nothing(tmp_path, monkeypatch, replacing):
    """A process killed at any call leaves either the old folder or the new one complete. Anything
    else it left is never listed, and is gone after `clean_up_folders`.
    """
    path, old, new = tmp_path / "ckpt-3", {"a.index": b"old"}, {"a.index": b"new", "b.index": b"x"}
    if replacing:
        write(path, old, {"old": True})
    outcomes = []
    for call in range(100):
        with monkeypatch.context() as patch:
            kill_at(patch, call)
            try:
                write(path, new, {"old": False})
                killed = False
            except Killed:
                killed = True
        assert set(folder.committed(tmp_path, "ckpt")) <= {3}
        for listed in folder.committed(tmp_path, "ckpt").values():
            folder.read_manifest(listed)
        clean_up_folders(tmp_path, "ckpt")
        found = folder.committed(tmp_path, "ckpt")
        assert {each.name for each in tmp_path.iterdir()} == {each.name for each in found.values()}
        if found:
            facts = folder.read_manifest(path)
            assert contents(path) == (old if facts["old"] else new)
            outcomes.append("old" if facts["old"] else "new")
        else:
            outcomes.append("none")
        if not killed:
            break
        shutil.rmtree(path, ignore_errors=True)
        if replacing:
            write(path, old, {"old": True})

    before = "old" if replacing else "none"
    changed = outcomes.index("new")
    assert outcomes == [before] * changed + ["new"] * (len(outcomes) - changed)
    assert not killed
    assert changed > 8


def test_only_committed_folders_are_listed(tmp_path):
    """In ascending order, without unfinished folders, files and other names."""
    for name in ("ckpt-20", "ckpt-3", "ckpt-100", "step-5"):
        write(tmp_path / name)
    begin_folder(tmp_path / "ckpt-7")
    for name in ("ckpt-8.old", "ckpt-", "ckpt-x", "ckpt--3", "ckpt-3 copy", "my-ckpt-4"):
        (tmp_path / name).mkdir()
    (tmp_path / "ckpt-9").write_text("a file")

    assert list(folder.committed(tmp_path, "ckpt").items()) == [
        (step, tmp_path / f"ckpt-{step}") for step in (3, 20, 100)
    ]
    assert folder.committed(tmp_path / "none", "ckpt") == {}
