"""A recorded overflow run again: the same verdict, and the first layer that went wrong (L18)."""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaling
import strategies
from trainer.replay.layer_probes import probing
from trainer.replay.recorder import Record, write_state
from trainer.step.accumulate import microbatch_inputs, with_written
from trainer.step.attempt import attempt_step
from trainer.step.microbatch import PassInputs
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.randomness import key_source
from trainer.step.replica import pass_inputs
from trainer.step.report import StepReport, describe_skip
from trainer.step.rollback import copies_of
from trainer.step.state import TrainState
from trainer.step.types import StepInputs, Written


@dataclasses.dataclass(frozen=True)
class Replay:
    """What came of running a recorded step again."""

    recorded: str  # why it was skipped
    again: str  # why it was skipped now
    place: str | None  # the first place that was not finite, if it is in a layer

    @property
    def same(self) -> bool:
        """Whether the verdict is the recorded one, in the same variable and number."""
        return self.recorded == self.again

    def __str__(self) -> str:
        """Three lines for a person."""
        return (
            f"recorded: {self.recorded}\n"
            f"now:      {self.again}{'' if self.same else '  (another verdict!)'}\n"
            f"first:    {self.place or 'not in a layer'}"
        )


def run_again(
    record: Record, dataset: tf.data.Dataset, state: dict[str, np.ndarray], plan: StepPlan
) -> Replay:
    """Runs a recorded step again, in the model of a trainer.

    Args:
        record: what was recorded of it.
        dataset: of the one global batch.
        state: the variables' values.
        plan: the trainer's; its model's variables take the recorded values.

    Raises:
        ValueError: if the model has other variables.
    """
    names = plan.variable_names
    variables = recorded_variables(plan)
    write_state(variables, state, plan.strategy)
    once = dataclasses.replace(plan, max_retries=0, float32_after=0 if record.in_float32 else None)
    with plan.strategy.scope():
        run = TrainState(plan.rule, record.random_seed)
    before = tf.one_hot(scaling.Cause.NONE, len(scaling.Cause), dtype=tf.int64) * (record.step - 1)
    run.outcomes.assign(before)  # random numbers are the step's
    at_scale = plan.rule.initial_state()._replace(loss_scale=tf.constant(record.loss_scale))
    run.loss_scaler.assign(at_scale)
    report = tf.function(lambda iterator: attempt_step(next(iterator), once, run))(iter(dataset))
    again = StepReport(*(field.numpy() for field in report))
    write_state(variables, state, plan.strategy)  # an update, if there was one, is undone
    numbers = dict.fromkeys(StepReport._fields, 0) | dataclasses.asdict(record)
    recorded = StepReport(**{name: numbers[name] for name in StepReport._fields})
    return Replay(
        recorded=describe_skip(recorded, names),
        again="applied" if again.grads_finite else describe_skip(again, names),
        place=first_bad_place(record, dataset, at_scale, plan),
    )


def recorded_variables(plan: StepPlan) -> list[Any]:
    """Returns what the loss reads, in the order in which a record keeps it."""
    return [*plan.held_back, *plan.undo]


def first_bad_place(
    record: Record, dataset: tf.data.Dataset, state: Any, plan: StepPlan
) -> str | None:
    """Returns the first output of a layer, or gradient of one, that is not finite, or None.

    Outputs are looked at in the order of the forward pass; if all are finite, gradients in the
    order of the backward pass. Several microbatches are looked at one after the other.
    """
    if not isinstance(plan.model, keras.Model):
        return None
    [batch] = dataset
    replica = max(record.bad_replica, 0)
    random = tf.constant([record.random_seed, record.step - 1], tf.int64)
    weights = tf.cast(plan.example_weights(batch), tf.float32)
    inputs = StepInputs(batch, weights, state, random, None)
    replicas = plan.strategy.num_replicas_in_sync
    share = strategies.take(strategies.whole(batch, weights), replica, replicas)
    for number, group in enumerate(plan.groups):
        source = key_source(random, number, len(plan.groups))
        values = [
            copies_of(variable, plan.strategy)[replica].read_value() for variable in plan.held_back
        ]
        own = pass_inputs(inputs._replace(random=source), share, values, replica, plan)
        look = Look(group, plan, dataset.element_spec, in_float32=record.in_float32)
        for index in range(plan.num_microbatches):
            flags, written = look.at(microbatch_inputs(own, index, values))
            bad = np.flatnonzero(~flags.numpy())
            if bad.size:
                return look.names[bad[0]]
            values = with_written(values, written)
    return None


class Look:
    """A forward and backward pass with probes in every layer, traced as in training."""

    def __init__(self, group: UpdateGroup, plan: StepPlan, spec: Any, *, in_float32: bool) -> None:
        """Traces nothing yet."""
        differentiate = group.differentiate_in_float32 if in_float32 else group.differentiate
        whole_batch = plan.strategy.num_replicas_in_sync * plan.num_microbatches == 1
        self.names: list[str] = []
        self._spec = spec if whole_batch else tf.nest.map_structure(any_rows, spec)

        def probed(inputs: PassInputs) -> tuple[tf.Tensor, Written]:
            with probing(plan.model) as probes:
                result = differentiate.python_function(inputs)
                loss = ("the loss, every layer's output being finite", result.nonfinite.loss == 0)
                seen = [*probes.forward, loss, *probes.backward]
                self.names = [place for place, _ in seen]
                return tf.stack([finite for _, finite in seen]), result.written

        self._probed = tf.function(
            probed, autograph=False, jit_compile=plan.jit_compile is True or None
        )

    def at(self, inputs: PassInputs) -> tuple[tf.Tensor, Written]:
        """Returns whether each of `names` was finite, and what the pass would write."""
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, inputs)
        rows = tf.TensorSpec([None], tf.float32)
        share = specs.share._replace(batch=self._spec, weights=rows)
        return self._probed.get_concrete_function(specs._replace(share=share))(inputs)


def any_rows(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Returns a spec without a number of rows: a share's is not known beforehand."""
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def check_setting(recorded: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises ValueError unless a trainer computes as the record's did."""
    for name, value in recorded.items():
        if name not in ("strategy", "loss_scale") and ours.get(name) != value:
            raise ValueError(
                f"`{name}` must be the record's to run it again; got {ours.get(name)!r} for a "
                f"record of {value!r}. Computed in another way, the step need not end in the same "
                "way. Make the trainer as it was in that run."
            )
