"""Writes checkpoint folders atomically, and detects damaged ones.

A folder is written under a temporary name (see `atomic_files`). `commit` adds a manifest,
`run.json`, with a checksum of every file and of itself, and moves the folder into place. If the
process is killed before that, an earlier folder at that path stays unchanged. Nothing here
depends on what the files contain.
"""

import hashlib
import json
import pathlib
import re
from typing import Any, TypeAlias

from trainer.base.atomic_files import publish_folder, unfinished

MANIFEST = "run.json"

Facts: TypeAlias = dict[str, Any]  # the contents of a manifest: anything that JSON can hold


class DamagedError(ValueError):
    """Raised when a folder's files no longer match what was written.

    For example, one of them is missing, changed or unreadable.
    """


def commit(path: pathlib.Path, facts: Facts) -> dict[str, dict[str, Any]]:
    """Adds the manifest to the folder from `begin_folder`, and moves the folder to `path`.

    Args:
        path: the folder's final path; an existing folder there is replaced.
        facts: contents of the manifest, apart from the checksums.

    Returns:
        The size and checksum of each file, keyed by file name.
    """
    temporary = unfinished(path)
    files = {
        file.relative_to(temporary).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": checksum(file),
        }
        for file in sorted(temporary.rglob("*"))
        if file.is_file()
    }
    (temporary / MANIFEST).write_text(sealed(facts | {"files": files}))
    publish_folder(path)
    return files


def committed(parent: pathlib.Path, prefix: str) -> dict[int, pathlib.Path]:
    """Returns the finished folders `parent/prefix-NUMBER`, keyed by number, in ascending order."""
    pattern = re.compile(re.escape(prefix) + r"-(\d+)")
    found = {
        int(match[1]): path
        for path in parent.glob(f"{prefix}-*")
        if (match := pattern.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def read_manifest(path: pathlib.Path) -> Facts:
    """Returns the contents of a folder's manifest, after checking every file against it.

    Raises:
        DamagedError: if a file is missing or has changed; the message names the file.
    """
    try:
        text = (path / MANIFEST).read_text()
        facts: Facts = json.loads(text)
        facts.pop("sha256")
        files = dict(facts["files"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path / MANIFEST} cannot be read: {error}") from error
    if text != sealed(facts):
        raise DamagedError(f"{path / MANIFEST} has changed: its checksum does not match")
    for name, expected in files.items():
        try:
            size, found = (path / name).stat().st_size, checksum(path / name)
        except OSError as error:
            raise DamagedError(f"{path / name} cannot be read: {error}") from error
        if (size, found) != (expected["bytes"], expected["sha256"]):
            raise DamagedError(f"{path / name} has changed: its checksum does not match")
    return facts


def manifest_text(path: pathlib.Path) -> str | None:
    """Returns the text of a folder's manifest; None if it cannot be read."""
    try:
        return (path / MANIFEST).read_text(errors="replace")
    except OSError:
        return None


def read_unchecked(path: pathlib.Path) -> Facts:
    """Returns the contents of a folder's manifest; {} if it cannot be read."""
    try:
        facts: Facts = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def checksum(file: pathlib.Path) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal."""
    with file.open("rb") as contents:
        return hashlib.file_digest(contents, "sha256").hexdigest()


def sealed(facts: Facts) -> str:
    """Returns the exact text of a manifest: the facts as JSON, with the SHA-256 of that JSON.

    Example:
        >>> list(json.loads(sealed({"step": 3})))
        ['step', 'sha256']
    """
    seal = hashlib.sha256(json.dumps(facts, indent=1).encode()).hexdigest()
    return json.dumps(facts | {"sha256": seal}, indent=1) + "\n"
