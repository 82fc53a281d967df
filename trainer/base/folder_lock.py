"""A lock, so that a run's folder has one writer at a time."""

import contextlib
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator

import filelock
from absl import logging

from trainer.base.atomic_files import write_atomically

LOCK = "writer.lock"
HOLDER = "writer.json"  # which process holds the lock


@contextlib.contextmanager
def only_writer(folder: pathlib.Path | None) -> Iterator[None]:
    """Context manager: holds a folder's lock. Readers need no lock.

    The operating system releases it when the process ends, however that happens.

    Args:
        folder: an existing folder; None locks nothing.

    Raises:
        RuntimeError: if another run holds the lock.

    Example:
        >>> import tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with only_writer(folder):
        ...     json.loads((folder / HOLDER).read_text())["pid"] == os.getpid()
        True
    """
    if folder is None:
        yield
        return
    lock = filelock.FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise RuntimeError(in_use(folder)) from None
    except (OSError, NotImplementedError) as error:
        logging.warning(
            "%s cannot be locked (%s). Take care that no other run writes to it.", folder, error
        )
    try:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": began}
        write_atomically(folder / HOLDER, json.dumps(holder))
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def in_use(folder: pathlib.Path) -> str:
    """Returns the text of the error about a folder that another run holds."""
    who = "another process"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may just be starting
        holder = json.loads((folder / HOLDER).read_text())
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    return f"`model_dir` must not be in use by another run; got {str(folder)!r}, held by {who}"
