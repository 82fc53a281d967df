"""Image data sets by name: MNIST, CIFAR-10, scikit-learn's digits, or synthetic images.

    import datasets

    train_data, test_data = datasets.load("digits")

Each of the two is a pair (images, labels). Images have shape (count, height, width, channels) and
are float32 in [0, 1]; labels have shape (count,) and are int64 in [0, 10). `keras.datasets`
downloads MNIST and CIFAR-10 once. The digits, 1,797 real scans, come with scikit-learn. A script
can import this module if it is in the same folder.
"""

import sys

import keras
import numpy as np
from absl import flags

# Attribute the flags to the script that calls `define_flags`, so that its --helpshort shows them.
flags.disclaim_key_flags()

FLAGS = flags.FLAGS
SHAPES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3), "digits": (8, 8, 1)}
CLASSES = 10  # in every data set
SYNTHETIC_TRAIN, SYNTHETIC_TEST = 4000, 1000


def define_flags(default):
    """Defines --dataset and --use_synthetic_data; call it before `app.run`.

    Args:
        default: name of the data set that the script uses by default.
    """
    flags.DEFINE_enum("dataset", default, list(SHAPES), "The data set to train on.")
    flags.DEFINE_boolean("use_synthetic_data", False, "Use synthetic images of the same shape.")


def load_from_flags():
    """Returns the data that --dataset and --use_synthetic_data select, like `load`."""
    return load(FLAGS.dataset, use_synthetic=FLAGS.use_synthetic_data)


def load(name, *, use_synthetic=False):
    """Returns (images, labels) for training and (images, labels) for testing.

    Args:
        name: one of `SHAPES`.
        use_synthetic: whether to generate synthetic images of the same shape instead.

    Raises:
        SystemExit: if the download fails, with the reason and two alternatives.
    """
    if use_synthetic:
        images, labels = synthetic(SHAPES[name], SYNTHETIC_TRAIN + SYNTHETIC_TEST)
        cut = SYNTHETIC_TRAIN
        return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])
    if name == "digits":
        return load_digits()
    try:
        train, test = getattr(keras.datasets, name).load_data()
    except Exception as error:  # noqa: BLE001  # Keras raises a bare Exception
        sys.exit(
            f"Could not download {name}: {error}\nTry --dataset=digits, which comes with "
            "scikit-learn, or --use_synthetic_data."
        )
    return prepared(*train, SHAPES[name]), prepared(*test, SHAPES[name])


def load_digits():
    """Returns 1,437 scans for training and 360 for testing, with the same share of each digit."""
    from sklearn.datasets import load_digits as load_scans
    from sklearn.model_selection import train_test_split

    scans, labels = load_scans(return_X_y=True)
    images, labels = prepared(scans, labels, SHAPES["digits"], largest=16)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return (parts[0], parts[2]), (parts[1], parts[3])


def prepared(images, labels, shape, largest=255):
    """Returns images and labels in the common format of this module.

    Args:
        images: shape (count, ...), with the number of elements of `shape` per image; from 0 to
            `largest`.
        labels: shape (count,) or (count, 1).
        shape: (height, width, channels).
        largest: the value that becomes 1.
    """
    # A single pass: CIFAR-10 takes 0.6 GB as float32, and a copy would double that.
    scaled = np.divide(images, np.float32(largest), dtype=np.float32)
    return scaled.reshape(-1, *shape), labels.reshape(-1).astype(np.int64)


def synthetic(shape, count, classes=CLASSES, seed=0):
    """Returns (images, labels) that can be learned: one pattern for each class, plus noise.

    Args:
        shape: shape of an image, with any number of dimensions.
        count: number of images.
        classes: number of classes; the labels are 0 to `classes` - 1.
        seed: the same seed generates the same images.
    """
    random = np.random.default_rng(seed)
    patterns = random.random([classes, *shape], dtype=np.float32)
    labels = random.integers(classes, size=count)
    noise = random.random([count, *shape], dtype=np.float32)
    return (patterns[labels] + 3 * noise) / 4, labels
