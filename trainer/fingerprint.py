"""What a run declares, as text: a call, a resumed run and a worker notice by it that they differ.

A fingerprint maps places, such as "model.layers[1].rate", to values as text. It holds settings,
what `get_config()` tells of the model, its layers, the optimizers, the loss and the metrics, and
sums over the data. Three callers compare it with `diff`:

- the next call of a trainer traces its step again if what layers and optimizers declare has changed
  (`run/adapt.py`),
- a resumed run is refused if its checkpoint differs, unless `allow_changes` permits it
  (`check_resumable`),
- a job is refused if its workers differ (`run/declared.py`).

Code is not compared, nor what functions read from closures and modules, nor attributes that no
configuration tells. What cannot be described is left out, and is never an error.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import pathlib
import platform
import re
import types
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from trainer.keras_compat import all_layers, arguments_of_loss

Fingerprint: TypeAlias = dict[str, str]

# What `allow_changes` accepts: the first part of a place. Other changes are logged.
ALLOWABLE = (
    "precision",
    "loss_scale",
    "seed",
    "num_replicas",
    "global_batch",
    "data",
    "num_microbatches",
    "model",
    "optimizer",
    "loss",
    "global_clipnorm",
    "clipnorm",
    "clipvalue",
    "ema_momentum",
    "alternate_optimizers",
    "updates_per_step",
)

# Entries of a configuration that do not change what an object computes once it has its weights.
UNUSED = ("name", "build_input_shape", "batch_shape")
LONG = 32  # lists and arrays with more items are described by a hash, or by sums
MAX_ELEMENTS = 2**20  # how many elements of an array are read
LARGEST = 1e150  # larger numbers are taken for this one: the sum of their squares may overflow
TOLERANCE = 1e-5  # of sums over data, as a fraction of the norm
SUMS = re.compile(r"(?P<kind>.*), norm (?P<norm>\S+), projection (?P<projection>\S+)")


def fingerprint(
    model: Any, optimizers: Mapping[str, Any], policy: str, **declared: Any
) -> Fingerprint:
    """Returns what is declared of a run.

    Args:
        model: the model; `model.layers[0]` and so on are its layers at any depth.
        optimizers: the optimizers, keyed by the places of their entries.
        policy: the dtype policy of the run, which is left out where a layer has it.
        **declared: settings, losses, metrics and others, keyed by place.

    Example:
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dropout(0.5)])
        >>> found = fingerprint(model, {"optimizer": keras.optimizers.SGD(0.1)}, "float32", seed=1)
        >>> found["model.layers[0].rate"], found["optimizer.learning_rate"], found["seed"]
        ('0.5', '0.1', '1')
    """
    return model_entries(model, policy) | entries_of(optimizers) | entries_of(declared)


def diff(a: Fingerprint, b: Fingerprint) -> dict[str, tuple[str | None, str | None]]:
    """Returns the places at which two fingerprints differ, with both values; None: no such place.

    Example:
        >>> diff({"seed": "1", "clipnorm": "2"}, {"seed": "3"})
        {'seed': ('1', '3'), 'clipnorm': ('2', None)}
    """
    places = {**b, **a}
    return {at: (a.get(at), b.get(at)) for at in places if not same(a.get(at), b.get(at))}


def same(one: str | None, other: str | None) -> bool:
    """Returns whether two values are equal, sums over data up to rounding.

    Another processor may round differently where it prepares the same data.
    """
    if one == other or None in (one, other):
        return one == other
    mine, theirs = SUMS.fullmatch(one or ""), SUMS.fullmatch(other or "")
    if not (mine and theirs) or mine["kind"] != theirs["kind"]:
        return False
    bound = TOLERANCE * max(float(mine["norm"]), 1e-30)
    return all(abs(float(mine[x]) - float(theirs[x])) <= bound for x in ("norm", "projection"))


def select(fingerprint: Fingerprint, *groups: str) -> Fingerprint:
    """Returns the entries whose places begin with one of these parts.

    Example:
        >>> select({"data.batch": "4", "database": "x", "seed": "1"}, "data")
        {'data.batch': '4'}
    """
    return {place: text for place, text in fingerprint.items() if group_of(place) in groups}


def replaced(fingerprint: Fingerprint, new: Fingerprint, *groups: str) -> Fingerprint:
    """Returns a fingerprint with other entries in place of those that `select` returns."""
    return {at: text for at, text in fingerprint.items() if group_of(at) not in groups} | new


def group_of(place: str) -> str:
    """Returns the first part of a place.

    Example:
        >>> group_of("optimizer[1].momentum")
        'optimizer'
    """
    return re.split(r"[.\[]", place, maxsplit=1)[0]


def check_resumable(
    saved: Fingerprint, ours: Fingerprint, allowed: Collection[str], path: pathlib.Path
) -> set[str]:
    """Compares a run with the checkpoint that it resumes, and logs what has changed.

    Args:
        saved: the fingerprint in the checkpoint.
        ours: the fingerprint of this run.
        allowed: parts of `ALLOWABLE` that may differ.
        path: path of the checkpoint.

    Returns:
        The first parts of the places that differ.

    Raises:
        ValueError: if something of `ALLOWABLE` differs that is not allowed.
    """
    changes = diff(*comparable(saved, ours))
    groups = dict.fromkeys(map(group_of, changes))
    refused = [name for name in groups if name in ALLOWABLE and name not in allowed]
    if refused:
        [place, *_] = [each for each in changes if group_of(each) in refused]
        was, now = changes[place]
        raise ValueError(
            f"`{place}` must be {was} as in {path}, or pass "
            f"allow_changes={(*allowed, *refused)!r}; got {now}"
        )
    for place, (was, now) in changes.items():
        logging.warning("%s was %s in %s and is %s now", place, was, path, now)
    return {*groups}


def comparable(saved: Fingerprint, ours: Fingerprint) -> tuple[Fingerprint, Fingerprint]:
    """Returns what two runs can be compared by."""
    sides = [dict(saved), dict(ours)]

    def drop(pattern: str, keep: Collection[str] = ()) -> None:
        for side in sides:
            for place in [each for each in side if re.match(pattern, each)]:
                if place not in keep:
                    del side[place]

    # Not every resume mode looks into the data, and `train_on_batch` knows nothing of it.
    for pattern in ("data|global_batch", r"data\.pipeline", r"data\.content"):
        if not all(any(re.match(pattern, place) for place in side) for side in sides):
            drop(pattern)
    if saved.get("global_batch") != ours.get("global_batch"):  # the sizes follow from it
        drop(r"data\.(batch|pipeline)")
    if saved.get("precision") != ours.get("precision"):  # so does the policy of a layer
        drop(r"model.*\.dtype$")
    if saved.get("versions.keras") != ours.get("versions.keras"):  # which may describe more
        drop(r"(model|optimizer|loss|metrics)\b", keep=saved.keys() & ours.keys())
    return sides[0], sides[1]


@functools.cache
def versions() -> Mapping[str, str]:
    """Returns the versions of Python and of the packages that compute a step."""
    packages = ("halfstep", "tensorflow", "keras", "numpy")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def version(package: str) -> str:
    """Returns the version of a package, or that it is not installed: a clone on PYTHONPATH."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def model_entries(model: Any, policy: str, *, graphs: bool = True) -> Fingerprint:
    """Returns the entries of a model.

    Args:
        model: the model.
        policy: as for `fingerprint`.
        graphs: whether to say how models call their layers, which takes as long as all the rest.
    """
    if not isinstance(model, keras.Layer):
        return entries("model", type(model))
    inputs = keras.layers.InputLayer
    layers = [each for each in all_layers(model) if not isinstance(each, inputs)]
    names = {layer.name for layer in layers}
    inner = [layer for layer in layers if layer is not model]
    at = {id(layer): f"model.layers[{place}]" for place, layer in enumerate(inner)}
    found: Fingerprint = {}
    for layer in layers:
        place = at.get(id(layer), "model")
        found |= entries(place, type(layer))
        with contextlib.suppress(Exception):  # a user's class may return anything
            if graphs or not isinstance(layer, keras.Model):
                found |= entries(place, layer_config(layer), names)
    # A layer that can be trained, and has the policy of the run, is the usual case.
    usual = {"trainable": "True", "dtype": policy}
    return {at: text for at, text in found.items() if usual.get(at.rpartition(".")[2]) != text}


