"""Writes files and folders atomically: under a temporary name, then renamed into place.

The file system renames in one step, so a process that is killed leaves either the complete new
version or what was there before. A folder is also flushed to disk before and after the rename, so
that it survives a power failure.

    folder = begin_folder(path)
    ...  # write files into `folder`
    publish_folder(path)  # or discard_folder(path)
    remove_folder(path)  # once it is not needed any more

`only_writer` locks the folder of a run, which has one writer at a time.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

import filelock
from absl import logging

LOCK = "writer.lock"
UNFINISHED = ".tmp"  # suffix of a file or folder that is still being written
REPLACED = ".old"  # suffix of a folder that is being replaced, where folders cannot be exchanged
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux: linux/fcntl.h, linux/fs.h


def unfinished(path: pathlib.Path) -> pathlib.Path:
    """Returns the temporary path at which the file or folder for `path` is written."""
    return path.with_name(path.name + UNFINISHED)


def write_atomically(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file, so that a reader sees all of it or none. Creates its parent folders.

    No link is followed: one at the file's place is replaced, and what it leads to stays as it is.

    Raises:
        OSError: if the file cannot be written, for instance because a folder is in its place.

    Example:
        >>> import tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "page.html").symlink_to(folder / "other.txt")
        >>> write_atomically(folder / "page.html", "new")
        >>> (folder / "page.html").read_text(), (folder / "other.txt").exists()
        ('new', False)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished(path)
    temporary.unlink(missing_ok=True)
    file = temporary.open("xb")  # "x" refuses a link that has appeared since
    try:
        with file:
            file.write(content.encode() if isinstance(content, str) else content)
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


@contextlib.contextmanager
def only_writer(folder: pathlib.Path | None) -> Iterator[None]:
    """Context manager: makes a folder if needed, and holds its lock. Readers need no lock.

    The operating system releases it when the process ends, however that happens.

    Args:
        folder: the folder; None locks nothing.

    Raises:
        RuntimeError: if another run holds the lock.
        OSError: if the folder cannot be made.

    Example:
        >>> import tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with only_writer(folder):
        ...     [path.name for path in folder.iterdir()]
        ['writer.lock']
    """
    if folder is None:
        yield
        return
    make_folder(folder)
    lock = filelock.FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise RuntimeError(
            f"`model_dir` must not be in use by another run; got {str(folder)!r}"
        ) from None
    except (OSError, NotImplementedError) as error:
        logging.warning(
            "%s cannot be locked (%s). Take care that no other run writes to it.", folder, error
        )
    try:
        yield
    finally:
        lock.release()
