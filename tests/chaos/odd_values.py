"""Values that a caller may pass by mistake, and the rules for which of them fit an annotation.

Every value is code, so that it is made anew for each case and is its own label.
"""

import collections.abc
import decimal
import fractions
import pathlib
import sys
import types
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import scaling
import strategies
import trainer


class BytesPath:
    """A path of bytes, as `os.scandir(b".")` gives."""

    def __fspath__(self):
        """Bytes."""
        return b"runs/a"


class Rude:
    """Cannot be compared or printed."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise ArithmeticError("compared")

    def __repr__(self):
        raise ArithmeticError("printed")


NUMBERS = """
0; 1; -1; 2; 3; 1000; 2**31; 2**53 + 1; 2**62; sys.maxsize; 2**63; -(2**63); 10**400; 0.0; -0.0; 0.5
1.0; 2.0; -1.5; 1e-300; 5e-324; 1e39; 1e308; float("nan"); float("inf"); -float("inf")
True; False; np.int64(3); np.int8(-128); np.uint64(2**64 - 1); np.float32(2); np.float64("nan")
np.float16("inf"); np.bool_(True); np.array(3); np.array(2.0); fractions.Fraction(1, 2)
fractions.Fraction(1, 3); decimal.Decimal(2); 1j; "1"; "2.0"; "nan"; b"1"
"""
STRINGS = r"""
""; " "; "\n"; "a\0b"; "\ud800"; "x" * 100_000; "naïve 日本語"; "{0}"; "%s %d"; "`x` must be y; got z"
"None"; "0"; "1e400"; "nan"; "1024"; "1000"; "dynamic:"; "dynamic:growth_interval=0"; "pytorch"
"dynamic:growth_interval=1:growth_interval=2"; "mixed_float16\n"; "Mixed_Float16"; "float16"; "half"
" float32"; "meann"; "Mean"; "dynamic "; "fixed:loss_scale=nan"; "1" * 5000; "jmp:"; "=;:,"
b"float32"; bytearray(b"mean"); np.str_("mean"); np.bytes_(b"mean")
"""
PATHS = r"""
"."; ".."; "~"; "~nobody_here/runs"; "notes.txt"; "notes.txt/runs"; "/dev/null"; "/dev/null/runs"
"/proc/nowhere"; "x" * 300; "runs/" + "x" * 5000; "runs/[1]"; "runs/a*?"; "runs\\a"; "gs://bucket/a"
"file:///tmp/a"; "runs/\ud800"; "runs/\udcff"; "runs/a\0b"; "runs/a\nb"; "runs/é 日本"
pathlib.Path(""); pathlib.Path("runs/a"); pathlib.PurePosixPath("runs/b"); pathlib.Path("a\0b")
pathlib.PureWindowsPath("C:/runs"); BytesPath(); b"runs/a"; "model.h5"; "model.keras/"; ".keras"
"""
COLLECTIONS = """
[]; (); {}; set(); frozenset({"seed"}); {"seed"}; ["seed"]; [1, 2]; (2, 1); (1, 2, 3); [None]; [[]]
[True]; [-1.0]; [float("nan")]; ["a", "a"]; [""]; ["("]; [b"a"]; {"a": 1}; {"a": None}; {1: 2}
{0: 1.0}; {0: float("nan")}; {None: None}; {"a": {"b": 1}}; {-1: 1.0}; {0.5: 1.0}; {"0": 1.0}
{True: 2.0}; range(3); iter([1]); (i for i in range(3)); types.MappingProxyType({"a": 1})
np.array(["seed"]); collections.OrderedDict(a=1); "seed"; "ab"; [print]; [Rude()]; {Rude(): 1}
((2.0, 25),); ((float("nan"), 25),); [[1, 2], [3]]; [lambda: None]; dict.fromkeys(range(100))
"""
CALLABLES = """
lambda: None; lambda: 3; lambda: "text"; lambda *found, **named: None; lambda *found: 1 / 0; print
int; object; type; dict; len; print.__call__; functools.partial(int, "3"); Rude; (lambda: (yield))
keras.Model; keras.Sequential; keras.optimizers.SGD; keras.losses.MeanSquaredError
keras.metrics.MeanSquaredError; tf.Module; scaling.DynamicLossScale; mock.Mock(); tf.nn.relu
"""
TENSORS = """
tf.constant(1.0); tf.constant([1.0, float("nan")]); tf.constant(1); tf.constant(True)
tf.constant([True]); tf.constant("text"); tf.constant(1j); tf.zeros([0]); tf.zeros([0, 1])
tf.zeros([4, 1], tf.float16); tf.ones([4, 1], tf.float64); tf.constant(3, tf.uint64); tf.ones([2, 2])
tf.ragged.constant([[1.0], [2.0, 3.0]]); tf.sparse.from_dense([[1.0, 0.0]]); tf.Variable(1.0)
tf.IndexedSlices(tf.ones([2, 1]), tf.constant([0, 0])); tf.TensorSpec([], tf.float32); tf.float16
tf.IndexedSlices(tf.constant([1j]), tf.constant([0])); tf.TensorArray(tf.float32, 1); tf.Tensor
keras.Input([1]); keras.Variable(1.0); tf.constant([1.0], tf.bfloat16); np.array([1.0, 2.0])
tf.IndexedSlices(tf.constant([1, 2]), tf.constant([0, 0])); tf.ones([4, 1]); np.ones([4, 1])
np.array([None, "a"], dtype=object); np.array([1 + 1j]); np.zeros([0]); np.array(["a"])
np.zeros(3, dtype=[("a", "f4")]); np.array("2024-01-01", dtype="datetime64[D]"); np.array(None)
np.ma.masked_array([1.0, 2.0], [True, False]); np.array([2**63], np.uint64); [[1.0], [1.0, 2.0]]
[tf.ones([2]), tf.constant("text")]; {"a": tf.constant(1j)}; tf.data.Dataset.range(3)
tf.data.Dataset.from_tensors(tf.ones([4, 1])); iter(tf.data.Dataset.range(3)); tf.constant(0)
(np.ones([4, 1]), np.ones([3, 1])); (np.ones([4, 1]), None); (np.ones([4, 1]),); np.matrix([[1.0]])
(np.ones([4, 1]), np.ones([4, 1])); (np.array(1.0), np.array(1.0)); np.longdouble(1); [1.0, None]
"""
OBJECTS = """
None; ...; NotImplemented; object(); Rude(); Exception("text"); slice(3); pathlib; tf
keras.optimizers.SGD(); keras.losses.MeanSquaredError(); keras.metrics.Mean(); keras.layers.Dense(1)
keras.DTypePolicy("mixed_float16"); keras.Sequential(); tf.Module(); scaling.DynamicLossScale()
scaling.Cause.WEIGHTS; scaling.Verdict(True); scaling.Verdict("text"); scaling.LayerwiseLossScale()
types.SimpleNamespace(shape=(3,), loss_scale="high"); tf.distribute.get_strategy()
tf.distribute.Strategy; keras.callbacks.EarlyStopping(); keras.random.SeedGenerator(1)
scaling.FixedLossScale(8.0).initial_state(); scaling.DynamicLossScale().initial_state()
scaling.DynamicLossScaleState("a", None, 3); scaling.FixedLossScaleState(tf.constant(float("nan")))
trainer.Divergence(rise=2.0); trainer.Callback(); trainer.Action(print, every_steps=1)
"""
NAMES = {
    **{module.__name__: module for module in (decimal, fractions, np, pathlib, sys, types, mock)},
    "np": np,
    "mock": mock,
    "tf": tf,
    "keras": keras,
    "scaling": scaling,
    "strategies": strategies,
    "trainer": trainer,
    "collections": collections,
    "functools": __import__("functools"),
    "BytesPath": BytesPath,
    "Rude": Rude,
}


def codes(text):
    """The codes in a text, which are separated by semicolons and lines."""
    found, rest = [], ""
    for part in text.strip().replace("\n", "; ").split("; "):
        rest = f"{rest}; {part}" if rest else part
        try:
            compile(rest, "value", "eval")
        except SyntaxError:
            continue
        found.append(rest)
        rest = ""
    assert not rest, rest
    return found


POOLS = {
    name: codes(text)
    for name, text in {
        "numbers": NUMBERS,
        "strings": STRINGS,
        "paths": PATHS,
        "collections": COLLECTIONS,
        "callables": CALLABLES,
        "tensors": TENSORS,
        "objects": OBJECTS,
    }.items()
}
ALL = list(dict.fromkeys(code for pool in POOLS.values() for code in pool))


def made(code):
    """The value of a code, made anew."""
    return eval(code, NAMES)  # noqa: S307  # the codes above