def layer_config(layer: keras.Layer) -> dict[str, Any]:
    """Returns what a layer or a model declares, without what its layers do."""
    config = config_of(layer)
    if rule := getattr(layer, "float8_rule", None):
        config["float8_rule"] = repr(rule)
    if isinstance(layer, keras.Sequential):
        config.pop("layers", None)
    elif "output_layers" in config:  # a functional model, which says what each layer is called with
        operations = config.pop("layers")
        config = with_positions({**config, "operations": operations}, operations)
    return config


def with_positions(value: Any, operations: Any) -> Any:
    """Returns part of a functional model's config with positions in place of operations' names.

    Keras numbers the names anew in each process.
    """
    places = {each["name"]: place for place, each in enumerate(operations)}

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            if "keras_history" in value.get("config", ()):
                return renamed(value["config"]["keras_history"])
            return {key: renamed(item) for key, item in value.items()}
        if not isinstance(value, list | tuple):
            return value
        if len(value) == 3 and isinstance(value[0], str) and value[0] in places:
            return "/".join(map(str, [places[value[0]], *value[1:]]))
        return [renamed(item) for item in value]

    return renamed(value)


def config_of(value: Any) -> dict[str, Any]:
    """Returns the configuration of an object of Keras; {} if it has none that can be read."""
    try:
        return {**value.get_config(), **arguments_of_loss(value)}
    except Exception:  # noqa: BLE001  # a user's class may raise anything here
        return {}


