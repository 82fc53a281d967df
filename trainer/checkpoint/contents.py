"""What a checkpoint holds: variables, every replica's copy of some, and states with arrays.

`variables` is one `tf.train.Checkpoint` of the model, the optimizers, the state and everything else
in the trainer that has variables. TensorFlow saves one value per variable. Where replicas keep
copies that may differ (`tf.VariableSynchronization.ON_READ`: metrics, and statistics of a
`tf.Module`), that value is the sum or mean of the copies, from which the copies cannot be
recovered. A second file, `copies`, therefore holds every copy. A worker sees the copies of its own
replicas only, so several workers exchange the bits of all copies, and write them to `copies.npz`.
They are read only if the number of replicas is still the same. The state of the loss-scale rule is
in a third file, `scale`, and arrays in the states of callbacks are in `callbacks.npz`.
"""

import io
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaling
import strategies
from trainer.base.tracking import copies_of, leaves, tensorflow_variable, tracked, tracked_variables
from trainer.fingerprint import Fingerprint
from trainer.step.held_back import is_seed_state
from trainer.step.types import Variable

COPIES, ARRAYS = "copies.npz", "callbacks.npz"  # files
ENTRY = "bytes"  # shape (replicas, bytes), uint8: the copies of all variables, one after another
PLACE, DTYPE, SHAPE = "array", "dtype", "shape"  # keys of what stands for an array


