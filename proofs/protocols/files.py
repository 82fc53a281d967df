"""Files as a crash leaves them: what a program does to a folder, and what is left of it.

`recorded` notes each operation of a real program on the files below a folder. A `Disk` is what
these operations lead to, with what is known about a power failure:

- What `fsync` has been called for is kept: a file's contents, or a folder's entries.
- The entries of a folder are kept up to some operation since its last `fsync`, in order, as file
  systems with a journal do. Folders do not wait for each other.
- The contents of a file without `fsync` are kept or lost.
"""

import builtins
import contextlib
import io
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from trainer.base import atomic_files

Operation = tuple[str, ...]  # what, and where: paths relative to the folder
Entries = tuple[tuple[str, int], ...]  # name and number of what a folder holds, sorted


class File(NamedTuple):
    """A file."""

    text: str
    flushed: bool


class Folder(NamedTuple):
    """A folder."""

    entries: Entries
    flushed: Entries  # at its last `fsync`
    since: tuple[Entries, ...]  # after each operation since then


class Disk(NamedTuple):
    """Files and folders by number; 0 is the folder that holds everything."""

    nodes: tuple[File | Folder, ...] = (Folder((), (), ()),)


class Recorder:
    """Notes the operations on files below a folder.

    A file that is written counts as two operations: it is created empty, and then filled.
    """

    def __init__(self, root: pathlib.Path) -> None:
        """Nothing is noted yet."""
        self.done: list[Operation] = []
        self._root = root
        self._filling: list[str] = []
        self._fsync, self._open = os.fsync, io.open

    def note(self, what: str, *places: str | None) -> None:
        """Notes an operation, unless it is about something outside of the folder."""
        self.finish()
        if None not in places:
            self.done.append((what, *map(str, places)))

    def finish(self) -> None:
        """Notes what has been written into the files that were created."""
        filled = [("fill", place, (self._root / place).read_text()) for place in self._filling]
        self._filling.clear()
        self.done += filled

    def noting(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does the same, and is noted if it does not fail."""

        def call(path: Any, *rest: Any, **named: Any) -> Any:
            self.finish()  # before the file may have another name
            others = rest if what in {"rename", "exchange"} else ()
            places = [self._place(path, named.get("dir_fd")), *map(self._place, others)]
            result = function(path, *rest, **named)
            if result is not False:
                self.note(what, *places)
            return result

        return call

    def fsync(self, handle: int) -> None:
        """Does what `os.fsync` does."""
        self.note("fsync", self._place("", handle))
        self._fsync(handle)

    def open(self, path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        """Does what `open` does."""
        file = self._open(path, mode, *rest, **named)
        place = None if isinstance(path, int) else self._place(path)
        unnamed = place is not None and (self._root / place).is_dir()  # O_TMPFILE
        if set(mode) & set("wxa") and place and not unnamed:
            self.note("create", place)
            self._filling.append(place)
        return file

    def _place(self, path: Any, handle: int | None = None) -> str | None:
        """Returns a path relative to the folder; None if it leads elsewhere."""
        if handle is not None:
            path = pathlib.Path(f"/proc/self/fd/{handle}").readlink() / path
        full = pathlib.Path(os.path.abspath(path))  # noqa: PTH100  # `resolve` would follow links
        if not full.is_relative_to(self._root):
            return None
        return full.relative_to(self._root).as_posix().removeprefix(".")


@contextlib.contextmanager
def recorded(root: pathlib.Path) -> Iterator[list[Operation]]:
    """Context manager: notes the operations on files below a folder."""
    recorder = Recorder(root)
    names = {"mkdir": "mkdir", "rename": "rename", "replace": "rename", "unlink": "unlink"}
    names |= {"remove": "unlink", "rmdir": "rmdir"}
    patches = [
        mock.patch.object(os, name, recorder.noting(what, getattr(os, name)))
        for name, what in names.items()
    ]
    exchange = recorder.noting("exchange", atomic_files.exchange)
    patches.append(mock.patch.object(atomic_files, "exchange", exchange))
    patches.append(mock.patch.object(os, "fsync", recorder.fsync))
    patches += [mock.patch.object(module, "open", recorder.open) for module in (io, builtins)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield recorder.done
        recorder.finish()


def performed(disk: Disk, operation: Operation) -> Disk:
    """Returns the disk after an operation."""
    what, path, *rest = operation
    nodes = list(disk.nodes)
    if what in {"fill", "fsync"}:
        number = found(disk, path)
        node = nodes[number]
        if isinstance(node, Folder):
            nodes[number] = Folder(node.entries, node.entries, ())
        else:
            nodes[number] = File(rest[0], flushed=False) if rest else node._replace(flushed=True)
        return tidy(nodes)
    above, _, name = path.rpartition("/")
    number = found(disk, above)
    other = rest[0].rpartition("/")[2] if rest else ""
    now = changed(dict(folder_of(nodes[number]).entries), what, name, other, new=len(nodes))
    if what in {"mkdir", "create"}:
        nodes.append(Folder((), (), ()) if what == "mkdir" else File("", flushed=False))
    parent = folder_of(nodes[number])
    nodes[number] = Folder(now, parent.flushed, (*parent.since, now))
    return tidy(nodes)


def changed(entries: dict[str, int], what: str, name: str, other: str, *, new: int) -> Entries:
    """Returns a folder's entries after an operation on one of its names.

    Args:
        entries: the entries before.
        what: the operation.
        name: the name.
        other: the other name of a rename or an exchange, in the same folder.
        new: the number of what is created.
    """
    if what in {"mkdir", "create"}:
        entries[name] = new
    elif what == "exchange":
        entries[name], entries[other] = entries[other], entries[name]
    else:
        moved = entries.pop(name)  # also of "unlink" and "rmdir"
        if what == "rename":
            entries[other] = moved
    return tuple(sorted(entries.items()))


def folder_of(node: File | Folder) -> Folder:
    """Returns a node that is a folder."""
    if isinstance(node, File):
        raise NotADirectoryError(node)
    return node


def found(disk: Disk, path: str) -> int:
    """Returns the number of what is at a path; KeyError if nothing is."""
    number = 0
    for name in path.split("/") if path else []:
        number = dict(folder_of(disk.nodes[number]).entries)[name]
    return number


def tidy(nodes: list[File | Folder]) -> Disk:
    """Returns a disk without what nobody can reach, and with numbers that depend on that alone."""
    numbers = {0: 0}
    waiting = [0]
    while waiting:
        node = nodes[waiting.pop(0)]
        for entries in (
            (node.entries, node.flushed, *node.since) if isinstance(node, Folder) else ()
        ):
            for _, number in entries:
                if number not in numbers:
                    numbers[number] = len(numbers)
                    waiting.append(number)

    def renumbered(entries: Entries) -> Entries:
        return tuple((name, numbers[number]) for name, number in entries)

    return Disk(
        tuple(
            node
            if isinstance(node, File)
            else Folder(
                renumbered(node.entries),
                renumbered(node.flushed),
                tuple(renumbered(each) for each in node.since),
            )
            for node in (nodes[number] for number in numbers)
        )
    )


def after_power_failure(disk: Disk) -> Iterator[Disk]:
    """Yields the disks that a power failure can leave; see the top of this file."""
    choices: list[list[File | Folder]] = []
    for node in disk.nodes:
        if isinstance(node, Folder):
            kept = dict.fromkeys([node.flushed, *node.since])
            choices.append([Folder(entries, entries, ()) for entries in kept])
        else:
            texts = [node.text] if node.flushed else dict.fromkeys([node.text, ""])
            choices.append([File(text, flushed=True) for text in texts])
    yield from dict.fromkeys(tidy(list(nodes)) for nodes in itertools.product(*choices))


def write_out(disk: Disk, root: pathlib.Path) -> None:
    """Writes the files and folders of a disk into an empty folder."""
    for path, node in paths(disk).items():
        if isinstance(node, Folder):
            (root / path).mkdir()
        else:
            (root / path).write_text(node.text)


def paths(disk: Disk) -> dict[str, File | Folder]:
    """Returns everything on a disk by its path, folders before what is in them."""
    known: dict[str, File | Folder] = {}

    def walk(number: int, prefix: str) -> None:
        node = disk.nodes[number]
        for name, inner in node.entries if isinstance(node, Folder) else ():
            known[prefix + name] = disk.nodes[inner]
            walk(inner, f"{prefix}{name}/")

    walk(0, "")
    return known
