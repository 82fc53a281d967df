"""Data that a caller may pass by mistake, and what becomes of a run on it.

Each case is a pair: data, and whether its first dimension indexes the examples, so that it needs
`global_batch`. By hand below, and drawn at random in `drawn`: a leaf that is odd, in a structure
that may be odd as well, passed as arrays, as a pipeline or as a generator.
"""

import collections
import contextlib
import random
import re

import keras
import numpy as np
import tensorflow as tf
from chaos import odd_inputs
from conformance import test_errors as errors

from trainer.data.errors import DataError
from trainer.data.structures import BatchError

NAMES = {"train": "train_data", "evaluate": "data", "predict": "data", "train_on_batch": "batch"}
OURS = {TypeError, ValueError, RuntimeError, DataError, BatchError}
SENTENCE = r"`[\w.\[\]'\"()]+` must |The (training )?data (raised|ended)"
ONE = np.ones([4, 1], np.float32)
Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024  # as users write them
Point = collections.namedtuple("Point", "x y z w")  # noqa: PYI024


def yielding(*batches):
    """A generator function of these batches."""

    def make():
        yield from batches

    return make


def raising():
    """A generator that raises after a batch."""
    yield ONE, ONE
    raise OSError("no such image")


def texts(*rows):
    """An array of Python objects."""
    return np.array([[row] for row in rows], dtype=object)


def pipeline(*batches):
    """A pipeline of unknown shapes."""
    types = tf.nest.map_structure(lambda leaf: tf.as_dtype(leaf.dtype), batches[0])
    return tf.data.Dataset.from_generator(yielding(*batches), output_types=types)


