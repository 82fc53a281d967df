"""Images to learn from, by name: MNIST, CIFAR-10, scikit-learn's digits, or made up.

    import datasets

    train_data, test_data = datasets.load("digits")

Whatever the name, each of the two is (images, labels). Images have the shape (count, height,
width, channels) and are float32 in [0, 1]; labels have the shape (count,) and are int64 in [0, 10).
MNIST and CIFAR-10 are fetched by `keras.datasets`, once. The digits, 1,797 real scans, come with
scikit-learn. A script that imports this lies beside it.
"""

import sys

import keras
import numpy as np
from absl import flags

# The flags belong to the script that calls `define_flags`, so that its --helpshort shows them.
flags.disclaim_key_flags()

FLAGS = flags.FLAGS
SHAPES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3), "digits": (8, 8, 1)}
CLASSES = 10  # of each of them
SYNTHETIC_TRAIN, SYNTHETIC_TEST = 4000, 1000


def define_flags(default):
    """Defines --dataset and --use_synthetic_data; call it before `app.run`.

    Args:
        default: the name of the script's own data set.
    """
    flags.DEFINE_enum("dataset", default, list(SHAPES), "What to learn.")
    flags.DEFINE_boolean("use_synthetic_data", False, "Images of that shape, made up.")


def load_from_flags():
    """Returns what --dataset and --use_synthetic_data ask for, as `load` does."""
    return load(FLAGS.dataset, made_up=FLAGS.use_synthetic_data)


def load(name, *, made_up=False):
    """Returns (images, labels) to train on, and to test on.

    Args:
        name: one of `SHAPES`.
        made_up: whether to make up images of its shape instead.

    Raises:
        SystemExit: if it cannot be fetched; says why, and what can be done without.
    """
    if made_up:
        images, labels = synthetic(SHAPES[name], SYNTHETIC_TRAIN + SYNTHETIC_TEST)
        cut = SYNTHETIC_TRAIN
        return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])
    if name == "digits":
        return load_digits()
    try:
        train, test = getattr(keras.datasets, name).load_data()
    except Exception as error:  # noqa: BLE001  # Keras raises no other
        sys.exit(
            f"{name} could not be fetched: {error}\nTry --dataset=digits, which comes with "
            "scikit-learn, or --use_synthetic_data."
        )
    return prepared(*train, SHAPES[name]), prepared(*test, SHAPES[name])


def load_digits():
    """Returns 1,437 scans to train on and 360 to test on, with as many of each digit in both."""
    from sklearn.datasets import load_digits as load_scans
    from sklearn.model_selection import train_test_split

    scans, labels = load_scans(return_X_y=True)
    images, labels = prepared(scans, labels, SHAPES["digits"], largest=16)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return (parts[0], parts[2]), (parts[1], parts[3])


def prepared(images, labels, shape, largest=255):
    """Returns images and labels as every data set here has them.

    Args:
        images: shape (count, ...), as many numbers each as `shape` has; from 0 to `largest`.
        labels: shape (count,) or (count, 1).
        shape: (height, width, channels).
        largest: what becomes 1.
    """
    # In one pass: CIFAR-10 takes 0.6 GB as float32, and a copy would take as much again.
    scaled = np.divide(images, np.float32(largest), dtype=np.float32)
    return scaled.reshape(-1, *shape), labels.reshape(-1).astype(np.int64)


def synthetic(shape, count, classes=CLASSES, seed=0):
    """Returns (images, labels) that can be learned: a pattern for each class, and noise on it.

    Args:
        shape: of an image; any.
        count: how many.
        classes: of how many kinds; the labels are 0 to `classes` - 1.
        seed: the same one makes the same images.
    """
    random = np.random.default_rng(seed)
    patterns = random.random([classes, *shape], dtype=np.float32)
    labels = random.integers(classes, size=count)
    noise = random.random([count, *shape], dtype=np.float32)
    return (patterns[labels] + 3 * noise) / 4, labels
