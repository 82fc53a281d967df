"""Files that are there whole or not at all: written beside their place, then renamed into it."""

import os
import pathlib

UNFINISHED = ".tmp"


def unfinished(path: pathlib.Path) -> pathlib.Path:
    """Returns where what will be at `path` is written."""
    return path.with_name(path.name + UNFINISHED)


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file so that whoever reads it finds all of it or none, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = unfinished(path)
    beside.write_text(text)
    beside.replace(path)


def flush_to_disk(path: pathlib.Path) -> None:
    """Waits until a file, or a folder's list of names, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