# By kind: label, code, whether a step can be taken, a prediction be made, and so on is documented:
# the methods with a result ("*" for all that take such data). Keras's functional models add and take
# away a last dimension of size 1 of their inputs.
HAND = """
text | arrays | (ONE, texts("a", "b", "c", "d")) | predict
text | arrays | (texts("a", "b", "c", "d"), ONE) |
text | arrays | (ONE, ONE, np.array(["a"] * 4)) | predict
text | other | yielding((texts("a", "b", "c", "d"), ONE)) |
text | arrays | "digits" |
text | arrays | b"digits" |
complex | arrays | (ONE * 1j, ONE) |
complex | arrays | (ONE, ONE * (1 + 1j)) | predict
complex | arrays | (ONE, ONE, np.ones(4) * 1j) | predict
complex | other | tf.data.Dataset.from_tensors((ONE * 1j, ONE)) |
other dtypes | arrays | (ONE > 0, ONE) | *
other dtypes | arrays | (ONE.astype("uint64"), ONE.astype("int8")) | *
other dtypes | arrays | (ONE.astype("float64"), ONE.astype("float16")) | *
other dtypes | arrays | (np.array(ONE, np.longdouble), ONE) |
other dtypes | arrays | (ONE, np.zeros([4, 1], "datetime64[D]")) |
other dtypes | arrays | (ONE, np.zeros([4, 1], "timedelta64[s]")) |
other dtypes | other | yielding((np.zeros([4, 1], "datetime64[D]"), ONE)) |
other dtypes | other | yielding((ONE, ONE), (ONE, ONE), (np.zeros([4, 1], "datetime64[D]"), ONE)) |
objects | arrays | (texts(None, None, None, None), ONE) |
objects | arrays | (texts(1.0, 2.0, 3.0, 4.0), ONE) |
objects | other | yielding((texts(None, "a", "b", "c"), ONE)) |
objects | other | yielding((texts(1.0, 2.0, 3.0, 4.0), ONE)) |
objects | other | yielding(*[(ONE, texts("a", "b", "c", "d"))] * 2, (ONE, texts(None, 1, 2, 3))) |
objects | other | yielding((keras.Input([1]), ONE)) |
objects | arrays | (keras.Input([1]), ONE) |
objects | other | yielding((ONE, object())) |
objects | other | yielding(None) |
objects | other | yielding(lambda: 1) |
objects | arrays | {1.0, 2.0} |
objects | other | {1.0, 2.0} |
objects | arrays | None |
objects | arrays | 3 |
objects | arrays | dict |
records | arrays | np.zeros(4, [("x", "f4"), ("y", "f4")]) |
records | arrays | (np.zeros(4, [("a", "f4")]), ONE) |
records | other | yielding((np.zeros(4, [("a", "f4")]), ONE)) |
records | arrays | np.rec.array([(1.0, 2.0)] * 4, names="x,y") |
masked | arrays | (np.ma.masked_array(ONE, ONE > 0), ONE) |
masked | other | yielding((np.ma.masked_array(ONE, ONE > 0), ONE)) |
masked | other | yielding((ONE, ONE), (ONE, ONE), (np.ma.masked_array(ONE, ONE > 0), ONE)) |
ragged and sparse | arrays | (tf.RaggedTensor.from_tensor(ONE), ONE) |
ragged and sparse | other | yielding((tf.RaggedTensor.from_tensor(ONE), ONE)) |
ragged and sparse | other | yielding((tf.sparse.from_dense(ONE), ONE)) |
ragged and sparse | other | yielding(([[1.0], [1.0, 2.0]], [1.0, 2.0])) |
ragged and sparse | other | tf.data.Dataset.from_tensors((tf.ragged.constant([[1.0], [1.0, 2.0]]), ONE[:2])) |
shapes | arrays | (ONE, np.ones([3, 1])) |
shapes | arrays | (np.ones([4, 2]), ONE) |
shapes | arrays | (np.ones([4]), ONE) | *
shapes | arrays | (np.ones([4, 1, 1]), ONE) | *
shapes | arrays | (ONE, np.ones([4, 3])) | predict
shapes | arrays | (ONE, np.ones([4, 1, 2])) | predict
shapes | arrays | (ONE, np.ones([4])) | *
shapes | arrays | (ONE, ONE, np.ones([4, 3])) | predict
shapes | arrays | (ONE, ONE, ONE) | *
shapes | arrays | (np.array(1.0), np.array(1.0)) |
shapes | other | yielding((ONE, ONE[:2])) |
shapes | other | yielding((ONE, ONE), (ONE, ONE), (ONE, ONE[:2])) |
shapes | other | yielding(3) |
shapes | other | yielding((1.0, 2.0)) |
shapes | other | pipeline((ONE, ONE)) | *
shapes | other | pipeline((ONE, ONE), (ONE, ONE[:2])) |
shapes | other | pipeline((ONE, ONE), (ONE[:, 0], ONE)) | predict
shapes | other | tf.data.Dataset.range(4) |
structures | arrays | ONE | predict
structures | arrays | (ONE,) | predict
structures | arrays | (ONE, ONE, ONE, ONE) | predict
structures | arrays | {"x": ONE, "y": ONE} |
structures | arrays | Pair(ONE, ONE) | *
structures | arrays | Point(ONE, ONE, ONE, ONE) | predict
structures | arrays | (ONE, None) |
structures | arrays | (ONE.tolist(), ONE.tolist()) |
structures | other | [(ONE, ONE), (ONE, ONE[:2])] |
structures | other | [[1.0, 2.0], [3.0]] |
structures | other | yielding((ONE, ONE), {"x": ONE, "y": ONE}) |
structures | other | yielding((ONE, ONE), (ONE, ONE), (ONE,)) |
structures | other | yielding((ONE, ONE), (ONE, ONE), (ONE.astype("f8"), ONE)) |
structures | other | tf.data.Dataset.from_tensors((ONE, ONE)).window(1) |
structures | other | tf.data.Dataset.from_tensors(tf.data.Dataset.range(3)) |
structures | other | tf.data.Dataset.from_tensors((ONE, None)) |
structures | other | tf.data.Dataset.from_tensors(tf.experimental.Optional.from_value(ONE)) |
empty | arrays | (ONE[:0], ONE[:0]) |
empty | arrays | () |
empty | arrays | {} |
empty | arrays | [] |
empty | other | yielding() |
empty | other | yielding((ONE[:0], ONE[:0])) |
empty | other | tf.data.Dataset.from_tensors((ONE, ONE)).take(0) |
empty | other | iter([]) |
values | arrays | (ONE * np.nan, ONE) | *
values | arrays | (ONE, ONE * np.inf) | *
values | arrays | (ONE, ONE, np.full([4], np.nan)) | *
values | arrays | (ONE, ONE, -np.ones([4])) | *
values | arrays | (ONE, ONE, np.zeros([4])) | *
functions | other | lambda: 1 / 0 |
functions | other | lambda context: 1 / 0 |
functions | other | lambda x: x |
functions | other | lambda: 3 |
functions | other | raising |
functions | other | yielding((ONE, ONE)) | *
functions | other | iter([(ONE, ONE)]) | *
functions | other | range(3) |
functions | other | tf.data.Dataset.from_tensors((ONE, ONE)).map(lambda x, y: (tf.debugging.check_numerics(x / 0, "bad"), y)) |
"""

