"""Which data is read batch by batch in Python; what libraries yield, and how a position is found again."""

import itertools

import pytest
import tensorflow as tf
from data_sources import (
    Batches,
    Shuffled,
    X,
    assert_found_again,
    assert_trains,
    generate,
)

from trainer.data.batches import batches
from trainer.data.sources import is_source, source_of

# torchdata 0.11 calls a function that PyTorch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")


def torch_loader(stateful):
    """A shuffled loader of PyTorch or of torchdata."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    make = torch.utils.data.DataLoader
    if stateful:
        make = pytest.importorskip(
            "torchdata.stateful_dataloader", reason="needs torchdata"
        ).StatefulDataLoader
    rows = [{"x": torch.tensor(row)} for row in X]
    return make(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


def grain_data(kind):
    """A shuffled data set of Grain."""
    grain = pytest.importorskip("grain", reason="needs Grain")
    rows = grain.MapDataset.source(X).seed(1).shuffle().map(lambda row: {"x": row}).batch(4)
    return {"map": rows, "iter": rows.to_iter_dataset(), "repeat": rows.repeat()}[kind]


def hugging_face_stream():
    """A stream of Hugging Face."""
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's datasets")
    rows = datasets.IterableDataset.from_generator(lambda: ({"x": row} for row in X))
    return rows.batch(4)


SOURCES = {
    "PyDataset": Shuffled,
    "PyDataset, threads": lambda: Shuffled(workers=3, max_queue_size=2),
    "DataLoader": lambda: torch_loader(stateful=False),
    "StatefulDataLoader": lambda: torch_loader(stateful=True),
    "Grain MapDataset": lambda: grain_data("map"),
    "Grain IterDataset": lambda: grain_data("iter"),
    "Hugging Face stream": hugging_face_stream,
}


@pytest.mark.extras
def test_batches_need_not_be_copied():
    """PyTorch refuses to copy a tensor that was computed from one with gradients."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")

    def computed():
        for number in range(3):
            yield torch.ones([2, 1], requires_grad=True) * number

    found = batches(computed, "data", tf.distribute.get_strategy())
    assert [float(batch[0, 0]) for batch in found.dataset] == [0.0, 1.0, 2.0]


def test_the_hooks_of_a_py_dataset_frame_each_evaluation():
    """As in Keras, a pass begins and ends with a call; the first two batches are read in advance."""
    data = Shuffled()
    found = batches(data, "data", tf.distribute.get_strategy())
    data.calls.clear()
    for _ in range(2):
        assert len(list(found.dataset)) == 5

    assert data.calls == ["begin", "end"] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SOURCES)
def test_a_position_is_found_again(kind, tmp_path):
    """A new object of the same data goes on with the next batch, in the middle and at the end of a
    pass, and in the passes after it.
    """
    assert_found_again(SOURCES[kind], tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "DataLoader" else pytest.mark.slow)
        for kind in SOURCES
    ],
)
def test_a_source_trains_as_a_dataset_does(mirrored, kind, replicas, tmp_path):
    """In float16, a source and a dataset of the same batches end with the same weight, also after a
    resume.
    """
    assert_trains(SOURCES[kind], mirrored(replicas), tmp_path)


def test_hooks_of_a_py_dataset():
    """Each pass begins and ends with its hook, once, before the next pass is read."""
    data = Shuffled()
    list(itertools.islice(source_of(data, None, None).read(None), 10))

    assert data.calls == ["begin", "end", "begin", "end"]


def test_what_is_a_source():
    """Arrays, datasets and functions of an input context are none."""
    none = [X, (X, X), {"x": X}, [X, X], tf.data.Dataset.range(3), lambda context: context, [[1.0]]]
    some = [Shuffled(), generate, generate(), Batches(), [(X, X)], iter([X])]

    assert not any(map(is_source, none))
    assert all(map(is_source, some))


def test_a_function_that_returns_a_dataset():
    """A function without parameters may return a tf.data.Dataset, which stays a pipeline."""
    found = batches(lambda: tf.data.Dataset.range(8).batch(4), "data", tf.distribute.get_strategy())

    assert found.reader is None
    assert found.steps_per_epoch == 2


class FakeTable:
    """The part of datasets.Dataset that is used; the real one cannot be pickled in some versions."""

    __module__ = "datasets.arrow_dataset"

    def with_format(self, name):
        """Returns itself."""
        assert name == "numpy"
        return self

    def __len__(self):
        """The number of rows."""
        return 20

    def __getitem__(self, rows):
        """Some rows."""
        return {"x": X[rows]}


def test_rows_of_an_arrow_table():
    """A table of Hugging Face is cut into batches, in a new order in each pass, by index."""
    rows = FakeTable()
    strategy = tf.distribute.get_strategy()
    with pytest.raises(ValueError, match="`global_batch`"):
        batches(rows, "train_data", strategy)
    found = batches(rows, "train_data", strategy, global_batch=8, shuffle_seed=1)

    passes = [batch["x"].numpy().ravel().tolist() for batch in found.reader.forever().take(6)]
    assert [len(batch) for batch in passes] == [8, 8, 4, 8, 8, 4]
    first, second = (sorted(itertools.chain(*each)) for each in (passes[:3], passes[3:]))
    assert first == second == X.ravel().tolist()
    assert passes[:3] != passes[3:]
