"""Checkpoints survive kills, power failures and readers: what the model searches is the code."""

import pathlib
from unittest import mock

import pytest

from proofs.protocols import checkpoint, files
from proofs.protocols.search import search
from trainer.base import atomic_files
from trainer.checkpoint import folder
from trainer.checkpoint.saver import newest_intact


@pytest.fixture(autouse=True)
def forgotten():
    """What was recorded of code that a test changed is forgotten."""
    checkpoint.recorded.cache_clear()
    yield
    checkpoint.recorded.cache_clear()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("bounds", "states"),
    [
        ({"deaths": 1}, 500),
        ({"deaths": 1, "reads": True}, 2_000),
        ({"deaths": 1, "power": True}, 300),
        ({"deaths": 1, "power": True, "with_folder": False}, 300),
        pytest.param({"deaths": 2}, 4_000, marks=pytest.mark.slow),
        pytest.param({"deaths": 2, "reads": True}, 10_000, marks=pytest.mark.slow),
        pytest.param({"deaths": 2, "power": True}, 1_000, marks=pytest.mark.slow),
    ],
)
def test_the_claims_hold_whatever_happens_when(bounds, states):
    """Every start and every reader finds a whole checkpoint, as new as the last one committed."""
    found = search(checkpoint.model(**bounds))

    assert found.broken == "", "\n".join(found.story)
    assert found.states > states


@pytest.mark.thorough
@pytest.mark.parametrize("fault", checkpoint.FAULTS)
def test_a_fault_is_found(fault):
    """A protocol with a fault breaks a claim, and there is a story of how."""
    found = search(checkpoint.FAULTS[fault]())

    assert found.broken
    assert found.story[0] == "a process starts"


@pytest.mark.thorough
def test_a_reader_may_miss_a_folder_that_cannot_be_exchanged():
    """Where the system cannot exchange folders, a checkpoint that is saved again has no name for a
    moment. A kill in that moment loses nothing.
    """
    with mock.patch.object(atomic_files, "exchange", return_value=False):
        read = search(checkpoint.model(reads=True, deaths=0))
        killed = search(checkpoint.model(deaths=1))

    assert read.broken == "a reader finds a whole checkpoint, as new as the last one committed"
    assert "the writer renames run/ckpt-1 and run/ckpt-1.old" in read.story
    assert killed.broken == ""


@pytest.mark.thorough
def test_folders_that_are_not_flushed_are_lost_with_what_is_in_them():
    """A new folder is flushed in the one above; otherwise a power failure takes every checkpoint."""

    def unflushed(path):
        path.mkdir(exist_ok=True)

    with (
        mock.patch.object(atomic_files, "make_folder", unflushed),
        mock.patch.object(checkpoint, "make_folder", unflushed),
    ):
        found = search(checkpoint.model(power=True, deaths=1, with_folder=False))

    assert found.broken == "a start finds a whole checkpoint, as new as the last one committed"
    assert "the saving of ckpt-1 returns" in found.story
    assert "the power fails; left: nothing" in found.story
    assert found.story[-1] == "it finds no checkpoint"


def test_the_operations_of_a_save():
    """Written under another name, flushed from the inside out, renamed, and flushed above; a
    checkpoint that is saved again is exchanged, and older ones are renamed before they are removed.
    """
    first = checkpoint.first_disk(with_folder=True)

    def shown(disk, step, again):
        program, _ = checkpoint.recorded(disk, checkpoint.save(step, again))
        for operation in program:
            disk = files.performed(disk, operation)
        return disk, [" ".join(each[:3] if each[0] != "fill" else each[:2]) for each in program]

    written = [
        "mkdir run/ckpt-{0}.tmp",
        "create run/ckpt-{0}.tmp/data",
        "fill run/ckpt-{0}.tmp/data",
        "create run/ckpt-{0}.tmp/run.json",
        "fill run/ckpt-{0}.tmp/run.json",
        "fsync run/ckpt-{0}.tmp/data",
        "fsync run/ckpt-{0}.tmp/run.json",
        "fsync run/ckpt-{0}.tmp",
    ]
    disk, new = shown(first, 1, 0)
    assert new == [
        *(each.format(1) for each in written),
        "rename run/ckpt-1.tmp run/ckpt-1",
        "fsync run",
    ]
    disk, again = shown(disk, 1, 1)
    assert again[:10] == [
        *(each.format(1) for each in written),
        "exchange run/ckpt-1.tmp run/ckpt-1",
        "fsync run",
    ]
    assert sorted(again[10:12]) == ["unlink run/ckpt-1.tmp/data", "unlink run/ckpt-1.tmp/run.json"]
    assert again[12:] == ["rmdir run/ckpt-1.tmp"]
    _, pruned = shown(disk, 2, 0)
    assert pruned[8:11] == [
        "rename run/ckpt-2.tmp run/ckpt-2",
        "fsync run",
        "rename run/ckpt-1 run/ckpt-1.tmp",
    ]


def test_a_reader_reads_in_the_order_of_the_model(tmp_path):
    """The newest first: its manifest, then its files; then the next one."""
    for step in (1, 2):
        (atomic_files.begin_folder(tmp_path / f"run/ckpt-{step}") / "data").write_text("x")
        folder.commit(tmp_path / f"run/ckpt-{step}", {"step": step})
    (tmp_path / "run/ckpt-2/data").write_text("y")
    read, real = [], pathlib.Path.open

    def opened(self, *arguments, **named):
        read.append(self.relative_to(tmp_path).as_posix())
        return real(self, *arguments, **named)

    with mock.patch.object(pathlib.Path, "open", opened):
        path, _ = newest_intact(folder.committed(tmp_path / "run", "ckpt"), "model_dir")

    assert path.name == "ckpt-1"
    assert list(dict.fromkeys(read)) == [
        "run/ckpt-2/run.json",
        "run/ckpt-2/data",
        "run/ckpt-1/run.json",
        "run/ckpt-1/data",
    ]
