"""What a checkpoint holds of a run's variables, and how every replica gets its copy back.

`variables` is one `tf.train.Checkpoint` of model, optimizers, state and whatever else the
trainer has that keeps variables. TensorFlow stores one value of a variable there; where
replicas keep copies that may differ (`tf.VariableSynchronization.ON_READ`: metrics, and
statistics of a module) that value is their sum or mean, from which no copy can be had back
to the bit. `copies` is a second one, of those copies; it is read if there are as many
replicas.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaling
from trainer.step.held_back import contents
from trainer.step.rollback import copies_of, tensorflow_variable, variables_in_reach


class Contents:
    """A run's variables, to be written to and read from a folder.

    Args:
        items: what has variables, by name: model, optimizers, counts and others.
        loss_scaler: the loss-scale rule's state, in a file of its own: another rule has another.
        metrics: the training's, by name.
        strategy: whose replicas have copies of them.
    """

    def __init__(
        self,
        items: Mapping[str, Any],
        loss_scaler: scaling.LossScaler,
        metrics: Mapping[str, keras.metrics.Metric],
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Looks for the variables; all must exist by now."""
        self.main = tf.train.Checkpoint(**items)
        self.scale = tf.train.Checkpoint(loss_scaler=loss_scaler)
        differing = [
            variable
            for variable in variables_in_reach(list(items.values()), held_back=())
            if tensorflow_variable(variable).synchronization is tf.VariableSynchronization.ON_READ
        ]
        differing += [variable for metric in metrics.values() for variable in metric.variables]
        self.differing = describe(differing)
        by_place = {
            f"variable_{place}": list(copies_of(variable, strategy))
            for place, variable in enumerate(differing)
        }
        if any(len(each) < strategy.num_replicas_in_sync for each in by_place.values()):
            # The others are other workers': what all come to is all that the chief can keep.
            self.differing = ["kept: of all workers together", *self.differing]
            by_place = {f"sum_{place}": each for place, each in enumerate(differing)}
        self.copies = tf.train.Checkpoint(**by_place)

    def write(self, folder: str) -> None:
        """Writes everything into a folder, on any file system that TensorFlow knows."""
        self.copies.write(f"{folder}/copies")
        self.scale.write(f"{folder}/scale")
        self.main.write(f"{folder}/variables")

    def read(self, folder: pathlib.Path, *, copies: bool, scale: bool) -> None:
        """Reads it back; two of the files only if asked for. Call it in the strategy's scope.

        Raises:
            ValueError: if there is no value for a variable.
        """
        read_all(self.main, folder, "model_dir")
        if copies:
            self.copies.read(str(folder / "copies")).assert_existing_objects_matched()
        if scale:
            self.scale.read(str(folder / "scale")).assert_existing_objects_matched()


def read_all(variables: tf.train.Checkpoint, folder: pathlib.Path, argument: str) -> None:
    """Reads `variables` from a folder, or raises ValueError if it has not all of them.

    Args:
        variables: what to read.
        folder: where from.
        argument: what its user calls the folder, for the error.
    """
    try:
        # What it has beside, of objects that are no more, is left.
        variables.read(str(folder / "variables")).assert_existing_objects_matched().expect_partial()
    except AssertionError as error:
        raise ValueError(
            f"`{argument}` must have a value for every variable; got {folder}: {error}. They "
            "would be left as they are. Give model, trainer and their layers the attributes that "
            "they had there, or use another model_dir."
        ) from error


def attributes_with_variables(owner: Any, known: Sequence[Any]) -> tf.Module:
    """Returns a module that holds what an object has beside some things and keeps variables.

    Args:
        owner: whose attributes are looked at: variables, layers, modules, generators, in
            containers however deep.
        known: what is held elsewhere.
    """
    elsewhere = variables_in_reach(known, held_back=())
    holder = tf.Module()
    for name, value in vars(owner).items():
        for place, leaf in enumerate(contents(value)):
            if variables_in_reach([leaf], held_back=elsewhere):
                setattr(holder, f"{name}_{place}", leaf)
    return holder


def describe(variables: Sequence[Any]) -> list[str]:
    """Returns name, dtype and shape of each variable, as a manifest keeps them.

    Example:
        >>> describe([tf.Variable([[1.0, 2.0]], name="kernel")])
        ['kernel:0: float32 (1, 2)']
    """
    return [
        f"{getattr(variable, 'path', variable.name)}: "
        f"{tf.as_dtype(variable.dtype).name} {tf.TensorShape(variable.shape)}"
        for variable in variables
    ]


def first_difference(
    ours: Sequence[str], theirs: Sequence[str], *, kinds: bool = False
) -> str | None:
    """Returns where two results of `describe` differ first, with both sides; None if nowhere.

    Names are not compared: Keras numbers them through within a process.

    Args:
        ours: of the variables here.
        theirs: of those there.
        kinds: whether to compare the last word of a name, which says what an optimizer's
            variable is for.

    Example:
        >>> first_difference(["a: float32 (2,)"], ["b: float32 (2,)", "c: float32 ()"])
        'none here for c: float32 () there, at place 1'
    """
    for place in range(max(len(ours), len(theirs))):
        here, there = [side[place] if place < len(side) else "none" for side in (ours, theirs)]
        if compared(here, kinds=kinds) != compared(there, kinds=kinds):
            return f"{here} here for {there} there, at place {place}"
    return None


def compared(line: str, *, kinds: bool) -> str:
    """Returns what is compared of a line of `describe`; see `first_difference`.

    Example:
        >>> compared("sgd_3/dense_7_kernel_momentum: float32 (2,)", kinds=True)
        'momentum: float32 (2,)'
    """
    name, _, values = line.rpartition(": ")
    if not kinds:
        return values
    unnumbered = re.sub(r"(_\d+)?(:\d+)?$", "", name)
    return f"{re.split('[/_]', unnumbered)[-1]}: {values}"