def entries_of(declared: Mapping[str, Any]) -> Fingerprint:
    """Returns the entries of several values, keyed by their places."""
    found: Fingerprint = {}
    for place, value in declared.items():
        found |= entries(place, value)
    return found


def entries(place: str, value: Any, apart: Collection[str] = ()) -> Fingerprint:
    """Returns the entries of a value: of each number, text or class in it.

    Args:
        place: the place of the value.
        value: a setting, an array, a function, an object of Keras or its configuration, or a list
            or dict of these.
        apart: names of layers that have entries of their own.

    Example:
        >>> entries("loss", keras.losses.Huber(delta=2.0))
        {'loss': 'Huber', 'loss.reduction': 'sum_over_batch_size', 'loss.delta': '2'}
        >>> entries("axis", [np.int64(1), None])
        {'axis[0]': '1', 'axis[1]': 'None'}
    """
    value = declared_in(value, apart)
    if value is None:
        return {}
    if isinstance(value, Mapping):
        found: Fingerprint = {}
        for key, item in value.items():
            if key not in UNUSED and not str(key).endswith("initializer"):
                found |= entries(f"{place}.{key}" if key else place, item, apart)
        return found
    if isinstance(value, list):
        found = {}
        for at, item in enumerate(value):
            found |= entries(f"{place}[{at}]", item, apart) or {f"{place}[{at}]": "None"}
        if len(value) > LONG and not any(isinstance(item, Mapping | list) for item in value):
            return {place: f"{len(value)} items, hash {digest(repr(found))}"}
        return found
    return {place: text_of(value)}


def declared_in(value: Any, apart: Collection[str]) -> Any:
    """Returns a value as None, a plain value, an array, a list or a dict; "" is its class."""
    if isinstance(value, Mapping) and "class_name" in value and "config" in value:
        return serialized(value, apart)
    if isinstance(value, tuple | set | frozenset | tf.TensorShape):
        return sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
    kinds = Mapping | list | bool | int | float | str | np.generic | np.ndarray | tf.Tensor
    if value is None or isinstance(value, kinds | type | tf.DType) or is_function(value):
        return value
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"": type(value), **fields}
    return {"": type(value), **config_of(value)}


def serialized(value: Mapping[str, Any], apart: Collection[str]) -> Any:
    """Returns an object in the form in which Keras writes it, as text or as a dict."""
    kind, config = str(value["class_name"]), value["config"]
    if kind in ("DTypePolicy", "function"):
        return config["name"] if isinstance(config, Mapping) else config
    nodes = {"called_with": value["inbound_nodes"]} if "inbound_nodes" in value else {}
    told = kind == "__lambda__" or not isinstance(config, Mapping)  # a lambda is code
    return {"": kind, **({} if told or config.get("name") in apart else config), **nodes}


