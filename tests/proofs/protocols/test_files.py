"""What programs do to files is recorded, and what a crash leaves of it is known."""

import pathlib
import shutil

from proofs.protocols import files
from proofs.protocols.files import Disk, File, after_power_failure, performed, write_out
from trainer.base import atomic_files


def disk_after(*operations):
    """The disk after some operations."""
    disk = Disk()
    for operation in operations:
        disk = performed(disk, operation)
    return disk


def left(disk):
    """What power failures leave: the files with their texts, each possibility once."""
    return {
        tuple(
            (path, node.text if isinstance(node, File) else None)
            for path, node in files.paths(each).items()
        )
        for each in after_power_failure(disk)
    }


def test_operations_are_recorded_and_can_be_repeated(tmp_path):
    """A program that writes, renames, exchanges and removes: the recorded operations lead to the
    same files on a disk of the model.
    """
    root = tmp_path / "root"
    root.mkdir()
    with files.recorded(root) as done:
        for name in ("a", "b"):
            folder = root / name / "in"
            folder.mkdir(parents=True)
            (folder / "text").write_text(name)
            atomic_files.flush_to_disk(folder / "text")
        (root / "a/in/text").rename(root / "a/in/moved")
        atomic_files.exchange(root / "a", root / "b")
        with (root / "b/in/more").open("x") as file:
            file.write("more")
        (root / "c").write_text("")
        (root / "c").unlink()
        shutil.rmtree(root / "a")
        (tmp_path / "elsewhere").write_text("not recorded")
    disk = disk_after(*done)
    copy = tmp_path / "copy"
    copy.mkdir()
    write_out(disk, copy)

    def contents(folder):
        return {
            path.relative_to(folder).as_posix(): path.read_text() if path.is_file() else None
            for path in folder.rglob("*")
        }

    assert (
        contents(copy)
        == contents(root)
        == {
            "b": None,
            "b/in": None,
            "b/in/moved": "a",
            "b/in/more": "more",
        }
    )
    assert ("fsync", "a/in/text") in done
    assert ("exchange", "a", "b") in done
    assert not any("elsewhere" in part for operation in done for part in operation)


def test_what_was_not_flushed_may_be_lost():
    """A file without flushes is there with its text, empty, or not at all."""
    disk = disk_after(("create", "a"), ("fill", "a", "text"))

    assert left(disk) == {(), (("a", ""),), (("a", "text"),)}


def test_what_was_flushed_is_kept():
    """The text by a flush of the file, the name by one of the folder."""
    create = [("create", "a"), ("fill", "a", "text")]

    assert left(disk_after(*create, ("fsync", "a"))) == {(), (("a", "text"),)}
    assert left(disk_after(*create, ("fsync", ""))) == {(("a", ""),), (("a", "text"),)}
    assert left(disk_after(*create, ("fsync", "a"), ("fsync", ""))) == {(("a", "text"),)}


def test_the_entries_of_a_folder_are_kept_in_order():
    """The second of two names never without the first."""
    disk = disk_after(("create", "a"), ("create", "b"))

    assert left(disk) == {(), (("a", ""),), (("a", ""), ("b", ""))}


def test_folders_do_not_wait_for_each_other():
    """What is removed from a folder may be gone although its new name is not kept."""
    disk = disk_after(("mkdir", "a"), ("create", "a/b"), ("fsync", "a"), ("fsync", ""))
    disk = performed(performed(disk, ("rename", "a", "c")), ("unlink", "c/b"))

    assert left(disk) == {
        (("a", None),),
        (("a", None), ("a/b", "")),
        (("c", None),),
        (("c", None), ("c/b", "")),
    }


def test_disks_that_cannot_be_told_apart_are_equal():
    """Numbers do not depend on what was removed before."""
    direct = disk_after(("create", "a"), ("fsync", ""))
    detour = disk_after(("create", "b"), ("unlink", "b"), ("create", "a"), ("fsync", ""))

    assert direct == detour
    assert pathlib.Path("a").name in files.paths(direct)
