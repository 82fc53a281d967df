"""What the files of the step pass on: its inputs, and the constants and results of a pass."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import keras
import tensorflow as tf

from scaling.ops.gradients import Gradient
from scaling.rules.rule import RuleState
from strategies.division import Batch, Share, count_examples

if TYPE_CHECKING:
    from trainer.step.float8 import Float8Tensor
    from trainer.step.objective import Objective

__all__ = [
    "Aux",
    "Batch",
    "ComputeLoss",
    "Contribution",
    "Differentiate",
    "GlobalBatchSize",
    "Gradient",
    "MetricsByName",
    "Microbatch",
    "MicrobatchPlan",
    "Model",
    "NonfiniteFlags",
    "Optimizers",
    "PassInputs",
    "Rows",
    "ScaleState",
    "StepInputs",
    "Values",
    "Variable",
]

# What `compute_loss` returns along with the losses: any structure of tensors; `()` if nothing.
Aux: TypeAlias = Batch

Model: TypeAlias = keras.Layer | tf.Module  # a keras.Model is a layer, too
Variable: TypeAlias = keras.Variable | tf.Variable

# One optimizer, or a dict of optimizers, keyed by the model's attribute that each one updates.
Optimizers: TypeAlias = keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer]

MetricsByName: TypeAlias = dict[str, keras.metrics.Metric]

# Values of variables, keyed by the variable's position in `StepPlan.held_back`. The positions are
# strings because TensorFlow sorts the keys of a dict.
Values: TypeAlias = dict[str, tf.Tensor]

# The state of a loss-scale rule: a NamedTuple of tensors whose first field is `loss_scale`.
ScaleState: TypeAlias = RuleState

# The user's (batch, training) -> losses, or (losses, aux); see `Task.compute_loss`.
ComputeLoss: TypeAlias = Callable[..., Any]


class GlobalBatchSize(NamedTuple):
    """The size of the global batch, by which a share's losses are divided."""

    weight: tf.Tensor  # shape=(), float32: sum of the magnitudes of the example weights
    examples: tf.Tensor  # shape=(), int32: number of examples; a constant if the trace knows it

    @classmethod
    def of(cls, weights: tf.Tensor) -> "GlobalBatchSize":
        """Returns the size of the batch with these example weights: shape (global_batch,)."""
        return cls(tf.reduce_sum(tf.abs(weights)), count_examples(weights))

    def fraction(self, share: Share) -> tf.Tensor:
        """Returns a share's fraction of the examples; 0 if it is empty: shape (), float32."""
        return tf.cast(share.examples / self.examples, tf.float32)


class StepInputs(NamedTuple):
    """The inputs of one attempt at an update; only `share` differs by replica."""

    share: (
        Share  # a replica's share; in cross-replica context those of all: see `strategies.shares`
    )
    global_batch: GlobalBatchSize
    scale_state: ScaleState  # its `loss_scale` multiplies the loss and divides the gradients
    random: tf.Tensor  # shape=(2,), int64: the run's seed, and the number of steps before this one
    in_float32: tf.Tensor | None  # shape=(), bool: whether to use float32; None for never


class PassInputs(NamedTuple):
    """The inputs of a forward and backward pass on one replica."""

    share: Share  # the examples and their weights
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
    # shape=(tensors, 3), float32: see `float8.gathered_counts`; () if nothing is counted
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
    objectives: "Sequence[Objective]"  # the objectives whose gradients to compute
    dense: bool  # whether sparse gradients are made dense
    # Whether a step is one microbatch on one replica. If so, its gradients are not summed with
    # others, and `diagnose` checks them after a skip, so the pass itself does not check them.
    single_pass: bool
    fuse_batch_norm: bool  # whether to use TensorFlow's fused kernel: see `fused_batch_norm`
    earlier: tuple[str, ...] = ()  # names of the objectives whose optimizers had their turn before
    # Whether a loss is one number, a function of the whole global batch: see `gather`.
    global_loss: bool = False
    num_microbatches: int = 1  # number of parts that each replica's share is cut into
    float8: "tuple[Float8Tensor, ...]" = ()  # float8 tensors whose casts to count
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