def text_of(value: Any) -> str:
    """Returns a plain value, an array, a class or a function as text; of functions, the name."""
    if isinstance(value, np.ndarray | tf.Tensor):
        return text_of_array(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        # As in a program: 0.1, although it was a variable of float32; and 1 is 1.0.
        return str(single if float(single) == value else value).removesuffix(".0")
    if isinstance(value, bool | int | str):
        return str(value)
    if isinstance(value, tf.DType):
        return str(value.name)
    if isinstance(value, functools.partial):
        return f"partial of {text_of(value.func)}: {[*value.args, dict(value.keywords)]!r}"
    return str(getattr(value, "__name__", type(value).__name__))


def is_function(value: Any) -> bool:
    """Returns whether a value is a function or a method, also one that `tf.function` has made."""
    kinds = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
    return isinstance(value, kinds) or hasattr(value, "python_function")


def text_of_rule(rule: Any) -> str:
    """Returns a loss-scale rule as text that another process returns for the same rule, too.

    Example:
        >>> class Halving:
        ...     def __init__(self, start):
        ...         self.start = start
        >>> text_of_rule(Halving(2.0))
        'Halving(start=2.0)'
    """
    text = repr(rule)
    if hex(id(rule)) not in text:  # as in the one of `object`
        return text
    known = {name: value for name, value in vars(rule).items() if not name.startswith("_")}
    numbers = [f"{x}={y!r}" for x, y in sorted(known.items()) if isinstance(y, int | float | str)]
    return f"{type(rule).__name__}({', '.join(numbers)})"


def texts_of_arrays(arrays: Any) -> list[str]:
    """Returns what stands for each array in a structure; see `text_of_array`."""
    return [text_of_array(leaf) for leaf in tf.nest.flatten(arrays) if leaf is not None]


def text_of_array(array: Any) -> str:
    """Returns the dtype, the shape and two sums of an array; of strings, a hash.

    Up to a million elements in evenly spaced rows are summed with fixed random factors, so that the
    result depends on their order.

    Args:
        array: a NumPy array, a tensor, or a column of pandas.

    Example:
        >>> text_of_array(np.zeros([8, 2], np.float32))
        'float32 (8, 2), norm 0, projection 0'
    """
    if tf.is_symbolic_tensor(array):
        return f"{array.dtype.name} {array.shape}"
    shape = tuple(np.shape(array))
    values = np.asarray(some_rows(array, shape))
    kind = f"{values.dtype.name if values.dtype.kind in 'biufc' else 'string'} {shape}"
    if values.dtype.kind not in "biuf":
        return f"{kind}, hash {digest(repr(values.tolist()))}"
    numbers = np.nan_to_num(values.astype(np.float64), posinf=2.0, neginf=-2.0).ravel()
    numbers = np.clip(numbers, -LARGEST, LARGEST)
    factors = np.random.default_rng(0).random(numbers.size) - 0.5
    return f"{kind}, norm {np.linalg.norm(numbers):.9g}, projection {numbers @ factors:.9g}"


def some_rows(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns evenly spaced rows with at most `MAX_ELEMENTS` elements, but at least one row."""
    if not shape or math.prod(shape) <= MAX_ELEMENTS:
        return array
    count = max(1, MAX_ELEMENTS // max(1, math.prod(shape[1:])))
    rows = np.linspace(0, shape[0] - 1, count).astype(np.int64)
    if tf.is_tensor(array):
        return tf.gather(array, rows)
    if hasattr(array, "iloc"):
        return array.iloc[rows]
    return np.asarray(array)[rows]


def texts_of_pipeline(graph: tf.compat.v1.GraphDef) -> list[str]:
    """Returns what stands for the tensors in a pipeline of `tf.data`, and for its functions.

    Args:
        graph: the pipeline's graph. Its functions are those passed to `map`, `filter` and others.
    """
    tensors = [
        node.attr["value"].tensor
        for node in graph.node
        if node.op == "Const" and node.attr["value"].tensor.tensor_shape.dim
    ]
    functions = sorted(
        digest(repr([(node.op, digest_of_constant(node)) for node in function.node_def]))
        for function in graph.library.function
    )
    found = [text_of_constant(tensor) for tensor in tensors]
    return [*found, f"{len(functions)} functions, hash {digest(repr(functions))}"]


def text_of_constant(tensor: Any) -> str:
    """Returns what stands for a constant tensor, given as its protocol buffer.

    Of file names, only what follows the last slash counts: data may move to another folder.
    """
    if tensor.dtype == tf.variant.as_datatype_enum:  # sparse tensors, one for each element
        return f"sparse, hash {digest(tensor.SerializeToString(deterministic=True))}"
    values = value_of(tensor)
    if values.dtype.kind == "O":
        names = [bytes(value).rpartition(b"/")[2] for value in values.ravel()]
        values = np.array(names, object).reshape(values.shape)
    return text_of_array(values)


def digest_of_constant(node: tf.compat.v1.NodeDef) -> str:
    """Returns a hash of the number that an operation returns, if it is a constant."""
    tensor = node.attr["value"].tensor if node.op == "Const" else None
    if tensor is None or tensor.dtype == tf.string.as_datatype_enum:
        return ""
    if tensor.dtype == tf.variant.as_datatype_enum:
        return digest(tensor.SerializeToString(deterministic=True))
    return digest(value_of(tensor).tobytes())


def value_of(tensor: Any) -> np.ndarray:
    """Returns the value of a constant. `tf.make_ndarray` fails for some constants of strings."""
    value: np.ndarray = tf.io.parse_tensor(
        tensor.SerializeToString(), tf.as_dtype(tensor.dtype)
    ).numpy()
    return value


def digest(content: str | bytes) -> str:
    """Returns the first 12 digits of the SHA-256 of a text, in hexadecimal."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:12]
