"""Names for the types that are passed between the files of the step."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from scaling.ops.gradients import Gradient
from scaling.rules.rule import RuleState
from strategies.division import Batch, Share, count_examples

__all__ = [
    "Aux",
    "Batch",
    "GlobalBatchSize",
    "Gradient",
    "MetricsByName",
    "Model",
    "Optimizers",
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


class GlobalBatchSize(NamedTuple):
    """The size of the global batch, by which a share's losses are divided."""

    weight: tf.Tensor  # shape=(), float32: sum of the magnitudes of the example weights
    examples: tf.Tensor  # shape=(), int32: number of examples; a constant if the trace knows it

    @classmethod
    def of(cls, weights: tf.Tensor) -> "GlobalBatchSize":
        """Returns the size of the batch with these example weights: shape (global_batch,)."""
        return cls(tf.reduce_sum(tf.abs(weights)), count_examples(weights))


class StepInputs(NamedTuple):
    """The inputs of one attempt at an update; only `share` differs by replica."""

    share: (
        Share  # a replica's share; in cross-replica context those of all: see `strategies.shares`
    )
    global_batch: GlobalBatchSize
    scale_state: ScaleState  # its `loss_scale` multiplies the loss and divides the gradients
    random: tf.Tensor  # shape=(2,), int64: the run's seed, and the number of steps before this one
    in_float32: tf.Tensor | None  # shape=(), bool: whether to use float32; None for never
