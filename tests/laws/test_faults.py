"""Faults around a run: each ends it with a clear error and leaves the last good checkpoint intact.

Every fault hits the same short run, so that the resumed run has one known result to reach.
"""

import itertools
import os
import re
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from access import folder, untuned
from helpers import Linear, all_copies

from trainer import Action, CheckpointError, Checkpoints, DataError, Divergence, Monitoring

pytestmark = pytest.mark.sampled

TARGET = 12
INTERVAL = 4
FAULT = 6  # the fault occurs after this step
BATCHES = 4  # per epoch, so that every checkpoint falls on the end of an epoch
SLOPES = np.arange(1, 2 * BATCHES + 1, dtype=np.float32) / 64


class Steady(Linear):
    """A run without faults."""

    def __init__(self, model_dir, **arguments):
        """Sets what must be the same in every part of a run."""
        settings = {
            "checkpoints": Checkpoints(interval=INTERVAL),
            "steps_per_loop": 2,
            "verbose": False,
        }
        super().__init__(model_dir=model_dir, **settings | arguments)

    def build_optimizer(self):
        """SGD with momentum, so that there are slots to restore."""
        return keras.optimizers.SGD(0.125, momentum=0.5)


def rows(batches=BATCHES):
    """Example numbers in pairs: `batches` batches of two."""
    return untuned(tf.data.Dataset.range(2 * batches).batch(2))


def examples(numbers):
    """The examples with these numbers; they repeat after an epoch."""
    slope = tf.ensure_shape(tf.gather(SLOPES, numbers % len(SLOPES)), [None])
    return {"x": tf.ones([tf.shape(slope)[0], 1]), "slope": slope}


def bits(trainer):
    """The bytes of every copy of every model and optimizer variable, in order."""
    assert trainer.totals.attempted == TARGET
    return [copy.tobytes() for copies in all_copies(trainer).values() for copy in copies]


def finish(trainer, data=None):
    """Trains to the end and returns the bits."""
    trainer.train(data or rows().map(examples), steps=TARGET)
    return bits(trainer)


