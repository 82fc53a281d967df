"""Holds back what a Keras model assigns in its forward pass until the verdict is known.

It also casts a weight once for all iterations of a loop, such as the steps in time of an RNN.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.base.tracking import name_of_variable, tensorflow_variable, tracked
from trainer.keras_compat import casts_variables, uncast_variable
from trainer.step.trace import graph_around_loops, inner_graphs
from trainer.step.types import Model, Values, Variable


class HoldBack(keras.StatelessScope):
    """A scope in which assignments to Keras variables are only recorded.

    A variable that has been given a value, or was assigned inside the scope, reaches layers as a
    plain tensor. Any other variable is read as itself. Gradients are those of a loop without the
    scope: what reads a variable after an assignment has a gradient with respect to the variable,
    and none with respect to what was assigned.

    Args:
        variables: those whose assignments are held back.
        given: values of some of them, in place of their own.
        dropped: returns variables whose assignments are lost; None for all other variables. The
            rest are assigned, as a `tf.Variable` is, so the trace shows them to be written.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        given: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
        *,
        dropped: Callable[[], Sequence[keras.Variable]] | None = list,
    ) -> None:
        """Stores the variables that may be assigned, and the values that some of them have."""
        super().__init__(list(given), collect_losses=True)
        # Read outside of any layer, so that nothing is cast.
        self._read = {id(variable): tensorflow_variable(variable) for variable in variables}
        self._sources = {id(variable): value for variable, value in given}
        self._dropped = dropped
        self._cast: set[int] = set()  # assigned by a layer that reads in half precision
        # By the variable's id: what it was assigned, in order; and which variables were used.
        self._assigned: dict[int, list[tf.Tensor]] = {}
        self._used: set[int] = set()
        self._graph = tf.compat.v1.get_default_graph()
        self._casts = LoopCasts(self._graph)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | tf.Variable | None:
        """Returns a variable's value inside the scope. Keras calls this method.

        For a variable without a given or assigned value, this is the `tf.Variable` itself. Keras
        would compute the loss of a weight's regularizer from None. In a loop of the graph it is the
        value in the compute dtype: see `LoopCasts`.
        """
        self._used.add(id(variable))
        held = self.held_value(variable)
        source = self._read.get(id(variable)) if held is None else held
        if source is None or not casts_variables():
            return source
        return self._casts.cast(source, variable.dtype)

    def held_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value that a variable was given or assigned, or None."""
        return self.state_mapping.get(id(variable))

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Records an assignment. Keras calls this method."""
        variable, value = update[0], tf.convert_to_tensor(update[1])  # it may be another variable
        if not self._records(variable):
            assign_now(variable, value)
            return
        inner = inner_graphs(self._graph)
        if is_seed_state(variable) and inner - {"condition"}:  # a branch runs at most once
            raise ValueError(
                "`compute_loss` must not draw in a loop of the graph or a tf.function, where each "
                f"iteration draws the same numbers; got {variable.path!r}: unroll the loop"
            )
        if inner and not is_seed_state(variable):
            raise ValueError(
                "`compute_loss` must not assign Keras variables in a loop, a condition or a "
                f"tf.function of its own; got {variable.path!r}"
            )
        if casts_variables() and variable.dtype in ("float16", "bfloat16"):
            self._cast.add(id(variable))
        if value.dtype.is_floating:
            source = self._sources.get(id(variable), tensorflow_variable(variable))
            value = in_place_of(value, source) if variable.trainable else tf.stop_gradient(value)
        self._used.add(id(variable))
        self._assigned.setdefault(id(variable), []).append(value)
        super().add_update((variable, value))

    def _records(self, variable: keras.Variable) -> bool:
        """Returns whether an assignment is recorded, and not made at once."""
        if id(variable) in self._read or self._dropped is None:
            return True
        return any(variable is each for each in self._dropped())

    def is_cast(self, variable: keras.Variable) -> bool:
        """Returns whether a variable was assigned by a layer that reads in half precision."""
        return id(variable) in self._cast

    def assigned(self, variable: keras.Variable) -> Sequence[tf.Tensor]:
        """Returns what a variable was assigned in the scope, in order."""
        return self._assigned.get(id(variable), ())

    def uses(self, variable: keras.Variable) -> bool:
        """Returns whether a variable was read or assigned in the scope."""
        return id(variable) in self._used


