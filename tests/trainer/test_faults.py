"""What goes wrong around a run: each fault ends it clearly, and the last good checkpoint is intact.

Every fault meets the same short run, so that there is one result to come to when the fault is
mended and the run taken up.
"""

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, all_copies

from trainer import Action
from trainer.checkpoint import CheckpointError, folder
from trainer.checkpoint import saver as saver_module
from trainer.training import DataError

TARGET = 12
INTERVAL = 4
FAULT = 6  # the step after which it goes wrong
BATCHES = 4  # an epoch, so that every checkpoint stands at the end of one
SLOPES = np.arange(1, 2 * BATCHES + 1, dtype=np.float32) / 64


class Steady(Linear):
    """A run that nothing disturbs."""

    def __init__(self, model_dir, **arguments):
        """With all that has to be the same in every part of a run."""
        settings = {"checkpoint_interval": INTERVAL, "steps_per_loop": 2, "verbose": False}
        super().__init__(model_dir=model_dir, **settings | arguments)

    def build_optimizer(self):
        """With momentum, which is to be kept, too."""
        return keras.optimizers.SGD(0.125, momentum=0.5)


def rows(batches=BATCHES):
    """The numbers of examples, by twos; `batches` of them."""
    return tf.data.Dataset.range(2 * batches).batch(2)


def examples(numbers):
    """The examples of these numbers, which repeat after an epoch."""
    slope = tf.ensure_shape(tf.gather(SLOPES, numbers % len(SLOPES)), [None])
    return {"x": tf.ones([tf.shape(slope)[0], 1]), "slope": slope}


def bits(trainer):
    """Every copy of every variable of model and optimizer, in their order."""
    assert trainer.totals.attempted == TARGET
    return [copy.tobytes() for copies in all_copies(trainer).values() for copy in copies]


def finish(trainer, data=None):
    """Trains to the end; returns the bits."""
    trainer.train(data or rows().map(examples), steps=TARGET)
    return bits(trainer)


