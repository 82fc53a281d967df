"""What a run leaves in its folder, as values to compare: all of it but times and speeds."""

import io
import json
import re
import zipfile

import h5py
import numpy as np
import tensorflow as tf
from helpers import digest

from trainer.checkpoint.folder import DamagedError, committed, read_manifest

OF_TIME = {"examples_per_second", "steps_per_second", "data_wait"}
# Names that differ from run to run, and logs of a start that left no checkpoint: docs/resume.md.
VARYING = re.compile(r"(events\.out\.tfevents|\d{15,}|previous-).*")
IDENTITY = re.compile(r'"shared_object_id": \d+')
CUT_SHORT = re.compile(r".*(\.tmp|\.old)|damaged-.*")


def everything(folder):
    """Returns what a run has left, in groups, each keyed by name."""
    return {
        "lines": lines_of(folder),
        "curves": curves_of(folder),
        "best": {path.name: model_of(path) for path in sorted(folder.glob("best/step-*"))},
        "records": {path.parent.name: arrays_of(path) for path in folder.glob("overflows/*/*.npz")},
        "checkpoints": checkpoints_of(folder),
        "names": dict.fromkeys(sorted(set(names_in(folder)))),
    }


def lines_of(folder):
    """The lines of `metrics.jsonl` about steps and evaluations, keyed by their number."""
    lines = map(parsed, (folder / "metrics.jsonl").read_text().splitlines())
    numbers = [
        without_times(line) for line in lines if line["split"] not in {"run", "end", "failure"}
    ]
    return {f"line {number}": line for number, line in enumerate(numbers)}


def parsed(line):
    """The fields of a line; of half of a line, its text."""
    try:
        return json.loads(line)
    except ValueError:
        return {"split": "torn", "text": line}


def without_times(line):
    """A line without its speeds."""
    return {name: value for name, value in line.items() if name not in OF_TIME}


def curves_of(folder):
    """The scalars of TensorBoard, keyed by curve and step.

    A step that was taken again is there again. Then all its values must be the same, so those that
    differ are kept together.
    """
    found = {}
    for path in sorted(folder.glob("*/events.out.tfevents.*")):
        for record in whole_records(path):
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                name = value.metadata.plugin_data.plugin_name
                if name == "text" or value.tag in OF_TIME:
                    continue
                point = f"{path.parent.name} {value.tag} at {event.step}"
                found.setdefault(point, set()).add(tf.make_ndarray(value.tensor).tobytes().hex())
    return {point: sorted(values) for point, values in found.items()}


def whole_records(path):
    """The records of an event file; a process that died may have left half of one at the end."""
    try:
        for record in tf.data.TFRecordDataset(str(path)):
            yield record.numpy()
    except tf.errors.DataLossError:
        return


def model_of(path):
    """The result of a best model, its configuration and digests of its arrays."""
    facts = json.loads((path / "run.json").read_text())
    found = {"step": facts["step"], "results": facts["results"]}
    with zipfile.ZipFile(path / "model.keras") as archive:
        found["config"] = IDENTITY.sub("", archive.read("config.json").decode())
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            arrays = {}
            file.visititems(
                lambda name, item: (
                    arrays.update({name: digest(item[()])})
                    if isinstance(item, h5py.Dataset)
                    else None
                )
            )
    return found | {"arrays": arrays}


def checkpoints_of(folder):
    """The names of the files in the newest two checkpoints, and why others are damaged.

    Other whole ones may be left: a run that is killed in its last save has no later one that would
    remove them.
    """
    found = {}
    for path in committed(folder, "ckpt").values():
        try:
            found[path.name] = sorted(read_manifest(path)["files"])
        except DamagedError as error:
            return {path.name: str(error)}
    return dict(list(found.items())[-2:])


def arrays_of(path):
    """Digests of the arrays in a record of an overflow."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: digest(arrays[name]) for name in arrays}


def names_in(folder):
    """The names of files and folders, relative to the run's folder."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(("previous-", "ckpt-")):
            yield "/".join("*" if VARYING.fullmatch(part) else part for part in name.split("/"))


def unfinished_in(folder):
    """What a process that was killed would leave, and a run that has ended may not."""
    paths = folder.rglob("*")
    return [path.relative_to(folder).as_posix() for path in paths if CUT_SHORT.match(path.name)]


def place_of_death(folder):
    """Where in its work a run was killed, as far as its folder shows it."""
    log = folder / "metrics.jsonl"
    if log.exists() and log.read_bytes()[-1:] not in (b"\n", b""):
        return "in a line of the log"
    for what in ("best", "overflows"):
        if any(unfinished_in(folder / what)):
            return f"in {what}"
    if any(folder.glob("ckpt-*.*")):
        return "in a save"
    return "elsewhere" if any(folder.glob("ckpt-*")) else "before the first checkpoint"


def differences(expected, found):
    """Returns the names of what differs between two results of `everything`, or two dicts."""
    names = [*expected, *(name for name in found if name not in expected)]
    return [
        name if name in expected and name in found else f"{name} (only in one)"
        for name in names
        if name not in expected or name not in found or expected[name] != found[name]
    ]
