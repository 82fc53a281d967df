"""Keeps the losses and the aux of a step for the program that passed its batch.

An attempt may stand in a loop or in a branch of the graph, whose tensors are out of reach after it.
So the rows wait in variables until the step has ended.
"""

from typing import Any

import tensorflow as tf

from trainer.step.microbatch import Rows


class Kept:
    """The losses and the aux of the last attempt of each update group; see `StepPlan.kept`."""

    def __init__(self) -> None:
        """Creates no variables: what there is to keep is known when the step is traced."""
        self._variables: dict[Any, tf.Variable] = {}
        # By name of the loss, and None for aux: rows of the step that is being traced, as they
        # were computed, and the variables that hold them.
        self._traced: dict[str | None, tuple[Any, list[tf.Variable]]] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables in which rows wait."""
        return list(self._variables.values())

    def keep(self, rows: Rows, strategy: tf.distribute.Strategy, examples: int | None) -> None:
        """Keeps rows that an update group has computed. Call it in cross-replica context.

        Args:
            rows: the rows of each replica.
            strategy: the strategy of the replicas.
            examples: the size of the batch if XLA compiles the step: it assigns no other shape than
                a variable has. None: any size.
        """

        def whole(rows: Any) -> Any:
            parts = strategy.experimental_local_results(rows)
            return tf.concat(parts, 0) if len(parts) > 1 else parts[0]

        rows = tf.nest.map_structure(whole, rows)
        for name, tree in [(None, rows.aux), *rows.losses.items()]:
            held = []
            for index, leaf in enumerate(tf.nest.flatten(tree, expand_composites=True)):
                shape = (0,) * leaf.shape.rank
                if examples:
                    shape = tuple(examples if size is None else size for size in leaf.shape)
                key = name, index, leaf.dtype, shape
                if key not in self._variables:
                    with tf.init_scope():
                        zeros = tf.zeros(shape, leaf.dtype)
                        self._variables[key] = tf.Variable(zeros, shape=tf.TensorShape(None))
                self._variables[key].assign(leaf)
                held.append(self._variables[key])
            self._traced[name] = tree, held

    def take(self) -> Rows:
        """Returns the rows of the whole batch. Call it after the step, in the same graph."""
        found = {
            name: tf.nest.pack_sequence_as(
                tree, [variable.read_value() for variable in held], expand_composites=True
            )
            for name, (tree, held) in self._traced.items()
        }
        self._traced = {}
        return Rows(found.pop(None), {name: found[name] for name in found if name is not None})