def steps_saved(model_dir):
    """The steps of the checkpoints, all of which are sound; there is nothing half written."""
    found = folder.committed(model_dir, "ckpt")
    for step, path in found.items():
        assert folder.read_manifest(path)["step"] == step
    assert sorted(model_dir.glob("ckpt-*")) == sorted(found.values())
    return list(found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing has disturbed; not to be written to."""
    path = tmp_path_factory.mktemp("whole")
    trainer = Steady(path)
    (path / "bits").write_bytes(b"".join(finish(trainer)))
    return path


@pytest.fixture(scope="module")
def undisturbed(whole):
    """The bits that every run is to come to."""
    return (whole / "bits").read_bytes()


def assert_taken_up(model_dir, step, undisturbed, data=None, trainer=None):
    """Raises unless a new trainer goes on from a step, and comes to the bits of the whole run."""
    begun = []
    trainer = trainer or Steady(model_dir)
    trainer.on_loop_begin = begun.append
    assert b"".join(finish(trainer, data)) == undisturbed
    assert begun[:1] == [step][: TARGET - step]
    assert steps_saved(model_dir)[-1] == TARGET


@pytest.fixture
def mount(tmp_path):
    """Mounts small file systems of their own, where that is permitted."""
    mounted = []

    def of(options):
        path = tmp_path / f"mount_{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S607
        except OSError as error:
            pytest.skip(f"no mount: {error}")
        if done.returncode:
            pytest.skip(f"no tmpfs: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield of
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)  # noqa: S607


def fill(path, pages_left=0):
    """Fills a file system, but for so many pages."""
    (path / "ballast").unlink(missing_ok=True)
    system = os.statvfs(path)
    with (path / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(max(0, system.f_bavail - pages_left) * system.f_bsize))


def no_room(path, step, file, operation):
    """What is said when there is no room for one of a checkpoint's files."""
    device = "device_/job:localhost/replica:0/task:0/device:CPU:0"
    return (
        f"`model_dir` must have room for a checkpoint and let it be written; got {path}/ckpt-{step}: "
        f"{{{{function_node __wrapped__{operation}_{device}}}}} {path}/ckpt-{step}.tmp/{file}; "
        f"No space left on device [Op:{operation.split('_')[0]}]. The last good checkpoint is "
        f"{path}/ckpt-{INTERVAL}. Make room and run the same command again."
    )


def message_of(error):
    """An error's message, without the numbers that TensorFlow draws."""
    return re.sub(r"tempstate\d+", "tempstateN", str(error))


def test_a_disk_that_is_full(mount, undisturbed):
    """A checkpoint for which there is no room is a CheckpointError, whichever of its files is the
    first that has none; the one before it is intact, and a run with more room goes on from there.
    """
    path = mount("size=512k")

    class Filling(Steady):
        def on_loop_end(self, step):
            if step == FAULT:
                fill(path)

    trainer = Filling(path)
    with pytest.raises(CheckpointError) as error:
        finish(trainer)
    part = "part-00000-of-00001.data-00000-of-00001.tempstateN"
    assert message_of(error.value) == no_room(path, 8, f"data_temp/{part}", "SaveV2_dtypes_2")
    assert steps_saved(path) == [INTERVAL]

    met = set()
    for pages in range(1, 11):
        step = trainer.totals.attempted + 1
        fill(path, pages)
        try:
            trainer.train(rows().map(examples), steps=step)
        except CheckpointError as met_error:
            found = re.search(r"\.tmp/(\w+?)(_temp|\.)", str(met_error))
            met.add(found[1])
            assert steps_saved(path) == [INTERVAL]
        else:
            assert folder.read_manifest(path / f"ckpt-{step}")["step"] == step
            shutil.rmtree(path / f"ckpt-{step}")
    print(f"no room for: {', '.join(sorted(met))}")  # noqa: T201
    assert met == {"data", "copies", "scale", "variables"}

    (path / "ballast").unlink()
    assert_taken_up(path, INTERVAL, undisturbed)


def causes(error):
    """An error, and what was raised before it, in turn."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("room", ["for nothing", "for a checkpoint"])
def test_a_disk_on_which_the_log_has_no_room(mount, tmp_path, undisturbed, room):
    """Numbers and curves that cannot be written end the run, too: with a CheckpointError, and saved if
    a checkpoint can be.
    """
    path = mount("size=512k") if room == "for nothing" else tmp_path
    log = path / "metrics.jsonl"

    class Filling(Steady):
        def on_loop_begin(self, step):
            if step == INTERVAL and room == "for nothing":
                fill(path)
            elif step == INTERVAL:
                log.rename(path / "aside")
                log.symlink_to("/dev/full")

    trainer = Filling(path, log_interval=1)
    with pytest.raises(CheckpointError) as raised:
        trainer.train(rows().map(examples), steps=1000 if room == "for nothing" else TARGET)
    error = raised.value
    if room == "for nothing":
        files = "data_temp/part-00000-of-00001.data-00000-of-00001.tempstateN"
        step = trainer.totals.attempted
        assert message_of(error) == no_room(path, step, files, "SaveV2_dtypes_2")
        [error] = [one for one in causes(error) if "for the log" in str(one)]
        reason = r"/\S+; No space left on device"
    else:
        assert error.__notes__ == [f"raised at step {FAULT}, which is saved"]
        reason = r"\[Errno 28\] No space left on device"
    assert re.fullmatch(
        "`model_dir` must have room for the log and let it be written; got "
        f"{re.escape(str(path))}: {reason}\\. What a run has done stands there\\. Make room and run the "
        "same command again\\.",
        str(error),
    )

    if room == "for nothing":
        (path / "ballast").unlink()
    else:
        (path / "aside").rename(log)
    last = {"for nothing": INTERVAL, "for a checkpoint": FAULT}[room]
    assert_taken_up(path, last, undisturbed)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("a file", "File exists"),
        ("under a file", "Not a directory"),
        ("under /proc", "No such file or directory"),
        ("on a disk that is read-only", "Read-only file system"),
        ("on a disk that is full", "No space left on device"),
    ],
)
def test_a_model_dir_that_cannot_be_written_to(request, tmp_path, place, reason):
    """It is refused before anything is read or built."""
    path = tmp_path / "file"
    path.touch()
    if place == "under a file":
        path /= "runs"
    elif place == "under /proc":
        path = pathlib.Path("/proc/halfstep/runs")
    elif place == "on a disk that is read-only":
        path = request.getfixturevalue("mount")("size=64k,ro")
    elif place == "on a disk that is full":
        path = request.getfixturevalue("mount")("size=64k")
        fill(path)

    class Unbuilt(Steady):
        def build_model(self):
            raise AssertionError("it was built")

    with pytest.raises(ValueError, match="written") as error:
        Unbuilt(path).train(lambda context: pytest.fail(f"read for {context}"), steps=TARGET)
    assert str(error.value) == (
        f"`model_dir` must be a directory that can be written to; got '{path}': {reason}. Checkpoints "
        "and logs go there. Use another one, or None to write nothing."
    )


def asserting(limit):
    """Data that raise in TensorFlow at one example, in no other process than in this one."""

    def checked(numbers):
        tf.debugging.assert_less(numbers, tf.constant(limit, tf.int64), message="a row is odd")
        return examples(numbers)

    return rows(3 * BATCHES).map(checked)


def raising(limit):
    """Data that raise in Python, at the batch after so many."""
    counted = itertools.count()

    def checked(numbers):
        if next(counted) >= limit:
            raise FileNotFoundError("no such record")
        return numbers

    def batch(numbers):
        return examples(tf.ensure_shape(tf.py_function(checked, [numbers], tf.int64), [None]))

    return rows().map(batch)


def said_to_be_endless(batches):
    """Data that end after so many batches, and say that they do not."""
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return rows(batches).map(examples).apply(endless)


def read_once(batches):
    """Data out of something that can be read once."""
    numbers = iter(np.arange(2 * batches).reshape(-1, 2))
    spec = tf.TensorSpec([2], tf.int64)
    return tf.data.Dataset.from_generator(lambda: numbers, output_signature=spec).map(examples)


IN_USER_FUNCTION = (
    "Error in user-defined function passed to MapDataset:N transformation with iterator: "
    "Iterator::Root::Prefetch::ForeverRepeat[0]::"
)
RAISES = (
    "`train_data` must not raise; got InvalidArgumentError after step 6 of 12: {reason}. The last "
    "checkpoint is {last}. Mend the data, or leave out what it cannot read with "
    "dataset.ignore_errors()."
)
ENDS = (
    "`train_data` must not end before the run does; got its end after step 6 of 12. It says that it "
    "has none, or a further pass found nothing. The last checkpoint is {last}. Leave out "
    "assert_cardinality(), or let a generator begin anew each time."
)


@pytest.mark.parametrize(
    ("make", "fault", "healthy", "way", "message", "reason"),
    [
        (
            asserting,
            2 * FAULT,
            1000,
            "exact",
            RAISES,
            IN_USER_FUNCTION
            + "ParallelMapV2: assertion failed: [a row is odd] [Condition x < y did not hold "
            "element-wise:] [x (args_0:0) = ] [12 13] [y (assert_less/y:0) = ] [12]",
        ),
        # The first batch is read once beforehand, to see what it is like.
        (
            raising,
            FAULT + 1,
            1000,
            "restart",
            RAISES,
            IN_USER_FUNCTION + "Map: FileNotFoundError: no such record",
        ),
        (raising, FAULT + 1, 1000, "skip", RAISES, IN_USER_FUNCTION + "Map: FileNotFoundError: no such record"),
        (said_to_be_endless, FAULT, 1000, "exact", ENDS, ""),
        (read_once, FAULT + 1, 1000, "restart", ENDS, ""),
    ],
)
def test_data_that_fail_in_the_middle(
    tmp_path, undisturbed, make, fault, healthy, way, message, reason
):
    """Whether they raise in TensorFlow or in Python, or end though they say that they do not: it is a
    DataError that says what, when, and where the last checkpoint is.
    """
    with pytest.raises(DataError) as error:
        finish(Steady(tmp_path, data_resume=way), make(fault))
    assert re.sub(r"Dataset:\d+", "Dataset:N", str(error.value)) == message.format(
        reason=reason, last=tmp_path / f"ckpt-{INTERVAL}"
    )
    assert steps_saved(tmp_path) == [INTERVAL]

    trainer = Steady(tmp_path, data_resume=way)
    assert_taken_up(tmp_path, INTERVAL, undisturbed, make(healthy), trainer)
