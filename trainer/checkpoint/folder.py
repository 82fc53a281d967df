"""Folders that are there whole or not at all, and that notice when they have been damaged.

A folder is written beside its place, under a name that ends in ".tmp"; then a manifest is
added, `run.json`, with a checksum of every file and of itself; then all of it is renamed
into place, which the file system does at once. A process that is killed on the way leaves
what was there before. Nothing here knows what is in the files.
"""

import hashlib
import json
import pathlib
import re
import shutil
from typing import Any

from trainer.base.atomic_files import UNFINISHED, flush_to_disk, unfinished

MANIFEST = "run.json"
REPLACED = ".old"


class DamagedError(ValueError):
    """A folder is not as it was written."""


def begin(path: pathlib.Path) -> pathlib.Path:
    """Returns an empty folder in which to write what `commit` will put at `path`."""
    beside = unfinished(path)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def commit(path: pathlib.Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Puts what was written since `begin` at `path`, in place of what may be there.

    Args:
        path: where to.
        facts: what the manifest says beside the checksums; anything JSON can hold.

    Returns:
        Size and checksum of each file, by its name.
    """
    beside = unfinished(path)
    files = {}
    for file in sorted(beside.rglob("*")):
        if file.is_file():
            name = file.relative_to(beside).as_posix()
            files[name] = {"bytes": file.stat().st_size, "sha256": checksum(file)}
            flush_to_disk(file)
    manifest = beside / MANIFEST
    manifest.write_text(sealed(facts | {"files": files}))
    flush_to_disk(manifest)
    flush_to_disk(beside)
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():  # and a folder cannot be renamed over one that is not empty
        path.rename(replaced)
    beside.rename(path)
    flush_to_disk(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return files


def abandon(path: pathlib.Path) -> None:
    """Removes what was written since `begin`."""
    shutil.rmtree(unfinished(path), ignore_errors=True)


def committed(parent: pathlib.Path, prefix: str) -> dict[int, pathlib.Path]:
    """Returns the folders `parent/prefix-NUMBER` that were committed, by number, ascending."""
    pattern = re.compile(re.escape(prefix) + r"-(\d+)")
    found = {
        int(match[1]): path
        for path in parent.glob(f"{prefix}-*")
        if (match := pattern.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def tidy(parent: pathlib.Path, prefix: str) -> None:
    """Removes what a killed process has left unfinished, and ends a replacement it has begun."""
    for replaced in parent.glob(f"{prefix}-*{REPLACED}"):
        path = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)
    for begun in parent.glob(f"{prefix}-*{UNFINISHED}"):
        shutil.rmtree(begun)


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """Returns what a folder's manifest says, when all its files are as they were written.

    Raises:
        DamagedError: if one is not: it names the file and what is wrong with it.
    """
    try:
        text = (path / MANIFEST).read_text()
        facts = json.loads(text)
        facts.pop("sha256")
        files = dict(facts["files"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path / MANIFEST} cannot be read: {error}") from error
    if text != sealed(facts):
        raise DamagedError(f"{path / MANIFEST} was changed: its checksum does not fit")
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise DamagedError(f"{file} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise DamagedError(
                f"{file} has {file.stat().st_size} bytes instead of {expected['bytes']}"
            )
        try:
            found = checksum(file)
        except OSError as error:
            raise DamagedError(f"{file} cannot be read: {error}") from error
        if found != expected["sha256"]:
            raise DamagedError(f"{file} was changed: its checksum does not fit")
    return facts


def checksum(file: pathlib.Path) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal."""
    with file.open("rb") as contents:
        return hashlib.file_digest(contents, "sha256").hexdigest()


def sealed(facts: dict[str, Any]) -> str:
    """Returns a manifest's text, to the byte: the facts as JSON, and the SHA-256 of that JSON.

    Example:
        >>> list(json.loads(sealed({"step": 3})))
        ['step', 'sha256']
    """
    seal = hashlib.sha256(json.dumps(facts, indent=1).encode()).hexdigest()
    return json.dumps(facts | {"sha256": seal}, indent=1) + "\n"
