"""Tests of `examples/datasets.py`, with small files in the real formats in Keras's cache folder."""

import importlib.util
import io
import pathlib
import pickle
import tarfile

import numpy as np
import pytest

PATH = pathlib.Path(__file__).parents[2] / "examples" / "datasets.py"
spec = importlib.util.spec_from_file_location("examples_datasets", PATH)
datasets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(datasets)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A temporary folder in which Keras looks for data sets before it downloads them.

    Keras compares the hash of a file with that of the real data set. Only this comparison is disabled,
    so that small files pass; Keras still finds, unpacks and reads them.
    """
    monkeypatch.setattr("keras.src.backend.config._KERAS_DIR", str(tmp_path))
    monkeypatch.setattr("keras.src.utils.file_utils.validate_file", lambda *_, **__: True)
    (tmp_path / "datasets").mkdir()
    return tmp_path / "datasets"


def check_format(images, labels, shape):
    """Asserts what holds for every data set: shapes, dtypes and ranges."""
    assert images.shape == (len(labels), *shape)
    assert images.dtype == np.float32
    assert labels.shape == (len(images),)
    assert labels.dtype == np.int64
    assert images.min() >= 0.0
    assert images.max() <= 1.0
    assert set(labels.tolist()) <= set(range(10))


def write_cifar10(path, batches):
    """Writes an archive like CIFAR-10's: one pickle for each batch, with rows of 3,072 bytes."""
    with tarfile.open(path, "w:gz") as archive:
        for name, (pixels, labels) in batches.items():
            # The real files were written by Python 2 (protocol 2), whose strings were bytes.
            content = pickle.dumps({b"data": pixels, b"labels": labels}, protocol=4)
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


@pytest.mark.thorough
def test_cifar10_is_read_from_its_archive(cache):
    """Rows of all red, then all green, then all blue bytes become images with three channels; labels
    become flat.

    Keras allocates 10,000 images per batch, and the single image of a file is broadcast to all of them.
    """
    rows = np.random.default_rng(0).integers(0, 256, [7, 3072]).astype(np.uint8)
    batches = {f"data_batch_{i + 1}": (rows[i : i + 1], [i]) for i in range(5)}
    batches["test_batch"] = (rows[5:], [9, 8])
    write_cifar10(cache / "cifar-10-batches-py-target_archive", batches)

    (train, train_labels), (test, test_labels) = datasets.load("cifar10")

    check_format(test, test_labels, (32, 32, 3))
    check_format(train[::9999], train_labels[::9999], (32, 32, 3))
    assert train_labels.tolist() == np.repeat(range(5), 10_000).tolist()
    assert test_labels.tolist() == [9, 8]
    for image, row in ((train[0], rows[0]), (train[49_999], rows[4]), (test[1], rows[6])):
        assert np.array_equal(np.round(image * 255), row.reshape(3, 32, 32).transpose(1, 2, 0))


def test_the_digits_have_a_fixed_split():
    """The split is 1,437 to 360, always the same, with equal shares of each digit and no overlap."""
    train, test = datasets.load("digits")
    for images, labels in (train, test):
        check_format(images, labels, (8, 8, 1))
    sizes = [np.bincount(labels) for _, labels in (train, test)]

    assert [len(train[1]), len(test[1])] == [1437, 360]
    assert np.abs(sizes[0] / 1437 - sizes[1] / 360).max() < 0.005
    assert train[0].max() == 1.0
    assert np.array_equal(datasets.load("digits")[0][0], train[0])
    assert not {image.tobytes() for image in train[0]} & {image.tobytes() for image in test[0]}


@pytest.mark.parametrize("name", datasets.SHAPES)
def test_synthetic_images_have_the_shape_of_the_real_ones(name):
    """Synthetic images are generated without a download, and are the same each time."""
    train, test = datasets.load(name, use_synthetic=True)
    for images, labels in (train, test):
        check_format(images, labels, datasets.SHAPES[name])

    assert (len(train[1]), len(test[1])) == (4000, 1000)
    assert np.array_equal(datasets.load(name, use_synthetic=True)[1][0], test[0])
