"""L12: a pipeline that cannot be resumed exactly is refused, by the operation that stands against it."""

import contextlib
import pathlib

import pytest
import tensorflow as tf

from trainer.data.pipeline_graph import description, pipeline_graph

pytestmark = pytest.mark.sampled

ROOT = pathlib.Path(__file__).parents[3]
Dataset = tf.data.Dataset


def shuffled():
    """Twelve numbers in a new order in each pass."""
    return Dataset.range(12).shuffle(12, seed=1)


def one_more(number):
    """A function for `map`."""
    return number + 1


def numbers_from_python():
    """Batches from a generator."""
    return Dataset.from_generator(
        lambda: iter(range(12)), output_signature=tf.TensorSpec([], tf.int64)
    ).batch(4)


GENERATOR = tf.random.Generator.from_seed(3)
VARIABLE = tf.Variable(1, dtype=tf.int64)
REFUSED = {
    "from_generator": (
        numbers_from_python,
        "the stateful operation PyFunc",
    ),
    "numpy_function": (
        lambda: (
            Dataset.range(12).map(lambda n: tf.numpy_function(one_more, [n], tf.int64)).batch(4)
        ),
        "the stateful operation PyFunc",
    ),
    "py_function": (
        lambda: Dataset.range(12).map(lambda n: tf.py_function(one_more, [n], tf.int64)).batch(4),
        "the stateful operation EagerPyFunc",
    ),
    "py_function within": (
        lambda: Dataset.range(4).interleave(
            lambda n: Dataset.range(n).map(lambda m: tf.py_function(one_more, [m], tf.int64))
        ),
        "the stateful operation EagerPyFunc",
    ),
    "random op": (
        lambda: Dataset.range(12).map(lambda n: n + tf.random.uniform([], 0, 9, tf.int64)).batch(4),
        "the stateful operation RandomUniformInt",
    ),
    "generator": (
        lambda: Dataset.range(12).map(lambda n: n + GENERATOR.uniform([], 0, 9, tf.int64)).batch(4),
        "the stateful operation RngReadAndSkip",
    ),
    "variable": (
        lambda: Dataset.range(12).map(lambda n: n + VARIABLE).batch(4),
        "the stateful operation ReadVariableOp",
    ),
    "shuffle without a seed": (
        lambda: Dataset.range(12).shuffle(12).batch(4),
        "ShuffleDatasetV3 without a seed",
    ),
    "files without a seed": (
        lambda: Dataset.list_files(str(ROOT / "*.md")).batch(4),
        "ShuffleDatasetV3 without a seed",
    ),
    "sample without a seed": (
        lambda: Dataset.sample_from_datasets([Dataset.range(4), Dataset.range(4)], [0.5, 0.5]),
        "RandomDataset without a seed",
    ),
    "shuffle within": (
        lambda: Dataset.range(4).interleave(lambda n: Dataset.range(n).shuffle(4, seed=1)).batch(4),
        "the stateful operation DummySeedGenerator",
    ),
    "two shuffles": (
        lambda: shuffled().map(one_more).shuffle(5, seed=2).batch(4),
        "ShuffleDatasetV3 before another shuffle",
    ),
    "sample": (
        lambda: Dataset.sample_from_datasets([Dataset.range(4), Dataset.range(9)], [0.5, 0.5], 3),
        "DirectedInterleaveDataset of datasets that end",
    ),
    "numbers redrawn in each pass": (
        lambda: (
            Dataset.random(seed=1, rerandomize_each_iteration=True)
            .take(9)
            .shuffle(5, seed=2, reshuffle_each_iteration=False)
            .batch(4)
        ),
        "RandomDatasetV2 before another shuffle",
    ),
    "choose": (
        lambda: Dataset.choose_from_datasets(
            [shuffled().repeat(), Dataset.range(9).repeat(2)],
            Dataset.range(2).repeat(),
            stop_on_empty_dataset=False,
        ),
        "DirectedInterleaveDataset of datasets that end",
    ),
    "shuffle that begins late": (
        lambda: Dataset.range(12).concatenate(shuffled()).batch(4),
        "ShuffleDatasetV3 in a part that starts in the middle of a pass",
    ),
    "shuffle that begins again": (
        lambda: captured_in_flat_map(shuffled()),
        "ShuffleDatasetV3 in a part that starts in the middle of a pass",
    ),
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
    """The error names the operation that keeps its own state or draws without a seed."""
    make, what = REFUSED[name]
    with no_global_seed():
        dataset = make()
    with pytest.raises(ValueError, match="`train_data`") as error:
        description(pipeline_graph(dataset))

    assert f"a pipeline with {what}. " in str(error.value)