class Contents:
    """The variables of a run, which can be written to and read from a folder.

    Args:
        items: objects that own variables (model, optimizers, state and others), keyed by name.
        loss_scaler: the state of the loss-scale rule. It is saved in a separate file because
            each rule has different variables.
        metrics: the training metrics, keyed by name.
        strategy: the strategy whose replicas may hold different copies.
    """

    def __init__(
        self,
        items: Mapping[str, Any],
        loss_scaler: scaling.LossScaler,
        metrics: Mapping[str, keras.metrics.Metric],
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Collects the variables, which must all have been created."""
        self.main = tf.train.Checkpoint(**items)
        self.scale = tf.train.Checkpoint(loss_scaler=loss_scaler)
        differing = [
            variable
            for variable in tracked_variables(items.values())
            if tensorflow_variable(variable).synchronization is tf.VariableSynchronization.ON_READ
        ]
        differing += [variable for metric in metrics.values() for variable in metric.variables]
        differing = list({id(variable): variable for variable in differing}.values())
        self.differing = describe(differing)  # variables whose copies may differ
        self._differing, self._strategy = differing, strategy
        by_place = {
            f"variable_{place}": list(copies_of(variable, strategy))
            for place, variable in enumerate(differing)
        }
        # Whether other copies are on other workers. Then they are in another file.
        self._on_workers = any(
            len(copies) < strategy.num_replicas_in_sync for copies in by_place.values()
        )
        if self._on_workers:
            self.differing = ["kept: of each worker", *self.differing]
        self.copies = tf.train.Checkpoint(**by_place)

    def holds(self) -> list[Variable]:
        """Returns the variables that are saved."""
        return [*saved_variables([self.main, self.scale]), *self._differing]

    def write(self, folder: str) -> None:
        """Writes all variables into a folder, on any file system that TensorFlow supports."""
        if self._on_workers:
            table = gathered(self._differing, self._strategy)
            write_arrays(f"{folder}/{COPIES}", {ENTRY: table})
        else:
            self.copies.write(f"{folder}/copies")
        self.scale.write(f"{folder}/scale")
        self.main.write(f"{folder}/variables")

    def read(self, folder: pathlib.Path, *, copies: bool, scale: bool) -> None:
        """Restores the variables. Call it in the strategy's scope.

        Args:
            folder: the checkpoint.
            copies: whether to read every replica's copy of the variables whose copies may differ.
            scale: whether to read the state of the loss-scale rule.

        Raises:
            ValueError: if the checkpoint has no value for a variable.
        """
        read_variables(self.main, folder, "model_dir")
        if copies and self._on_workers:
            table = read_arrays(folder / COPIES)[ENTRY]
            assign_own(self._differing, table, self._strategy)
        elif copies:
            self.copies.read(str(folder / "copies")).assert_existing_objects_matched()
        if scale:
            self.scale.read(str(folder / "scale")).assert_existing_objects_matched()


def read_variables(variables: tf.train.Checkpoint, folder: pathlib.Path, argument: str) -> None:
    """Restores objects from the file `variables` in a folder.

    Args:
        variables: the objects to restore.
        folder: the checkpoint.
        argument: name of the argument that selected the folder, for the error.

    Raises:
        ValueError: if the folder has no value for one of the variables.
    """
    try:
        # Values are matched by attribute name; those of objects that no longer exist are ignored.
        variables.read(str(folder / "variables")).assert_existing_objects_matched().expect_partial()
    except AssertionError as error:
        raise ValueError(
            f"`{argument}` must hold a value for every variable; got {folder}: {error}"
        ) from error


def others_with_variables(
    roots: Mapping[str, Any],
    items: Mapping[str, Any],
    metrics: Mapping[str, keras.metrics.Metric],
) -> tf.Module:
    """Returns a module with all that must be saved besides the items and the metrics of a run.

    Its attributes are the objects among the roots that TensorFlow can track, and then each variable
    that TensorFlow does not find, such as those of a Keras metric. The states of seed generators in
    layers are left out: each step sets them.

    Args:
        roots: the trainer's attributes, keyed by name.
        items: objects whose variables are saved already, keyed by name.
        metrics: the training metrics, which are saved separately.
    """
    elsewhere = keys_of(saved_variables(list(items.values())))
    elsewhere |= keys_of(v for metric in metrics.values() for v in metric.variables)
    holder = tf.Module()
    for name, value in roots.items():
        for place, leaf in enumerate(leaves(value)):
            if keys_of(saved_variables([leaf])) - elsewhere:
                setattr(holder, f"{name}_{place}", leaf)
    saved = elsewhere | keys_of(saved_variables([holder]))
    every = {**items, **{name: value for name, value in roots.items() if name not in items}}
    for item in tracked(*every.values()):
        if isinstance(item, keras.Layer):
            saved |= keys_of(variable for variable in item.variables if is_seed_state(variable))
    for name, root in every.items():
        for place, variable in enumerate(tracked_variables([root])):
            if not keys_of([variable]) & saved:
                setattr(holder, f"{name}.{place}", variable)
                saved |= keys_of([variable])
    return holder


def keys_of(variables: Iterable[Variable]) -> set[int]:
    """Returns the identities of variables; a `keras.Variable` has that of its `tf.Variable`."""
    return {id(tensorflow_variable(variable)) for variable in variables}


def saved_variables(roots: Sequence[Any]) -> list[Variable]:
    """Returns the variables that TensorFlow finds in objects when it saves these."""
    holder = tf.Module()
    for place, root in enumerate(roots):
        setattr(holder, f"root_{place}", root)  # tracked only if it can hold variables
    nodes = tf.train.TrackableView(holder).descendants()
    return [node for node in nodes if isinstance(node, (tf.Variable, keras.Variable))]


def describe(variables: Sequence[Variable]) -> list[str]:
    """Returns the name, dtype and shape of each variable, in the format of the manifest.

    Example:
        >>> describe([tf.Variable([[1.0, 2.0]], name="kernel")])
        ['kernel:0: float32 (1, 2)']
    """
    return [
        f"{getattr(variable, 'path', variable.name)}: "
        f"{tf.as_dtype(variable.dtype).name} {tf.TensorShape(variable.shape)}"
        for variable in variables
    ]


def comparable(variables: Mapping[str, Sequence[str]]) -> Fingerprint:
    """Returns what must be the same of variables for their values to be restored.

    Names are not compared, because Keras adds numbers that can differ between processes; but the
    last word of the name of an optimizer's variable says what the variable is for.

    Args:
        variables: results of `describe`, keyed by owner: "model", "optimizer" and so on.

    Example:
        >>> comparable({"model": ["a: float32 (2,)"], "optimizer": ["sgd_3/b_momentum: int32 ()"]})
        {'model[0]': 'float32 (2,)', 'optimizer[0]': 'momentum: int32 ()'}
    """
    found = {}
    for owner, lines in variables.items():
        for place, line in enumerate(lines):
            name, _, values = line.rpartition(": ")
            role = re.split("[/_]", re.sub(r"(_\d+)?(:\d+)?$", "", name))[-1]
            found[f"{owner}[{place}]"] = values if owner == "model" else f"{role}: {values}"
    return found


def gathered(variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> np.ndarray:
    """Returns the bytes of every replica's copies: shape (replicas, bytes), uint8.

    Every worker must call this function, in cross-replica context. Replicas exchange the bytes by
    adding them to zeros, as integers: that keeps every bit, also those of NaN and -0.0.
    """
    replicas, count = strategy.num_replicas_in_sync, sum(map(size_of, variables))

    def exchanged() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        values = [tensorflow_variable(variable).read_value() for variable in variables]
        row = tf.concat([tf.zeros([0], tf.uint8), *map(bytes_of, values)], axis=0)
        words = tf.bitcast(tf.reshape(tf.pad(row, [[0, -count % 8]]), [-1, 8]), tf.int64)
        own = tf.range(replicas) == context.replica_id_in_sync_group
        return strategies.sum_gradients(tf.where(own[:, None], words[None], tf.zeros([], tf.int64)))

    table = strategy.experimental_local_results(strategy.run(exchanged))[0].numpy()
    return np.ascontiguousarray(table).view(np.uint8)[:, :count]


def assign_own(
    variables: Sequence[Variable], table: np.ndarray, strategy: tf.distribute.Strategy
) -> None:
    """Assigns to each copy on this worker its part of what `gathered` returned."""

    def number() -> Any:
        return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)

    numbers = strategy.experimental_local_results(strategy.run(number))
    rows = [table[int(replica)].tobytes() for replica in numbers]
    start = 0
    for variable in variables:
        dtype, shape = tf.as_dtype(variable.dtype).as_numpy_dtype, tuple(variable.shape)
        end = start + size_of(variable)
        for copy, row in zip(copies_of(variable, strategy), rows, strict=True):
            copy.assign(np.frombuffer(row[start:end], dtype).reshape(shape))
        start = end


def size_of(variable: Variable) -> int:
    """Returns the number of bytes in a copy of a variable."""
    size: int = tf.as_dtype(variable.dtype).size
    return size * int(np.prod(tuple(variable.shape)))


def bytes_of(value: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of a tensor: shape (bytes,), uint8."""
    one_byte = tf.cast(value, tf.uint8) if value.dtype == tf.bool else value
    return tf.reshape(tf.bitcast(one_byte, tf.uint8), [-1])


def split(state: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Returns a state with its arrays replaced by their places, and adds them to `arrays`.

    Raises:
        TypeError: if the state holds a value that JSON has no type for.

    Example:
        >>> arrays = {}
        >>> split({"best": 0.5, "weights": [np.ones(2, np.float32)]}, arrays)
        {'best': 0.5, 'weights': [{'array': '0', 'dtype': 'float32', 'shape': [2]}]}
        >>> joined([{"array": "0", "dtype": "float32", "shape": [2]}], arrays)
        [array([1., 1.], dtype=float32)]
    """
    if isinstance(state, Mapping):
        return {name: split(value, arrays) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [split(value, arrays) for value in state]
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        place, dtype = str(len(arrays)), keras.backend.standardize_dtype(state.dtype)
        # NumPy's files do not know bfloat16 and float8, so the bytes are saved.
        arrays[place] = np.frombuffer(np.ascontiguousarray(state).tobytes(), np.uint8)
        return {PLACE: place, DTYPE: dtype, SHAPE: list(state.shape)}
    if not isinstance(state, (str, int, float, type(None))):
        raise TypeError(
            f"`state_dict` must return JSON types and NumPy arrays; got a {type(state).__name__}"
        )
    return state


def joined(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the state from which `split` made its arguments; tuples are lists."""
    if isinstance(state, Mapping):
        if set(state) == {PLACE, DTYPE, SHAPE}:
            dtype = tf.as_dtype(state[DTYPE]).as_numpy_dtype
            return np.frombuffer(arrays[state[PLACE]].tobytes(), dtype).reshape(state[SHAPE]).copy()
        return {name: joined(value, arrays) for name, value in state.items()}
    if isinstance(state, list):
        return [joined(value, arrays) for value in state]
    return state


def write_arrays(file: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file of arrays, on any file system that TensorFlow supports; none without arrays."""
    if arrays:
        contents = io.BytesIO()
        np.savez(contents, **arrays)  # type: ignore[arg-type]  # the names are keyword arguments
        with tf.io.gfile.GFile(file, "wb") as opened:
            opened.write(contents.getvalue())


def read_arrays(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write_arrays` wrote; none if there is no file."""
    if not file.is_file():
        return {}
    with np.load(file, allow_pickle=False) as found:
        return dict(found)
