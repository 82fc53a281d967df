"""L12: a resumed run sees the same batches as an uninterrupted one, or its pipeline is refused."""

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear

from trainer import Checkpoints
from trainer.checkpoint import folder
from trainer.data.batches import batches
from trainer.data.iterator_state import DataPosition, description, pipeline_graph

pytestmark = pytest.mark.sampled

ROOT = pathlib.Path(__file__).parents[3]
AUTOTUNE = tf.data.AUTOTUNE
Dataset = tf.data.Dataset
PASS = 3  # batches in a pass of most pipelines


def shuffled():
    """Twelve numbers in a new order in each pass."""
    return Dataset.range(12).shuffle(12, seed=1)


def one_more(number):
    """A function for `map`."""
    return number + 1


def text_files(folder_path):
    """Writes two text files with one number per line."""
    for file in range(2):
        lines = "\n".join(str(100 * file + line) for line in range(7))
        (folder_path / f"numbers-{file}").write_text(lines)
    return str(folder_path / "numbers-*")


def read_lines(path):
    """The numbers in a file."""
    lines = tf.data.TextLineDataset(path)
    return lines.map(lambda line: tf.strings.to_number(line, tf.int64))


def table():
    """A lookup table."""
    numbers = tf.range(12, dtype=tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(numbers, 3 * numbers), -1)


# Functions of a pattern of files to read. The first four also run in another process.
PIPELINES = {
    "shuffle, batch, map": lambda _: shuffled().batch(4).map(one_more),
    "shuffle, batch, prefetch": lambda _: shuffled().batch(4).prefetch(AUTOTUNE),
    "parallel map": lambda _: (
        shuffled().map(one_more, num_parallel_calls=AUTOTUNE).batch(4).prefetch(AUTOTUNE)
    ),
    "interleaved files": lambda files: (
        Dataset.list_files(files, shuffle=False)
        .interleave(read_lines, cycle_length=2, num_parallel_calls=2)
        .shuffle(5, seed=2)
        .batch(4)
        .prefetch(AUTOTUNE)
    ),
    "plain": lambda _: Dataset.range(12).batch(4),
    "small buffer": lambda _: (
        Dataset.range(11).shuffle(5, seed=1).batch(4).map(one_more).prefetch(2)
    ),
    "one order": lambda _: (
        Dataset.range(12).shuffle(12, seed=1, reshuffle_each_iteration=False).batch(4).prefetch(2)
    ),
    "shuffle of batches": lambda _: Dataset.range(24).batch(4).shuffle(3, seed=1).prefetch(2),
    "repeat, batch": lambda _: shuffled().repeat().batch(5).map(one_more).prefetch(AUTOTUNE),
    "batch, repeat": lambda _: shuffled().batch(4).map(one_more).repeat().prefetch(AUTOTUNE),
    "repeat twice": lambda _: shuffled().batch(4).repeat(2).prefetch(2),
    "flat map": lambda _: (
        Dataset.range(4)
        .shuffle(4, seed=1)
        .flat_map(lambda number: Dataset.range(number * 10, number * 10 + 3))
        .batch(4)
        .prefetch(2)
    ),
    "cache": lambda _: Dataset.range(12).cache().shuffle(12, seed=1).batch(4).prefetch(2),
    "filter": lambda _: shuffled().filter(lambda number: number % 3 > 0).batch(3).prefetch(2),
    "sample": lambda _: (
        Dataset.sample_from_datasets(
            [shuffled().repeat(), Dataset.range(50, 55).repeat()], [0.5, 0.5], seed=3
        )
        .batch(4)
        .prefetch(2)
    ),
    "choose": lambda _: (
        Dataset.choose_from_datasets(
            [shuffled(), Dataset.range(50, 55)],
            Dataset.range(2).repeat(),
            stop_on_empty_dataset=True,
        )
        .batch(4)
        .prefetch(2)
    ),
    "two shuffles": lambda _: (
        Dataset.range(12)
        .shuffle(12, seed=1, reshuffle_each_iteration=False)
        .map(one_more)
        .shuffle(4, seed=2)
        .batch(4)
        .prefetch(2)
    ),
    "zip": lambda _: Dataset.zip(shuffled(), Dataset.range(12).shuffle(12, seed=2)).batch(4),
    "random numbers": lambda _: (
        Dataset.zip(shuffled(), Dataset.random(seed=3, rerandomize_each_iteration=True))
        .map(lambda number, seed: (number, seed % 100))
        .batch(4)
        .prefetch(2)
    ),
    "ragged": lambda _: (
        shuffled().map(lambda number: tf.range(number % 4)).ragged_batch(4).prefetch(2)
    ),
    "lengths": lambda _: (
        shuffled()
        .map(lambda number: tf.range(number % 7))
        .bucket_by_sequence_length(tf.size, [3, 5], [3, 3, 3])
        .prefetch(2)
    ),
    "look up": lambda _: shuffled().map(table().lookup).batch(4).prefetch(2),
    "concatenate": lambda _: shuffled().concatenate(Dataset.range(20, 25)).batch(4).prefetch(2),
    "unbatch": lambda _: shuffled().batch(6).unbatch().batch(4).prefetch(2),
}
BETWEEN_PROCESSES = list(PIPELINES)[:4]


