"""Writes files and folders atomically: under a temporary name, then renamed into place.

The file system renames in one step, so a process that is killed leaves either the complete new
version or what was there before. A folder is also flushed to disk before and after the rename, so
that it survives a power failure.

    folder = begin_folder(path)
    ...  # write files into `folder`
    publish_folder(path)  # or discard_folder(path)
    remove_folder(path)  # once it is not needed any more
"""

import ctypes
import os
import pathlib
import shutil
import sys

UNFINISHED = ".tmp"  # suffix of a file or folder that is still being written
REPLACED = ".old"  # suffix of a folder that is being replaced, where folders cannot be exchanged
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux: linux/fcntl.h, linux/fs.h


def unfinished(path: pathlib.Path) -> pathlib.Path:
    """Returns the temporary path at which the file or folder for `path` is written."""
    return path.with_name(path.name + UNFINISHED)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a text file, so that a reader sees all of it or none. Creates its parent folders.

    As in `replace_file`, no link is followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file atomically into a folder that others can write to, too.

    No link is followed: one at the file's place is replaced, and what it leads to stays as it is.

    Raises:
        OSError: if the file cannot be written, for instance because a folder is in its place.

    Example:
        >>> import tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "page.html").symlink_to(folder / "other.txt")
        >>> replace_file(folder / "page.html", b"new")
        >>> (folder / "page.html").read_text(), (folder / "other.txt").exists()
        ('new', False)
    """
    temporary = unfinished(path)
    temporary.unlink(missing_ok=True)
    file = temporary.open("xb")  # "x" refuses a link that has appeared since
    try:
        with file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink()
        raise


def begin_folder(path: pathlib.Path) -> pathlib.Path:
    """Returns an empty folder in which to write what `publish_folder` will move to `path`."""
    temporary = unfinished(path)
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary.parent)
    temporary.mkdir()
    return temporary


def make_folder(path: pathlib.Path) -> None:
    """Creates a folder and its parents, which survive a power failure from then on.

    A folder that exists stays as it is.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        flush_to_disk(each.parent)


def publish_folder(path: pathlib.Path) -> None:
    """Moves what was written since `begin_folder` to `path`, replacing what is there."""
    temporary = unfinished(path)
    for entry in sorted(temporary.rglob("*")):
        flush_to_disk(entry)
    flush_to_disk(temporary)
    replaced = path.with_name(path.name + REPLACED)
    if path.exists() and exchange(temporary, path):
        replaced = temporary
    else:
        if path.exists():  # a folder cannot be renamed over one that is not empty
            path.rename(replaced)
        temporary.rename(path)
    flush_to_disk(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def exchange(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Gives each of two folders the other's name, in one step; returns whether that was possible.

    A reader then finds one of them at each name at any time. Linux can do it on most of its own
    file systems. Elsewhere, and on network drives, nothing is done.
    """
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other)
    return rename is not None and rename(*names, RENAME_EXCHANGE) == 0


def discard_folder(path: pathlib.Path) -> None:
    """Removes what was written since `begin_folder`."""
    shutil.rmtree(unfinished(path), ignore_errors=True)


def remove_folder(path: pathlib.Path) -> None:
    """Removes a folder that was published, so that a reader sees all of it or none."""
    discard_folder(path)
    path.rename(unfinished(path))
    shutil.rmtree(unfinished(path))


def clean_up_folders(parent: pathlib.Path, prefix: str) -> None:
    """Cleans up the folders `prefix-*` that a killed process left behind in `parent`.

    Folders that were not yet finished, or not yet removed, are removed. A folder that was set aside
    to be replaced is moved back, unless its replacement is in place.
    """
    for replaced in parent.glob(f"{prefix}-*{REPLACED}"):
        path = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)
    for temporary in parent.glob(f"{prefix}-*{UNFINISHED}"):
        shutil.rmtree(temporary)


def flush_to_disk(path: pathlib.Path) -> None:
    """Waits until a file's contents or a folder's entries would survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