def steps_saved(model_dir):
    """The steps of the checkpoints, after checking that all are sound and that no partial one is
    left.
    """
    found = folder.committed(model_dir, "ckpt")
    for step, path in found.items():
        assert folder.read_manifest(path)["step"] == step
    assert sorted(model_dir.glob("ckpt-*")) == sorted(found.values())
    return list(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bits that every resumed run must reach."""
    return b"".join(finish(Steady(tmp_path_factory.mktemp("whole"))))


def assert_resumes(model_dir, step, undisturbed, data=None, trainer=None):
    """Raises unless a new trainer resumes from `step` and reaches the bits of the undisturbed run."""
    begun = []
    trainer = trainer or Steady(model_dir)
    trainer.on_loop_begin = begun.append
    assert b"".join(finish(trainer, data)) == undisturbed
    assert begun[:1] == [step][: TARGET - step]
    assert steps_saved(model_dir)[-1] == TARGET


@pytest.fixture
def mount(tmp_path):
    """Mounts small file systems, where that is permitted."""
    mounted = []

    def of(options):
        path = tmp_path / f"mount_{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"no mount: {error}")
        if done.returncode:
            pytest.skip(f"no tmpfs: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield of
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)  # noqa: S607


def make_room(path):
    """Removes what fills a file system."""
    shutil.rmtree(path / "ballast", ignore_errors=True)


def fill(path, pages_left=0):
    """Fills a file system except for `pages_left` pages."""
    make_room(path)
    (path / "ballast").mkdir()
    system = os.statvfs(path)
    with (path / "ballast" / "0").open("wb", buffering=0) as ballast:
        ballast.write(bytes(max(0, system.f_bavail - pages_left) * system.f_bsize))


def fill_with_files(path, files_left=0):
    """Fills a file system with empty files until it has room for `files_left` more."""
    make_room(path)
    (path / "ballast").mkdir()
    for number in range(os.statvfs(path).f_favail - files_left):
        (path / "ballast" / str(number)).touch()


def error_of(function, *args, **arguments):
    """The CheckpointError that a function raises, or None."""
    try:
        function(*args, **arguments)
    except CheckpointError as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "filled", "last"),
    [("size=512k", fill, {"run"}), ("nr_inodes=64", fill_with_files, {"copies", "run"})],
    ids=["bytes", "files"],
)
def test_a_disk_that_is_full(mount, undisturbed, room, filled, last):
    """A checkpoint that does not fit on the disk raises a CheckpointError, whichever of its files
    fails first, and leaves no file behind. The previous checkpoint is intact, and a run with more
    room resumes from it.
    """
    path = mount(room)

    class Filling(Steady):
        def on_loop_end(self, step):
            if step == FAULT:
                filled(path)

    trainer = Filling(path)
    with pytest.raises(CheckpointError):
        finish(trainer)
    assert steps_saved(path) == [INTERVAL]

    met = set()
    for left in itertools.count(1):
        step = trainer.totals.attempted + 1
        filled(path, left)
        error = error_of(trainer.train, rows().map(examples), steps=step)
        if error is None:
            break
        assert steps_saved(path) == [INTERVAL]
        assert [*path.glob("*.tmp")] == []
        met |= set(re.findall(r"\.tmp/([a-z]+)", str(error)))
    print(f"no room for {', '.join(sorted(met))}")  # noqa: T201
    assert steps_saved(path) == [INTERVAL, step]
    files = {file.name.split(".")[0] for file in (path / f"ckpt-{step}").iterdir()}
    # These come last, into the room that temporary files of the others have left.
    assert files - met == last

    shutil.rmtree(path / f"ckpt-{step}")
    make_room(path)
    assert_resumes(path, INTERVAL, undisturbed)


@pytest.mark.slow
def test_a_log_that_cannot_be_written(tmp_path, undisturbed):
    """The run ends with a CheckpointError and is saved; with the log back, it is resumed."""
    log = tmp_path / "metrics.jsonl"

    class Filling(Steady):
        def on_loop_begin(self, step):
            if step == INTERVAL:
                log.rename(tmp_path / "aside")
                log.symlink_to("/dev/full")

    with pytest.raises(CheckpointError):
        finish(Filling(tmp_path, log_interval=2))
    (tmp_path / "aside").rename(log)

    assert_resumes(tmp_path, FAULT, undisturbed)


def asserting(limit):
    """Data that raises in TensorFlow after `limit` batches."""

    def checked(numbers):
        tf.debugging.assert_less(numbers, 2 * np.int64(limit), message="a row is odd")
        return examples(numbers)

    return rows(3 * BATCHES).map(checked)


def raising(limit):
    """Data that raises in Python after `limit` batches, plus one that is read ahead."""
    counted = itertools.count()

    def checked(numbers):
        if next(counted) > limit:
            raise ValueError("no such record")
        return numbers

    def batch(numbers):
        return examples(tf.ensure_shape(tf.py_function(checked, [numbers], tf.int64), [None]))

    return rows().map(batch)


def said_to_be_endless(limit):
    """Data that ends after `limit` batches although it claims to be infinite."""
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return rows(limit).map(examples).apply(endless)


def read_once(limit):
    """Data from a generator that is empty on a second pass. The first batch, which is read ahead,
    and one full pass are served.
    """
    counted = itertools.count()
    numbers = np.arange(2 * limit).reshape(-1, 2)
    return generated(lambda: numbers if next(counted) < 2 else [])


def generated(generator):
    """Data from a generator."""
    spec = tf.TensorSpec([2], tf.int64)
    return tf.data.Dataset.from_generator(generator, output_signature=spec).map(examples)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("broken", "mended", "data_resume"),
    [
        (asserting, asserting, "exact"),
        (raising, raising, "restart"),
        (raising, raising, "skip"),
        (said_to_be_endless, said_to_be_endless, "exact"),
        (
            read_once,
            lambda limit: generated(lambda: np.arange(2 * limit).reshape(-1, 2)),
            "restart",
        ),
    ],
)
def test_data_that_fail_in_the_middle(tmp_path, undisturbed, broken, mended, data_resume):
    """Data that raises in TensorFlow or in Python, or that ends although it claims to be infinite, is
    a DataError. With the data mended the run resumes. With data_resume="exact" the saved position
    contains the fault, so the run resumes by skipping.
    """
    with pytest.raises(DataError):
        finish(
            Steady(tmp_path, checkpoints=Checkpoints(interval=INTERVAL, data_resume=data_resume)),
            broken(FAULT),
        )
    assert steps_saved(tmp_path) == [INTERVAL]

    trainer = Steady(
        tmp_path,
        checkpoints=Checkpoints(
            interval=INTERVAL, data_resume="skip" if data_resume == "exact" else data_resume
        ),
    )
    assert_resumes(tmp_path, INTERVAL, undisturbed, mended(1000), trainer)


@pytest.mark.slow
def test_what_raises_in_a_model_on_one_replica(tmp_path, mirrored):
    """A model operation that raises on one replica of two ends the run with its own error. The same
    trainer can continue without that batch; a new one resumes from the checkpoint.
    """

    class Checked(Steady):
        def compute_loss(self, batch, training):
            tf.debugging.assert_none_equal(batch["slope"], 15.0 / 64, message="a slope is odd")
            return super().compute_loss(batch, training)

    def more(numbers):
        return {**examples(numbers), "slope": tf.cast(numbers, tf.float32) / 64}

    data = rows(4 * BATCHES).map(more)
    arguments = {"strategy": mirrored(2)}
    whole = b"".join(finish(Steady(tmp_path / "whole", **arguments), data))
    path = tmp_path / "broken"
    trainer = Checked(path, **arguments)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a slope is odd"):
        finish(trainer, data)

    assert steps_saved(path) == [INTERVAL]

    shutil.copytree(path, tmp_path / "copy")
    trainer.on_train_begin = trainer.stop
    assert trainer.train(data, steps=TARGET).checkpoint == str(path / "ckpt-7")
    trainer.on_train_begin = lambda: None
    finish(trainer, data)
    assert folder.read_manifest(path / f"ckpt-{TARGET}")["batches_taken"] == TARGET + 1
    path = tmp_path / "copy"
    healthy = Steady(
        path, checkpoints=Checkpoints(interval=INTERVAL, allow_changes=("loss",)), **arguments
    )
    assert_resumes(path, INTERVAL, whole, data, healthy)


def test_a_run_that_has_diverged_is_not_saved_because_a_hook_raises(tmp_path):
    """A hook that raises does not save a run that has diverged."""

    class Diverging(Steady):
        def on_loop_begin(self, step):
            if step:
                raise ZeroDivisionError

    divergence = Divergence(loss_above=2.5 / 64)
    with pytest.raises(ZeroDivisionError):
        finish(Diverging(tmp_path, monitoring=Monitoring(divergence=divergence)))

    assert steps_saved(tmp_path) == [0]


class Breaking(Steady):
    """Raises at the place `fault` names, at the step `FAULT`."""

    fault = ""

    def raise_at(self, place, step):
        """Raises if `place` is the place of the fault."""
        if (place, step) == (self.fault, FAULT):
            raise ZeroDivisionError(f"in {place}")

    def on_loop_begin(self, step):
        """Raises before an inner loop."""
        self.raise_at("on_loop_begin", step)

    def on_loop_end(self, step):
        """Raises after an inner loop."""
        self.raise_at("on_loop_end", step)


class Counting:
    """An action that counts its calls."""

    def __init__(self):
        """Starts at 0."""
        self.calls = 0

    def __call__(self, trainer):
        """Counts, then raises if the fault is here."""
        self.calls += 1
        trainer.raise_at("an action", trainer.totals.attempted)

    def state_dict(self):
        """Returns the count."""
        return {"calls": self.calls}

    def load_state_dict(self, state):
        """Restores the count."""
        self.calls = state["calls"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["on_loop_begin", "on_loop_end", "an action", "an evaluation"])
def test_what_raises_between_inner_loops(tmp_path, undisturbed, place):
    """A hook, an action or an evaluation that raises ends the run with its own error, and the run is
    saved: a run without the fault resumes from that step.
    """

    def trainer(fault):
        made = Breaking(tmp_path, callbacks=[Action(Counting(), every_steps=2)])
        made.fault = fault
        return made

    evaluated = raising(2 if place == "an evaluation" else 1000)
    evaluation = {"eval_data": evaluated, "eval_interval": FAULT}
    with pytest.raises((ZeroDivisionError, tf.errors.InvalidArgumentError)):
        trainer(place).train(rows().map(examples), steps=TARGET, **evaluation)

    assert steps_saved(tmp_path) == [INTERVAL, FAULT]
    healthy = trainer("")
    assert_resumes(tmp_path, FAULT, undisturbed, trainer=healthy)
    # The action was not called at the step where the evaluation raised.
    assert healthy.callbacks[0].call.calls == (5 if place == "an evaluation" else 6)
