"""Runs a recorded overflow again: the same verdict, and the first layer that went wrong (L18).

    python -m trainer.replay RUN/overflows/step-00000120 --trainer=my_module:MyTrainer

`--trainer` names a `Trainer` class or a function that returns a trainer; it is called with
the record's settings. It is the only code that runs, and the record does not name it.
"""

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import scaling
import strategies
from trainer.probe import probing
from trainer.recorder import Record, write_state
from trainer.step.accumulate import with_written
from trainer.step.attempt import attempt_step
from trainer.step.differentiate import Whole, keras_variables
from trainer.step.plan import Phase, StepPlan
from trainer.step.report import StepReport, describe_skip, report_spec
from trainer.step.rollback import copies_of
from trainer.step.state import TrainState


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
    record: Record, batch: Any, state: dict[str, np.ndarray], plan: StepPlan
) -> Replay:
    """Runs a recorded step again, in the model of a trainer.

    Args:
        record: what was recorded of it.
        batch: the global batch.
        state: the variables' values.
        plan: the trainer's; its model's variables take the recorded values.

    Raises:
        ValueError: if the model has other variables.
    """
    names = [getattr(v, "path", v.name) for v in plan.model.trainable_variables]
    variables = recorded_variables(plan)
    write_state(variables, state, plan.strategy)
    once = dataclasses.replace(
        plan, max_retries=0, float32_after=0 if record.in_float32 else None
    )
    with plan.strategy.scope():
        run = TrainState(plan.rule)
    at_scale = plan.rule.initial_state()._replace(loss_scale=tf.constant(record.loss_scale))
    run.loss_scaler.assign(at_scale)
    report = tf.function(lambda batch: attempt_step(batch, once, run))(batch)
    again = StepReport(*(field.numpy() for field in report))
    write_state(variables, state, plan.strategy)  # an update, if there was one, is undone
    numbers = dict.fromkeys(report_spec(0)._fields, 0) | dataclasses.asdict(record)
    recorded = StepReport(**{name: numbers[name] for name in StepReport._fields})
    return Replay(
        recorded=describe_skip(recorded, names),
        again="applied" if again.grads_finite else describe_skip(again, names),
        place=first_bad_place(record, batch, at_scale, plan),
    )


def recorded_variables(plan: StepPlan) -> list[Any]:
    """Returns what the loss reads, in the order in which a record keeps it."""
    return [*keras_variables(plan.model), *plan.undo]


def first_bad_place(record: Record, batch: Any, state: Any, plan: StepPlan) -> str | None:
    """Returns the first output of a layer, or gradient of one, that is not finite, or None.

    Outputs are looked at in the order of the forward pass; if all are finite, gradients in the
    order of the backward pass. Several microbatches are looked at one after the other.
    """
    if not isinstance(plan.model, keras.Model):
        return None
    replica = max(record.bad_replica, 0)
    weights = tf.cast(plan.example_weights(batch), tf.float32)
    whole = Whole(tf.reduce_sum(weights), tf.shape(weights)[0])
    share = strategies.take(
        strategies.whole(batch, weights), replica, plan.strategy.num_replicas_in_sync
    )
    for phase in plan.phases:
        values = [
            copies_of(variable, plan.strategy)[replica].read_value()
            for variable in keras_variables(plan.model)
        ]
        look = Look(phase, plan, in_float32=record.in_float32)
        for index in range(plan.num_microbatches):
            part = strategies.take(share, index, plan.num_microbatches)
            flags, written = look.at(part, whole, state, values)
            bad = np.flatnonzero(~flags.numpy())
            if bad.size:
                return look.names[bad[0]]
            values = with_written(values, written)
    return None


class Look:
    """A forward and backward pass with probes in every layer, compiled as in training."""

    def __init__(self, phase: Phase, plan: StepPlan, *, in_float32: bool) -> None:
        """Traces nothing yet."""
        way = phase.differentiate_in_float32 if in_float32 else phase.differentiate
        self.names: list[str] = []

        def probed(*args: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            with probing(plan.model) as probes:
                result = way.python_function(*args)
                self.names = probes.names()
                return probes.flags(), result.written

        self.at = tf.function(probed, jit_compile=plan.jit_compile or None, autograph=False)


def check_setting(recorded: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises ValueError unless a trainer computes as the record's did."""
    for name, value in recorded.items():
        if ours.get(name) != value:
            raise ValueError(
                f"`{name}` must be the record's to run it again; got {ours.get(name)!r} for a "
                f"record of {value!r}. Another way to compute need not end the same way. Make the "
                f"trainer with {name}={value!r}."
            )


def load(name: str) -> Any:
    """Returns what "module:attribute" names, which is imported.

    Raises:
        ValueError: if it is not of this form, or there is no such thing.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`--trainer` must be module:Class; got {name!r}: {error}. The class is imported and "
            "called with the record's settings. Give for instance --trainer=digits:Digits."
        ) from error


def main(argv: Sequence[str]) -> None:
    """Runs the record that the command line names."""
    if len(argv) != 2 or not flags.FLAGS.trainer:
        raise app.UsageError("Give a record's folder, and --trainer=module:Class.")
    path = pathlib.Path(argv[1])
    setting = scaling_free(Record.read(path).setting)
    trainer = load(flags.FLAGS.trainer)(verbose=False, **setting)
    print(trainer.replay(path))


if __name__ == "__main__":
    flags.DEFINE_string("trainer", None, "module:Class of the trainer that the run had.")
    sys.path.insert(0, "")
    app.run(main)
