"""Checkpoints, against kills, power failures and a process that reads.

The writer's operations are not written down here. They are recorded from the `CheckpointSaver`
itself, for every disk on which it begins to save or to start again, so a change of the code changes
what is searched. Between any two operations the process may be killed, the power may fail, and a
process that follows the run may read. The steps of that one are modelled: it lists the checkpoints,
and reads a manifest and a file.
"""

import functools
import hashlib
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

import scaling
from proofs.protocols import files
from proofs.protocols.files import Disk, Operation
from proofs.protocols.search import Model
from trainer.base.atomic_files import make_folder
from trainer.checkpoint import folder
from trainer.checkpoint.saver import PREFIX, CheckpointSaver

RUN = "run"  # the run's `model_dir`
SAVES = ((1, 0), (1, 1), (2, 0))  # step, and whether it is saved again
FOREIGN = {"run/notes.tmp": "mine", "run/ckpt-best": "mine", "run/my-ckpt-1.old": "mine"}
NONE = -1
DAMAGED = -2

Program = tuple[Operation, ...]


class Contents:
    """Stands for the variables of a run: one file, whose text tells which save wrote it."""

    differing: tuple[str, ...] = ()

    def __init__(self) -> None:
        """Nothing is read yet."""
        self.text = ""

    def holds(self) -> list[Any]:
        """Returns the variables that are saved: none."""
        return []

    def write(self, target: str) -> None:
        """Writes the file."""
        (pathlib.Path(target) / "data").write_text(self.text)

    def read(self, path: pathlib.Path, **options: Any) -> None:
        """Reads the file."""
        del options
        self.text = (path / "data").read_text()


class Reader(NamedTuple):
    """A process that follows the run; see `CheckpointSaver.follow`."""

    place: str = "waits"  # then "lists", "manifest", "file", perhaps "damaged", and "done"
    left: tuple[int, ...] = ()  # the checkpoints that it may still try, newest first
    newest: int = NONE  # when it listed them
    manifest: str = ""
    least: int = NONE  # the newest checkpoint that was committed when it began
    failed: bool = False


class World(NamedTuple):
    """The disk, the process that writes, and the one that reads."""

    disk: Disk
    alive: int = 0  # the number of processes that write
    program: Program = ()  # what the writer still does in the call that it is in
    calls: tuple[tuple[int, int], ...] = ()  # the saves that follow; the first is being made
    committed: int = NONE  # the newest checkpoint whose saving has returned
    restored: int | None = None  # what a start has just restored; NONE: nothing
    deaths: int = 0
    reader: Reader = Reader()


@functools.cache
def recorded(disk: Disk, call: Callable[[pathlib.Path], Any]) -> tuple[Program, Any]:
    """Returns what a call does to a disk, and what it returns; the real code runs on real files."""
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name).resolve()
        files.write_out(disk, root)
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.FATAL)  # damaged checkpoints are expected here
        try:
            with files.recorded(root) as done:
                result = call(root)
        finally:
            logging.set_verbosity(verbosity)
        return tuple(done), result


def checkpoints(root: pathlib.Path) -> tuple[CheckpointSaver, Contents]:
    """Returns the object that saves and restores, with contents of its own."""
    contents: Any = Contents()
    rule, strategy = scaling.NoLossScale(), tf.distribute.get_strategy()
    saver = CheckpointSaver(root / RUN, 1, contents, {}, rule, strategy, asynchronous=False)
    return saver, contents


def start(root: pathlib.Path) -> int:
    """Starts a run as `train` does, and returns the step from which it continues, or DAMAGED."""
    make_folder(root / RUN)
    saver, contents = checkpoints(root)
    try:
        saver.restore()
    except ValueError:
        return DAMAGED
    step = int(saver.facts.get("step", NONE))
    return step if step == NONE or contents.text.startswith(f"step {step} ") else DAMAGED


@functools.cache
def save(step: int, again: int) -> Callable[[pathlib.Path], None]:
    """Returns a function that saves a step."""

    def call(root: pathlib.Path) -> None:
        saver, contents = checkpoints(root)
        contents.text = f"step {step} saved {again}"
        saver.save(step, {"num_replicas": 1, "loss_scale": ""})

    return call


def first_disk(*, with_folder: bool) -> Disk:
    """Returns a disk with files of somebody else in the run's folder, or an empty one."""
    disk = Disk()
    if with_folder:
        disk = files.performed(disk, ("mkdir", RUN))
        for path, text in FOREIGN.items():
            disk = files.performed(disk, ("create", path))
            disk = files.performed(disk, ("fill", path, text))
            disk = files.performed(disk, ("fsync", path))
        disk = files.performed(files.performed(disk, ("fsync", RUN)), ("fsync", ""))
    return disk


