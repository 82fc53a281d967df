"""The variables in a checkpoint, and how each replica's copy of them is restored.

`variables` is one `tf.train.Checkpoint` of the model, the optimizers, the state and everything else
in the trainer that has variables. TensorFlow saves one value per variable. Where replicas keep
copies that may differ (`tf.VariableSynchronization.ON_READ`: metrics, and statistics of a
`tf.Module`), that value is the sum or mean of the copies, from which the copies cannot be
recovered. A second file, `copies`, therefore holds every copy (`copies.npz` those of several
workers); it is read only if the number of replicas is still the same. The state of the loss-scale
rule is in a third file, `scale`.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaling
from trainer.base.tracking import tensorflow_variable, tracked, tracked_variables
from trainer.checkpoint.worker_copies import read_worker_copies, write_worker_copies
from trainer.fingerprint import Fingerprint
from trainer.step.held_back import is_seed_state, leaves
from trainer.step.rollback import copies_of
from trainer.step.types import Variable


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
            write_worker_copies(folder, self._differing, self._strategy)
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
            read_worker_copies(folder, self._differing, self._strategy)
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