@pytest.fixture
def files(tmp_path):
    """The pattern of the files that a pipeline may read."""
    return text_files(tmp_path)


def begin(dataset, resume_mode="exact"):
    """The position at the start of a run, after the first batch has been read in advance."""
    return DataPosition(batches(dataset, "train_data", tf.distribute.get_strategy()), resume_mode)


def take(position, count):
    """The next batches, as lists."""
    found = [next(position.iterator) for _ in range(count)]
    position.taken += count
    return [
        [
            leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf.numpy().tolist()
            for leaf in tf.nest.flatten(batch)
        ]
        for batch in found
    ]


def write(position, path):
    """Saves a position in a new folder and returns the folder."""
    path.mkdir()
    position.write(str(path))
    return path


@pytest.mark.parametrize("name", list(PIPELINES))
def test_a_position_is_exact(tmp_path, files, name, full):
    """L12: after any number of batches, even when a stage has read ahead to the end of the pass, a
    newly built pipeline continues with the same batches, in later passes too.
    """
    make = PIPELINES[name]
    for taken in range(4 * PASS) if full else (1, PASS - 1, PASS, PASS + 1, 3 * PASS + 1):
        before = begin(make(files))
        before.check_savable()
        take(before, taken)
        path = write(before, tmp_path / f"after-{taken}")
        expected = take(before, 3 * PASS)

        after = begin(make(files))
        after.read(path, taken)
        assert take(after, 3 * PASS) == expected, f"after {taken} batches"
        assert after.taken == taken + 3 * PASS


def test_saving_changes_nothing(tmp_path, files):
    """Saving a position, or returning to one, does not change the batches."""
    make = PIPELINES["shuffle, batch, map"]
    undisturbed = take(begin(make(files)), 4 * PASS)
    saving = begin(make(files))
    seen = []
    for taken in range(2 * PASS):
        write(saving, tmp_path / f"after-{taken}")
        seen += take(saving, 1)
    assert seen == undisturbed[: 2 * PASS]

    saving.read(tmp_path / "after-1", 1)
    assert take(saving, 3 * PASS) == undisturbed[1 : 3 * PASS + 1]
    passes = [
        sorted(number for [part] in seen[PASS * k :][:PASS] for number in part) for k in (0, 1)
    ]
    assert passes == [list(range(1, 13))] * 2
    assert seen[:PASS] != seen[PASS:]


def test_a_pass_that_begins_during_a_save_is_noticed(tmp_path, files, monkeypatch):
    """Both parts of the position are then written again until they match."""
    make = PIPELINES["shuffle, batch, map"]
    position = begin(make(files))
    take(position, 1)
    written = []
    write_iterator = DataPosition.write.__globals__["write_iterator"]

    def write_disturbed(iterator, prefix):
        found = write_iterator(iterator, prefix)
        written.append(pathlib.Path(prefix).name)
        if len(written) == 2:  # between the two
            take(position, PASS)
        return found

    monkeypatch.setitem(DataPosition.write.__globals__, "write_iterator", write_disturbed)
    path = write(position, tmp_path / "saved")
    expected = take(position, 3 * PASS)
    after = begin(make(files))
    after.read(path, 1 + PASS)

    assert written == ["counts", "data", "counts", "data", "counts"]
    assert take(after, 3 * PASS) == expected