def model(
    *,
    with_folder: bool = True,
    deaths: int = 2,
    power: bool = False,
    reads: bool = False,
    change: Callable[[Program], Program] = lambda program: program,
    locked: bool = True,
    rereads: bool = True,
) -> Model:
    """Returns the model.

    Args:
        with_folder: whether the run's folder is there, with files of somebody else.
        deaths: how many processes die.
        power: whether they die of a power failure; otherwise they are killed.
        reads: whether another process reads meanwhile.
        change: what a fault makes of the operations of a call.
        locked: whether a second process is refused while the first one writes. False is a fault.
        rereads: whether a reader tries a checkpoint again that was replaced while it was read.
            False is a fault.
    """

    def actions(world: World) -> Iterator[tuple[str, World]]:
        if world.calls and (not world.alive or not locked):
            yield started(world, change)
        if world.alive and (world.program or world.calls):
            yield written(world, change)
        if world.alive and world.deaths < deaths:
            yield from died(world, power=power)
        if reads:
            yield from read(world, rereads=rereads)

    claims: dict[str, Callable[[World], bool]] = {
        "a start finds a whole checkpoint, as new as the last one committed": lambda world: (
            world.restored is None or world.restored >= world.committed
        ),
        "two processes never both write": lambda world: world.alive < 2,
        "nobody else's file is touched": lambda world: (
            not with_folder or FOREIGN.items() <= texts(world.disk).items()
        ),
        "a start leaves nothing unfinished": lambda world: (
            world.restored is None or not unfinished(world.disk)
        ),
        "a reader finds a whole checkpoint, as new as the last one committed": lambda world: (
            not world.reader.failed
        ),
    }
    first = World(first_disk(with_folder=with_folder), calls=SAVES)
    return Model([first], actions, claims, lambda world: not world.calls)


def texts(disk: Disk) -> dict[str, str]:
    """Returns the texts of all files by their paths."""
    found = files.paths(disk).items()
    return {path: node.text for path, node in found if isinstance(node, files.File)}


def unfinished(disk: Disk) -> list[str]:
    """Returns the leftovers of checkpoints."""
    known = [path for path in files.paths(disk) if path.startswith(f"{RUN}/{PREFIX}-")]
    return [path for path in known if path.endswith((".tmp", ".old"))]


def started(world: World, change: Callable[[Program], Program]) -> tuple[str, World]:
    """Returns the start of a process."""
    if world.alive:
        return "a second process starts, and writes too", world._replace(alive=2)
    program, step = recorded(world.disk, start)
    ends = (("restored", str(step)),)
    begun = world._replace(alive=1, program=change(program) + ends)
    return "a process starts", begun


def written(world: World, change: Callable[[Program], Program]) -> tuple[str, World]:
    """Returns the next operation of the process that writes."""
    if not world.program:
        step, again = world.calls[0]
        program = change(recorded(world.disk, save(step, again))[0])
        world = world._replace(program=(*program, ("committed", str(step))), restored=None)
    operation, *rest = world.program
    after = world._replace(program=tuple(rest))
    what, *places = operation
    if what == "restored":
        step = int(places[0])
        calls = tuple(each for each in SAVES if each[0] > step)
        otherwise = "no checkpoint" if step == NONE else "damaged checkpoints only"
        told = f"it continues from ckpt-{step}" if step >= 0 else f"it finds {otherwise}"
        return told, after._replace(restored=step, calls=calls)
    if what == "committed":
        committed = max(int(places[0]), world.committed)
        told = f"the saving of ckpt-{places[0]} returns"
        return told, after._replace(committed=committed, calls=world.calls[1:])
    return told_of(operation), after._replace(disk=files.performed(world.disk, operation))


VERBS = {"mkdir": "makes", "fsync": "flushes", "rename": "renames", "unlink": "removes"}
VERBS |= {"rmdir": "removes", "create": "creates", "fill": "fills", "exchange": "exchanges"}


def told_of(operation: Operation) -> str:
    """Returns a sentence about an operation."""
    what, *places = operation
    known = places[:1] if what == "fill" else places
    return f"the writer {VERBS[what]} {' and '.join(known) or 'the folder above'}"


def died(world: World, *, power: bool) -> Iterator[tuple[str, World]]:
    """Yields what a death leaves."""
    dead = world._replace(alive=0, program=(), deaths=world.deaths + 1, restored=None)
    if not power:
        yield "the process is killed", dead
        return
    for disk in files.after_power_failure(world.disk):
        left = [path for path in files.paths(disk) if path.startswith(f"{RUN}/{PREFIX}-")]
        yield f"the power fails; left: {', '.join(left) or 'nothing'}", dead._replace(disk=disk)


