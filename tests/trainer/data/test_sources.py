"""Data that Python makes batch by batch: what it yields, and how its position is found again."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear

from trainer.data.batches import batches
from trainer.data.source_position import position_in
from trainer.data.sources import is_source, source_of

X = np.arange(20, dtype=np.float32)[:, None]


class Shuffled(keras.utils.PyDataset):
    """Five batches of four numbers, in a new order in each pass."""

    def __init__(self, **arguments):
        """Begins with the order of the numbers."""
        super().__init__(**arguments)
        self.generator, self.order, self.calls = np.random.default_rng(3), np.arange(20), []

    def __len__(self):
        """The number of batches."""
        return 5

    def __getitem__(self, index):
        """One batch."""
        return {"x": X[self.order[4 * index : 4 * index + 4]]}

    def on_epoch_begin(self):
        """Notes the call."""
        self.calls.append("begin")

    def on_epoch_end(self):
        """Shuffles the numbers."""
        self.calls.append("end")
        self.order = self.generator.permutation(20)


def generate():
    """Yields the five batches."""
    for start in range(0, 20, 4):
        yield {"x": X[start : start + 4]}


class Batches:
    """An iterable of batches that knows its length."""

    def __iter__(self):
        """A new generator."""
        return generate()

    def __len__(self):
        """The number of batches."""
        return 5


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
    "generator function": lambda: generate,
    "function": lambda: lambda: generate(),  # noqa: PLW0108  # is not a generator function
    "iterable": Batches,
    "list": lambda: list(generate()),
    "DataLoader": lambda: torch_loader(stateful=False),
    "StatefulDataLoader": lambda: torch_loader(stateful=True),
    "Grain MapDataset": lambda: grain_data("map"),
    "Grain IterDataset": lambda: grain_data("iter"),
    "Hugging Face stream": hugging_face_stream,
}


def begin(data, resume_mode="exact"):
    """A position at the beginning, whose places are kept."""
    found = batches(data, "train_data", tf.distribute.get_strategy())
    position = position_in(found, resume_mode)
    position.check_savable()
    return position


def take(position, count):
    """The numbers in the next batches."""
    taken = [next(position.iterator)["x"].numpy().ravel().tolist() for _ in range(count)]
    position.taken += count
    return taken


# torchdata 0.11 calls a function that PyTorch 2.13 has deprecated.
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_position_is_found_again(kind, tmp_path):
    """A new object of the same data goes on with the next batch, in the middle and at the end of a
    pass, and in the passes after it.
    """
    whole = begin(SOURCES[kind]())
    expected = take(whole, 17)
    for steps in (5, 7):
        stopped = begin(SOURCES[kind]())
        assert take(stopped, steps) == expected[:steps]
        stopped.write(str(tmp_path))
        resumed = begin(SOURCES[kind]())
        resumed.read(tmp_path, steps)
        assert take(resumed, 17 - steps) == expected[steps:]
        assert resumed.taken == 17

    assert sorted(itertools.chain(*expected[:5])) == X.ravel().tolist()


def test_hooks_of_a_py_dataset():
    """Each pass begins and ends with its hook, once, before the next pass is read."""
    data = Shuffled()
    list(itertools.islice(source_of(data, "data", None, None).read(None), 10))

    assert data.calls == ["begin", "end", "begin", "end"]


def test_processes_of_a_py_dataset_are_threads(caplog):
    """The trainer says that it uses threads where Keras would fork processes."""
    source_of(Shuffled(workers=2, use_multiprocessing=True), "data", None, None)

    assert "its 2 workers are threads here" in caplog.text


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["PyDataset", "generator function"])
def test_a_source_trains_as_a_dataset_does(mirrored, kind, replicas):
    """In float16, a source and a dataset of the same batches end with the same weight."""

    def with_slopes(batch):
        return {"x": batch["x"] / 20, "slope": batch["x"][:, 0] / 20}

    data = {
        "PyDataset": [with_slopes(batch) for batch in generate()],
        "generator function": lambda: map(with_slopes, generate()),
    }[kind]
    arrays = with_slopes({"x": X})
    weights = []
    for each in (data, tf.data.Dataset.from_tensor_slices(arrays).batch(4)):
        strategy = mirrored(replicas) if replicas > 1 else "default"
        trainer = Linear(
            precision="mixed_float16", strategy=strategy, check_gradients=False, verbose=False
        )
        trainer.train(each, steps=7)
        weights.append(trainer.weight)

    assert weights[0] == weights[1] != 1.0


def test_images_in_a_folder(tmp_path):
    """Keras's image_dataset_from_directory has an exact position if it has a seed."""
    for index in range(6):
        folder = tmp_path / "images" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image = np.full([4, 4, 3], 40 * index, np.uint8)
        tf.io.write_file(str(folder / f"{index}.png"), tf.io.encode_png(image))

    def images(seed=1):
        found = keras.utils.image_dataset_from_directory(
            tmp_path / "images", batch_size=2, image_size=(4, 4), seed=seed, verbose=False
        )
        return found.map(lambda image, label: {"x": image[:, 0, 0, 0], "label": label})

    whole, stopped, resumed = (begin(images()) for _ in range(3))
    expected = take(whole, 8)
    take(stopped, 4)
    stopped.write(str(tmp_path))
    resumed.read(tmp_path, 4)

    assert take(resumed, 4) == expected[4:]


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


def test_a_function_that_returns_no_iterable():
    """The error says what a function may return."""
    with pytest.raises(TypeError) as error:
        batches(lambda: 3, "train_data", tf.distribute.get_strategy())

    assert str(error.value) == (
        "`train_data` must return an iterable of batches if it is a function without parameters; "
        "got int. It is called once for each pass. Write a generator function, or one that takes a "
        "tf.distribute.InputContext and returns a tf.data.Dataset."
    )


def test_rows_of_an_arrow_table():
    """A table of Hugging Face is cut into batches, in a new order in each pass, by index."""
    rows = FakeTable()
    strategy = tf.distribute.get_strategy()
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        batches(rows, "train_data", strategy)
    found = batches(rows, "train_data", strategy, global_batch=8, shuffle_seed=1)

    assert str(error.value) == (
        "`global_batch` must be at least 1 if `train_data` is a datasets.Dataset; got None. It "
        "holds single examples. Pass global_batch=64, for example."
    )
    passes = [batch["x"].numpy().ravel().tolist() for batch in found.reader.forever().take(6)]
    assert [len(batch) for batch in passes] == [8, 8, 4, 8, 8, 4]
    first, second = (sorted(itertools.chain(*each)) for each in (passes[:3], passes[3:]))
    assert first == second == X.ravel().tolist()
    assert passes[:3] != passes[3:]


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
