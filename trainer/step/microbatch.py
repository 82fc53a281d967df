"""The inputs, the results and the constants of a forward and backward pass.

`Kept` keeps the losses and the aux of a step for the program that passed its batch. An attempt may
stand in a loop or in a branch of the graph, whose tensors are out of reach after it.
So the rows wait in variables until the step has ended.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import keras
import tensorflow as tf

import strategies
from trainer.step.float8 import Float8Tensor
from trainer.step.objective import Objective
from trainer.step.types import Aux, GlobalBatchSize, Gradient, Model, ScaleState, Values, Variable

# The user's (batch, training) -> losses, or (losses, aux); see `Task.compute_loss`.
ComputeLoss: TypeAlias = Callable[..., Any]


class PassInputs(NamedTuple):
    """The inputs of a forward and backward pass on one replica."""

    share: strategies.Share  # the examples and their weights
    global_batch: GlobalBatchSize
    scale_state: ScaleState  # the loss-scale rule's state; its scale multiplies the loss
    # Values of variables in `MicrobatchPlan.held_back`; the pass reads those that are missing.
    values: Values
    keys: tf.Tensor  # shape=(generators, 2), int64: a key for each of `MicrobatchPlan.seeds`


class Contribution(NamedTuple):
    """What one microbatch adds to a step; summed over microbatches and replicas."""

    gradients: list[Gradient]  # gradients of the scaled losses; at least float32
    loss: tf.Tensor  # shape=(), float32: this part of the global weighted mean, unscaled
    regularization_loss: tf.Tensor  # shape=(), float32: this part of `model.losses`, unscaled
    # shape=(tensors, 3), float32: see `float8_counts.gathered_counts`; () if nothing is counted
    float8_counts: tf.Tensor | tuple[()] = ()


class NonfiniteFlags(NamedTuple):
    """What was inf or NaN in one microbatch. Flags are summed over a replica's microbatches."""

    loss: tf.Tensor  # shape=(), float32: 1 if the loss was not finite
    losses: tf.Tensor  # shape=(2,), float32: numbers of inf and NaN losses
    gradients: tf.Tensor  # shape=(gradients,), float32: 1 for each gradient that is not finite;
    # all 0 if the loss was not finite, and in a single pass: see `MicrobatchPlan.single_pass`


class Rows(NamedTuple):
    """What a pass has computed for each example; the first dimension of each tensor."""

    aux: Aux  # what `compute_loss` returned along with the losses; () if nothing
    # By the objective's name, in the shape of the weights; empty if they are not kept.
    losses: dict[str, tf.Tensor]


class Microbatch(NamedTuple):
    """The results of one forward and backward pass."""

    contribution: Contribution
    nonfinite: NonfiniteFlags
    # What the forward pass would have assigned. Floats are multiplied by the share's fraction of
    # the examples, so that their sum over all shares is a mean.
    written: Values
    replaced: Values  # values of variables that are replaced: see `passes.split_replaced`
    rows: Rows


@dataclasses.dataclass(frozen=True)
class MicrobatchPlan:
    """The constants of a forward and backward pass."""

    model: Model
    weights: Sequence[Variable]  # the variables that are trained: see `StepPlan`
    held_back: Sequence[keras.Variable]  # variables the pass reads and may assign, weights first
    seeds: Sequence[keras.Variable]  # states of the seed generators the pass may draw from
    compute_loss: ComputeLoss
    objectives: Sequence[Objective]  # the objectives whose gradients to compute
    dense: bool  # whether sparse gradients are made dense
    # Whether a step is one microbatch on one replica. If so, its gradients are not summed with
    # others, and `diagnose` checks them after a skip, so the pass itself does not check them.
    single_pass: bool
    fuse_batch_norm: bool  # whether to use TensorFlow's fused kernel: see `fused_batch_norm`
    earlier: tuple[str, ...] = ()  # names of the objectives whose optimizers had their turn before
    # Whether a loss is one number, a function of the whole global batch: see `gather`.
    global_loss: bool = False
    num_microbatches: int = 1  # number of parts that each replica's share is cut into
    float8: tuple[Float8Tensor, ...] = ()  # float8 tensors whose casts to count
    keep_losses: bool = False  # whether the pass returns the losses of the examples


class Differentiate(Protocol):
    """A forward and backward pass over one microbatch, as a `tf.function`."""

    def __call__(self, inputs: PassInputs) -> Microbatch:
        """Runs the pass."""

    def get_concrete_function(self, inputs: PassInputs) -> Any:
        """Returns the traced function, whose `structured_outputs` are the specs of its results."""

    @property
    def python_function(self) -> Any:
        """The function that is traced."""


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