def read(world: World, *, rereads: bool) -> Iterator[tuple[str, World]]:
    """Yields the next step of the process that reads; see `CheckpointSaver.follow`."""
    reader, known = world.reader, texts(world.disk)

    def now(told: str, **changes: Any) -> tuple[str, World]:
        return f"the reader {told}", world._replace(reader=reader._replace(**changes))

    step, *others = reader.left or (NONE,)
    path = f"{RUN}/{PREFIX}-{step}"
    manifest = known.get(f"{path}/{folder.MANIFEST}", "")
    if reader.place == "waits" and world.committed >= 0:
        yield now("begins", place="lists", least=world.committed)
    elif reader.place == "lists":
        found = listed(world.disk)
        if not found or reader.newest == found[0]:  # it has failed, and there is no newer one
            yield now("gives up", place="done", failed=True)
        else:
            told = f"lists {', '.join(f'ckpt-{each}' for each in found)}"
            yield now(told, place="manifest", left=found, newest=found[0])
    elif reader.place == "manifest":
        yield now(f"reads the manifest of ckpt-{step}", place="file", manifest=manifest)
    elif reader.place == "file" and fits(reader.manifest, known.get(f"{path}/data")):
        told = f"restores ckpt-{step}"
        yield now(told, place="done", manifest="", failed=step < reader.least)
    elif reader.place == "file":
        yield now(f"finds ckpt-{step} damaged", place="damaged")
    elif reader.place == "damaged" and rereads and manifest != reader.manifest:
        yield now(f"tries ckpt-{step} again, which has changed", place="manifest")
    elif reader.place == "damaged":
        place = "manifest" if others else "lists"
        yield now(f"leaves ckpt-{step}", place=place, left=tuple(others), manifest="")


def fits(manifest: str, text: str | None) -> bool:
    """Returns whether a file is the one that a manifest describes."""
    if not manifest or text is None:
        return False
    wanted = json.loads(manifest)["files"]["data"]["sha256"]
    return bool(hashlib.sha256(text.encode()).hexdigest() == wanted)


def listed(disk: Disk) -> tuple[int, ...]:
    """Returns the steps of the checkpoints on a disk, newest first."""
    pattern = re.compile(rf"{RUN}/{PREFIX}-(\d+)")
    matches = [pattern.fullmatch(path) for path in files.paths(disk)]
    return tuple(sorted((int(match[1]) for match in matches if match), reverse=True))


def never_flushes(program: Program) -> Program:
    """Returns a program without its flushes: a fault."""
    return tuple(operation for operation in program if operation[0] != "fsync")


def publishes_first(program: Program) -> Program:
    """Returns a program that gives a checkpoint its name before it is complete: a fault."""
    moves = [each for each in program if each[0] == "rename" and each[1].endswith(".tmp")]
    begins = [at for at, each in enumerate(program) if each[0] == "mkdir"]
    if not moves or not begins:
        return program
    moved = [
        tuple(place.replace(*moves[0][1:3]) for place in each) if at > begins[-1] else each
        for at, each in enumerate(program)
        if each != moves[0]
    ]
    return (*moved[: begins[-1] + 1], moves[0], *moved[begins[-1] + 1 :])


def removes_first(program: Program) -> Program:
    """Returns a program that removes the checkpoint that it replaces beforehand: a fault."""
    found = [at for at, each in enumerate(program) if each[0] == "exchange"]
    if not found:
        return program
    _, new, old = program[found[0]]
    removed = (("unlink", f"{old}/data"), ("unlink", f"{old}/run.json"), ("rmdir", old))
    kept = [each for each in program[found[0] + 1 :] if not each[1].startswith(new)]
    return (*program[: found[0]], *removed, ("rename", new, old), *kept)


BOUNDS: dict[str, Callable[[], Model]] = {
    "3 saves, killed twice": lambda: model(deaths=2),
    "3 saves, killed once, a reader": lambda: model(deaths=1, reads=True),
    "3 saves, killed twice, a reader": lambda: model(deaths=2, reads=True),
    "3 saves, the power fails twice": lambda: model(deaths=2, power=True),
    "3 saves in a new folder, the power fails once": lambda: model(
        deaths=1, power=True, with_folder=False
    ),
}
FAULTS: dict[str, Callable[[], Model]] = {
    "nothing is flushed": lambda: model(deaths=1, power=True, change=never_flushes),
    "the name comes first": lambda: model(deaths=1, change=publishes_first),
    "the old one is removed first": lambda: model(deaths=1, change=removes_first),
    "no lock": lambda: model(deaths=0, locked=False),
    "a reader does not look again": lambda: model(deaths=0, reads=True, rereads=False),
}