def assign_now(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns a variable that is not held back.

    Raises:
        ValueError: if it is the state of a random generator that is given no keys, or a metric's,
            which an evaluation would not update.
    """
    if is_seed_state(variable):
        raise ValueError(
            "`seed` must be a SeedGenerator that the model or the trainer holds; got "
            f"{variable.path!r}, whose numbers would not depend on the step"
        )
    if variable.aggregation == "sum":
        raise ValueError(
            f"`compute_loss` must not update metrics; got {variable.path!r}: use update_metrics()"
        )
    uncast_variable(variable).assign(value)


def held_back_variables(model: Model, others: Sequence[Any] = ()) -> list[keras.Variable]:
    """Returns the Keras variables whose assignments in a loss are held back, the model's first.

    Seed generators are not included: see `randomness.seed_states`. Neither are the variables of
    metrics and optimizers, which a loss must not assign. For a `tf.Module` the list is empty.

    Args:
        model: the model.
        others: other objects that the loss may use; see `tracked`.
    """
    if not isinstance(model, keras.Layer):
        return []
    found = [*model.trainable_variables, *model.non_trainable_variables]
    owned: set[int] = set()
    for item in tracked(model, *others):
        if isinstance(item, keras.Layer):
            found += item.non_trainable_variables
        elif isinstance(item, (keras.metrics.Metric, keras.optimizers.Optimizer)):
            owned.update(id(variable) for variable in item.variables)
        elif isinstance(item, keras.Variable):
            found.append(item)
    of_model = {id(variable) for variable in model.variables}
    return [
        variable
        for key, variable in {id(variable): variable for variable in found}.items()
        if (key in of_model or key not in owned) and not is_seed_state(variable)
    ]


def read_values(variables: Sequence[keras.Variable], positions: Iterable[str]) -> Values:
    """Returns the current values of the held-back variables at the given positions."""
    return {
        position: tf.convert_to_tensor(tensorflow_variable(variables[int(position)]))
        for position in positions
    }


def frozen_or_unfrozen(planned: Sequence[Variable], model: Model) -> list[str] | None:
    """Returns the names of variables that a model no longer trains as planned; None if it does.

    Args:
        planned: the variables that were trainable when the step was planned.
        model: the model.
    """
    before = {id(variable): variable for variable in planned}
    now = {id(variable): variable for variable in model.trainable_variables}
    if [*before] == [*now]:
        return None
    return sorted(name_of_variable((before | now)[each]) for each in before.keys() ^ now.keys())


def is_seed_state(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a seed generator."""
    return str(variable.name) == "seed_generator_state"


class LoopCasts:
    """What the loops of one forward pass read of its variables, in the compute dtype.

    A layer in half precision casts a weight where it reads it: inside a loop of the graph in every
    iteration, since TensorFlow does not move the cast out (XLA does). Here it is cast before the
    loop, to the same bits. Gradients are summed over the iterations in the variable's own dtype,
    as before.
    """

    def __init__(self, outer: tf.Graph) -> None:
        """Stores the graph of the pass; without a loop inside it, nothing is cast here."""
        self._outer = outer
        # Keyed by the ids of the source and of the graph around the loop, and the dtype. The source
        # is kept, and a tensor keeps its graph, so no other object gets one of these ids.
        self._cast: dict[tuple[int, int, str], tuple[tf.Tensor | tf.Variable, tf.Tensor]] = {}

    def cast(self, source: tf.Tensor | tf.Variable, dtype: str) -> tf.Tensor | tf.Variable:
        """Returns the value that a layer reads, cast before the loop that is being traced.

        Args:
            source: the variable, or the tensor that the pass reads in its place.
            dtype: the dtype in which the layer reads it. For a Keras variable, `variable.dtype` is
                that one.

        Returns:
            In a loop, if the dtypes are different floating-point dtypes, the value in `dtype`,
            whose gradient goes to `source`; otherwise `source` itself.
        """
        wanted = tf.as_dtype(dtype)
        if not (source.dtype.is_floating and wanted.is_floating) or source.dtype == wanted:
            return source
        around = graph_around_loops(self._outer)
        if around is None:
            return source
        key = id(source), id(around), wanted.name
        if key not in self._cast:
            with around.as_default():
                self._cast[key] = source, tf.cast(source, wanted)
        return in_place_of(self._cast[key][1], source)


def in_place_of(value: tf.Tensor, source: tf.Tensor | tf.Variable) -> tf.Tensor:
    """Returns a value whose gradient goes to a variable, or to what a pass was given for it.

    Args:
        value: what is read instead of the variable; it may have another dtype.
        source: the variable, or the tensor that the pass reads in its place.
    """

    def replaced(value: tf.Tensor, source: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.identity(value), lambda gradient: (None, tf.cast(gradient, source.dtype))

    result: tf.Tensor = tf.custom_gradient(replaced)(value, tf.convert_to_tensor(source))
    return result