@pytest.mark.slow
def test_another_process_continues_with_the_same_batches(tmp_path, files):
    """The saved files hold everything that a pipeline needs."""
    expected = {}
    for name in BETWEEN_PROCESSES:
        position = begin(PIPELINES[name](files))
        take(position, PASS + 1)
        write(position, tmp_path / name)
        expected[name] = take(position, 3 * PASS)
    program = (
        "import json, sys, test_iterator_state as here\n"
        "print(json.dumps(here.batches_after_resume(*sys.argv[1:])))"
    )
    paths = [ROOT, ROOT / "tests", pathlib.Path(__file__).parent]
    told = subprocess.run(
        [sys.executable, "-c", program, files, str(tmp_path)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout.splitlines()[-1]) == expected


def batches_after_resume(files, path):
    """Restores every saved position; called in the other process."""
    tf.keras.utils.set_random_seed(0)  # shuffles depend on it, and every test sets it to 0
    found = {}
    for name in BETWEEN_PROCESSES:
        position = begin(PIPELINES[name](files))
        position.read(pathlib.Path(path) / name, PASS + 1)
        found[name] = take(position, 3 * PASS)
    return found


def as_batches(dataset):
    """Batches for `Linear` of one example: the slope is 2 to the power of the number."""

    def batch(number):
        return {"x": tf.ones([1, 1]), "slope": 2.0 ** tf.cast(tf.reshape(number, [1]), tf.float32)}

    return dataset.map(batch)


class Traced(Linear):
    """Records the numbers it was trained on in `seen`, one per step."""

    def __init__(self, **arguments):
        """Runs one step per loop, because the weight is read at the end of a loop."""
        super().__init__(verbose=False, steps_per_loop=1, **arguments)
        self.seen = []

    def on_train_begin(self):
        """Records the initial weight."""
        self.before = self.weight

    def on_loop_end(self, step):
        """Records the exponent of the slope."""
        self.seen.append(int(np.log2(self.before - self.weight)))
        self.model.trainable_variables[0].assign([[0.0]])  # so that nothing is rounded
        self.before = 0.0


def from_python():
    """Seven numbers from a Python generator, the same in each pass."""
    signature = tf.TensorSpec([], tf.int64)
    return as_batches(Dataset.from_generator(lambda: iter(range(7)), output_signature=signature))


@pytest.mark.thorough
def test_a_refused_pipeline_takes_no_step(tmp_path):
    """It is refused before the first step, but accepted if no position would be saved."""
    trainer = Traced(model_dir=tmp_path)
    with pytest.raises(ValueError, match="train_data") as error:
        trainer.train(from_python(), steps=3)

    assert "PyFunc" in str(error.value)
    assert trainer.totals.attempted == 0
    assert list(tmp_path.glob("ckpt-*")) == []
    for arguments in (
        {},
        {"model_dir": tmp_path / "skip", "checkpoints": Checkpoints(data_resume="skip")},
        {"model_dir": tmp_path / "restart", "checkpoints": Checkpoints(data_resume="restart")},
    ):
        trainer = Traced(**arguments)
        trainer.train(from_python(), steps=3)
        assert trainer.seen == [0, 1, 2]


def resumed(model_dir, make, data_resume, stop=4, end=12):
    """The numbers that a run sees after it has been stopped and resumed."""
    arguments = {"model_dir": model_dir, "checkpoints": Checkpoints(data_resume=data_resume)}
    Traced(**arguments).train(make(), steps=stop)
    trainer = Traced(**arguments)
    trainer.train(make(), steps=end)
    return trainer.seen


@pytest.mark.slow
def test_batches_that_were_taken_can_be_skipped(tmp_path):
    """With "skip", a repeatable generator continues with the same batches, also when shuffled."""
    assert resumed(tmp_path / "a", from_python, "skip") == [4, 5, 6, 0, 1, 2, 3, 4]

    def shuffled_from_python():
        return from_python().shuffle(7, seed=1)

    whole = Traced()
    whole.train(shuffled_from_python(), steps=12)
    assert resumed(tmp_path / "b", shuffled_from_python, "skip") == whole.seen[4:]
    facts = folder.read_manifest(tmp_path / "b" / "ckpt-12")
    assert (facts["data_resume"], facts["batches_taken"]) == ("skip", 12)
    assert not [name for name in facts["files"] if name.startswith(("data", "counts"))]


@pytest.mark.thorough
def test_data_can_start_over(tmp_path):
    """With "restart", a resumed run begins a new pass."""
    assert resumed(tmp_path, from_python, "restart") == [0, 1, 2, 3, 4, 5, 6, 0]


def test_skipping_starts_over_when_a_run_rolls_back(tmp_path):
    """Within a process, the data are read from the beginning to reach an earlier position."""
    position = begin(Dataset.range(12).batch(1), "skip")
    take(position, 5)
    position.read(tmp_path, 3)

    assert position.taken == 3
    assert list(itertools.chain(*take(position, 2))) == [[3], [4]]
    position.drop(2)
    assert (take(position, 1), position.taken) == ([[[7]]], 8)


@pytest.mark.slow
def test_a_resumed_epoch_has_every_example_once(tmp_path):
    """L12: every epoch has each example once, also the epoch in which the run was stopped."""

    def make():
        return as_batches(Dataset.range(6).shuffle(6, seed=5)).prefetch(2)

    whole = Traced()
    whole.train(make(), steps=18)
    assert [sorted(whole.seen[start:][:6]) for start in (0, 6, 12)] == [list(range(6))] * 3
    for stop in (4, 5, 6, 7):
        seen = resumed(tmp_path / str(stop), make, "exact", stop=stop, end=18)
        assert seen == whole.seen[stop:], f"stopped at {stop}"


def numbers_from_python():
    """Batches from a generator."""
    return Dataset.from_generator(
        lambda: iter(range(12)), output_signature=tf.TensorSpec([], tf.int64)
    ).batch(4)


GENERATOR = tf.random.Generator.from_seed(3)
VARIABLE = tf.Variable(1, dtype=tf.int64)
REFUSED = {
    "from_generator": numbers_from_python,
    "numpy_function": lambda: (
        Dataset.range(12).map(lambda n: tf.numpy_function(one_more, [n], tf.int64)).batch(4)
    ),
    "py_function": lambda: (
        Dataset.range(12).map(lambda n: tf.py_function(one_more, [n], tf.int64)).batch(4)
    ),
    "py_function within": lambda: Dataset.range(4).interleave(
        lambda n: Dataset.range(n).map(lambda m: tf.py_function(one_more, [m], tf.int64))
    ),
    "random op": lambda: (
        Dataset.range(12).map(lambda n: n + tf.random.uniform([], 0, 9, tf.int64)).batch(4)
    ),
    "generator": lambda: (
        Dataset.range(12).map(lambda n: n + GENERATOR.uniform([], 0, 9, tf.int64)).batch(4)
    ),
    "variable": lambda: Dataset.range(12).map(lambda n: n + VARIABLE).batch(4),
    "shuffle without a seed": lambda: Dataset.range(12).shuffle(12).batch(4),
    "files without a seed": lambda: Dataset.list_files(str(ROOT / "*.md")).batch(4),
    "sample without a seed": lambda: Dataset.sample_from_datasets(
        [Dataset.range(4), Dataset.range(4)], [0.5, 0.5]
    ),
    "shuffle within": lambda: (
        Dataset.range(4).interleave(lambda n: Dataset.range(n).shuffle(4, seed=1)).batch(4)
    ),
    "two shuffles": lambda: shuffled().map(one_more).shuffle(5, seed=2).batch(4),
    "sample": lambda: Dataset.sample_from_datasets(
        [Dataset.range(4), Dataset.range(9)], [0.5, 0.5], 3
    ),
    "numbers redrawn in each pass": lambda: (
        Dataset.random(seed=1, rerandomize_each_iteration=True)
        .take(9)
        .shuffle(5, seed=2, reshuffle_each_iteration=False)
        .batch(4)
    ),
    "choose": lambda: Dataset.choose_from_datasets(
        [shuffled().repeat(), Dataset.range(9).repeat(2)],
        Dataset.range(2).repeat(),
        stop_on_empty_dataset=False,
    ),
    "shuffle that begins late": lambda: Dataset.range(12).concatenate(shuffled()).batch(4),
    "shuffle that begins again": lambda: captured_in_flat_map(shuffled()),
}


def captured_in_flat_map(dataset):
    """A dataset that is started for each element of another."""
    return Dataset.range(3).flat_map(lambda _: dataset).batch(4)


@contextlib.contextmanager
def no_global_seed():
    """Clears the global seed, as at the start of a process; it would give every operation a seed."""
    tf.random.set_seed(None)
    try:
        yield
    finally:
        tf.random.set_seed(0)


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_pipeline_that_cannot_be_resumed_exactly_is_refused(name):
    """L12: an operation keeps its own state, draws without a seed, or is started late."""
    with no_global_seed():
        dataset = REFUSED[name]()
    with pytest.raises(ValueError, match="`train_data`"):
        description(pipeline_graph(dataset))