METHODS = {"arrays": tuple(NAMES), "other": ("train", "evaluate", "predict")}


def by_hand():
    """(kind, method, form, code, whether it is documented): training, and one more method each."""
    for number, line in enumerate(HAND.strip().splitlines()):
        kind, form, code, fine = (part.strip() for part in re.split(r" \|(?: |$)", line))
        others = METHODS[form][1:]
        for method in ("train", others[number % len(others)]):
            documented = fine == "*" or method in fine.split()
            if method == "train_on_batch" and fine == "" and code in LISTS:
                documented = True
            yield kind, method, form, code, documented


LISTS = {"(ONE.tolist(), ONE.tolist())"}  # a batch may be lists of numbers; arrays may not


# Leaves for the random cases: code, and where a step may take it: as input, label or weight; "p" is
# as a label or weight where these are not used, in a prediction.
LEAVES = {
    "ONE": "xyw",
    "ONE[:, 0]": "xyw",
    "ONE > 0": "xyw",
    "ONE.astype('int32')": "xyw",
    "ONE.astype('float16')": "xyw",
    "ONE.astype('float64') * np.nan": "xyw",
    "np.ones([4, 3], 'f')": "p",
    "ONE * 1j": "p",
    "texts('a', 'b', 'c', 'd')": "p",
    "texts(None, 'b', 'c', 'd')": "",
    "np.zeros(4, [('a', 'f4')])": "",
    "np.zeros([4, 1], 'datetime64[D]')": "",
    "np.ma.masked_array(ONE, ONE > 0)": "",
    "ONE[:3]": "",
    "ONE[:0]": "",
    "np.array(1.0)": "",
    "object()": "",
}
FORMS = {
    "arrays": "{}",
    "generator": "yielding({0})",
    "later": "yielding((ONE, ONE), (ONE, ONE), {0})",
    "list": "[{0}, {0}]",
}


def drawn(number):
    """As an item of `by_hand`: a case that depends on its number alone."""
    chance = random.Random(number)  # noqa: S311
    count = chance.choice([2, 2, 2, 3])
    odd, leaf = chance.randrange(count), chance.choice(list(LEAVES))
    leaves = ["ONE"] * count
    leaves[odd] = leaf
    style = chance.choice(list(FORMS))
    form = "arrays" if style == "arrays" else "other"
    method = chance.choice(METHODS[form])
    role = "p" if method == "predict" and odd else "xyw"[odd]
    documented = role in LEAVES[leaf] or (role == "p" and "y" in LEAVES[leaf])
    code = FORMS[style].format(f"({', '.join(leaves)})")
    return f"drawn as {style}", method, form, code, documented


def outcome(method, form, code, documented):
    """What becomes of a case: a kind as in `odd_inputs.outcome`, and a text about it."""
    names = globals() | errors.names_in_examples()
    arguments = {"global_batch": 4} if form == "arrays" and method != "train_on_batch" else {}
    if method == "train":
        arguments["steps"] = 4
    try:
        with odd_inputs.elsewhere(), odd_inputs.within(odd_inputs.SECONDS):
            data = eval(code, names)  # noqa: S307  # a case from above
            trainer = names["Trainer"](check_gradients=False)
            getattr(trainer, method)(data, **arguments)
    except odd_inputs.TooLongError:
        return "obscure", "no end"
    except Exception as error:  # noqa: BLE001  # all kinds are judged
        why = unclear(NAMES[method], error)
        if why and code in OWN_ERRORS:
            return "documented", "the function's own error"
        return ("obscure", why) if why else ("clear", str(error))
    finally:
        with contextlib.suppress(Exception):
            keras.backend.clear_session()
    return ("documented", "") if documented else ("silent", "")


OWN_ERRORS = {"lambda: 1 / 0", "lambda context: 1 / 0"}  # raised by the user's own function


def unclear(argument, error):
    """What is not clear about an error, or ""."""
    message = str(error)
    text = f"{type(error).__name__}: {message[:300]}"
    if type(error) not in OURS:
        return text
    if not re.match(SENTENCE, message):
        return f"form: {text}"
    named = {part.split("[")[0] for part in re.findall(r"`([\w.\[\]'\"()]+)`", message)}
    if message.startswith("`") and not named & {argument, "loss_fn", "sample_weight"}:
        return f"unnamed: {text}"
    if len(message) > odd_inputs.LONGEST:
        return f"too long: {text}"
    return ""
