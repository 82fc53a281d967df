"""Tries a step, an evaluation and a checkpoint before a long run, and restores all variables."""

import contextlib
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.base.tracking import copies_of, read_copies, tracked, tracked_variables, write_copies
from trainer.data.batches import Batches, batches, repeat_first_batch
from trainer.data.errors import reason_of
from trainer.data.reader import untuned
from trainer.fingerprint import text_of_rule
from trainer.log.model_table import frozen_parameters, total_size, variable_rows
from trainer.log.run_log import format_results
from trainer.log.summary import format_bytes, format_number, power_of_two
from trainer.run.build import attributes_of, make_checkpoints
from trainer.run.gradient_check import check_gradients
from trainer.run.parts import Parts
from trainer.run.slots import optimizers_by_item
from trainer.step.plan import StepPlan
from trainer.step.report import StepReport, describe_skip, step_of
from trainer.step.types import Variable

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Memory(NamedTuple):
    """The memory that a replica needs for its variables and their gradients, in bytes.

    What activations need is for a trial to say: see `find_batch_size`.
    """

    weights: int  # all variables of the model
    slots: int  # variables of the optimizers
    gradients: int  # in float32

    def __str__(self) -> str:
        """Returns for example "3.0 MB a replica without activations: weights 605.6 kB, ..."."""
        parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in self._asdict().items())
        return f"{format_bytes(sum(self))} a replica without activations: {parts}"


class DryRun(NamedTuple):
    """The findings of a dry run."""

    step: str  # how the first step ended, in words
    loss: float  # loss of the first step, unscaled
    evaluation: dict[str, float] | None  # results on one batch; None without `eval_data`
    checkpoint_bytes: int
    restored: bool  # whether reading the checkpoint restored the weights exactly
    traces: int  # number of traces in two steps; more than 1 means that the model retraces
    replicas: int
    replicas_equal: bool  # whether all replicas had the same weights after the steps
    memory: Memory
    seconds: float  # duration of the dry run
    gradients: str = ""  # whether they are those of a plain loop, in words
    parameters: int = 0
    frozen: int = 0  # number of parameters in layers with trainable=False

    @property
    def ok(self) -> bool:
        """Whether everything worked, so that a long run can begin."""
        equal = self.restored and self.replicas_equal
        numbers = [self.loss, *(self.evaluation or {}).values()]
        return equal and self.traces == 1 and all(map(math.isfinite, numbers))

    def __str__(self) -> str:
        """Returns one line for each finding."""
        evaluation = format_results(self.evaluation) if self.evaluation else "no eval_data"
        restored = "bit for bit" if self.restored else "BITS LOST"
        equal = "equal to the bit" if self.replicas_equal else "NOT EQUAL"
        retraced = "" if self.traces == 1 else ": TRACED AGAIN, which costs time in every run"
        lines = {
            "parameters": f"{self.parameters:,}, {self.frozen:,} of them frozen",
            "train step": self.step,
            "eval step": evaluation,
            "checkpoint": f"saved and restored {restored}, {format_bytes(self.checkpoint_bytes)}",
            "gradients": self.gradients,
            "traces": f"{self.traces}{retraced}",
            "replicas": f"{self.replicas}, {equal}",
            "memory": str(self.memory),
        }
        findings = "\n".join(f"  {name:<11} {text}" for name, text in lines.items())
        return f"dry run in {self.seconds:.1f} s; all variables are as they were before\n{findings}"


class Overfit(NamedTuple):
    """The result of training on one batch."""

    losses: np.ndarray  # shape=(steps,), float32: unscaled loss of every step
    skipped: int  # number of skipped steps

    def __str__(self) -> str:
        """Returns for example "one batch, 100 steps: loss 2.3021 -> 0.0004, 8 skipped"."""
        finite = self.losses[np.isfinite(self.losses)]
        path = (
            f"{format_number(finite[0])} -> {format_number(finite[-1])}"
            if len(finite)
            else "never finite"
        )
        return f"one batch, {len(self.losses)} steps: loss {path}, {self.skipped} skipped"


@contextlib.contextmanager
def state_restored(trainer: "Trainer", parts: Parts) -> Iterator[None]:
    """Context manager: restores all variables that a trainer holds when the block ends."""
    own = [trainer.model, trainer.optimizer, parts.state, parts.metrics]
    roots = [*own, *attributes_of(trainer).values()]
    variables = tracked_variables(roots)
    before = read_copies(variables, trainer.strategy)
    known = {id(variable) for variable in variables}
    parts.state.halted.assign(value=False)  # a run that was stuck takes steps here
    try:
        yield
    finally:
        write_copies(variables, before, trainer.strategy)
        # Some metrics create their variables in their first update: these had no value before.
        metrics = [item for item in tracked(*roots) if isinstance(item, keras.metrics.Metric)]
        for metric in metrics:
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()


def dry_run(
    trainer: "Trainer",
    parts: Parts,
    data: Batches,
    evaluate: Callable[[], dict[str, float] | None] | None,
) -> DryRun:
    """Tries everything that a run does; see `Trainer.dry_run`.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        data: the training data.
        evaluate: a function that returns the results on one batch; None for no evaluation.
    """
    began = time.perf_counter()
    with state_restored(trainer, parts):
        iterator = iter(untuned(data.endless()))
        report, _ = parts.run_steps(iterator, tf.constant(1))
        first = step_of(StepReport(*(field.numpy() for field in report)), 0)
        traced = parts.run_steps.experimental_get_tracing_count()
        parts.run_steps(iterator, tf.constant(1))
        retraced = parts.run_steps.experimental_get_tracing_count() - traced
        # Compare the replicas now: reading a checkpoint will give all of them the same values.
        equal = replicas_equal(parts.plan)
        evaluation = evaluate() if evaluate else None
        with tempfile.TemporaryDirectory() as scratch:
            size, restored = save_and_restore(trainer, parts, pathlib.Path(scratch))
        gradients = check_gradients(parts.plan, data.first, parts.state.loss_scaler.state)
        rows = variable_rows(trainer.model)
        return DryRun(
            step=describe_step(first, parts.plan.variable_names),
            loss=float(first.loss),
            evaluation=evaluation,
            checkpoint_bytes=size,
            restored=restored,
            traces=1 + retraced,
            replicas=trainer.strategy.num_replicas_in_sync,
            replicas_equal=equal,
            memory=memory_of(trainer),
            seconds=time.perf_counter() - began,
            gradients=gradients,
            parameters=total_size(rows)[0],
            frozen=frozen_parameters(rows),
        )


def overfit(trainer: "Trainer", parts: Parts, data: Batches, steps: int) -> Overfit:
    """Trains on the first batch repeatedly, then restores all variables exactly."""
    dataset = repeat_first_batch(data)
    with state_restored(trainer, parts):
        report, _ = parts.run_steps(iter(dataset), tf.constant(steps))
        losses, applied = report.loss.numpy(), report.grads_finite.numpy()
    return Overfit(losses, int((~applied).sum()))


def find_batch_size(make: Callable[[int], Any], data: Any, global_batch: int | None = None) -> int:
    """Returns the smallest number of microbatches with which a step fits in memory.

    The search begins with one microbatch, and doubles the number for as long as TensorFlow runs
    out of memory. The global batch does not change, so the result of training stays the same.

    Args:
        make: a function that returns a new trainer for a given `num_microbatches`. Each trainer is
            tried with a dry run.
        data: as for `Trainer.train`.
        global_batch: the batch size, if `data` is arrays.

    Returns:
        The first `num_microbatches` that fits: a power of two, or the number of examples in a
        replica's share of the batch.

    Raises:
        ValueError: if a step does not fit even with one example per microbatch.

    Example:
        >>> import keras, numpy as np
        >>> from trainer import Trainer, find_batch_size
        >>> def make(num_microbatches):
        ...     return Trainer(
        ...         model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...         optimizer="sgd", loss_fn="mse", num_microbatches=num_microbatches)
        >>> x = np.ones([64, 1], np.float32)
        >>> find_batch_size(make, (x, x), global_batch=64)
        1
    """
    parts = 1
    while True:
        trainer = make(parts)
        try:
            trainer.dry_run(data, global_batch=global_batch)
        except tf.errors.ResourceExhaustedError as error:
            found = batches(data, "data", trainer.strategy, global_batch)
            share = -(-found.global_batch // trainer.strategy.num_replicas_in_sync)  # the largest
            if parts >= share:
                raise ValueError(
                    f"out of memory with {parts} microbatches of one example each: "
                    f"{reason_of(error.message)}"
                ) from error
            parts = min(2 * parts, share)
        else:
            return parts


def save_and_restore(trainer: "Trainer", parts: Parts, folder: pathlib.Path) -> tuple[int, bool]:
    """Writes a checkpoint, sets the weights to zero, and restores the checkpoint.

    Returns:
        The size of the checkpoint in bytes, and whether the weights were restored exactly.
    """
    strategy = trainer.strategy
    checkpoints = make_checkpoints(trainer, parts.state, parts.metrics.train, folder)
    facts = {
        "num_replicas": strategy.num_replicas_in_sync,
        "loss_scale": text_of_rule(trainer.rule),
    }
    checkpoints.save(0, facts, None)
    checkpoints.wait()
    # Each step sets the states of seed generators, so they are not saved.
    weights = tracked_variables([parts.plan.model], but=parts.plan.seeds)
    written = read_copies(weights, strategy)
    zeros = [[tf.zeros_like(copy) for copy in copies] for copies in written]
    write_copies(weights, zeros, strategy)
    with strategy.scope():
        checkpoints.restore()
    back = read_copies(weights, strategy)
    pairs = zip(tf.nest.flatten(written), tf.nest.flatten(back), strict=True)
    return sum(checkpoints.bytes.values()), all(same_bits(old, new) for old, new in pairs)


def replicas_equal(plan: StepPlan) -> bool:
    """Returns whether all replicas have exactly the same weights and statistics."""
    found = [copies_of(variable, plan.strategy) for variable in plan.model.variables]
    return all(same_bits(copy, copies[0]) for copies in found for copy in copies)


def same_bits(one: tf.Tensor | Variable, other: tf.Tensor | Variable) -> bool:
    """Returns whether two tensors or variables hold the same bits."""
    return bool(one.numpy().tobytes() == other.numpy().tobytes())


def describe_step(report: StepReport, variable_names: list[str]) -> str:
    """Returns how a step ended, in words."""
    scale = f"at loss_scale {power_of_two(float(report.loss_scale))}"
    if report.grads_finite:
        return f"applied, loss {format_number(float(report.loss))}, {scale}"
    cause = describe_skip(report, variable_names)
    return f"skipped, loss {format_number(float(report.loss))}, {scale}: {cause}"


def memory_of(trainer: "Trainer") -> Memory:
    """Returns the memory that a replica of a started trainer needs besides activations."""
    optimizers = optimizers_by_item(trainer.optimizer).values()
    slots = [variable for optimizer in optimizers for variable in optimizer.variables]
    trainable = sum(math.prod(weight.shape) for weight in trainer.model.trainable_variables)
    return Memory(
        weights=total_size(variable_rows(trainer.model))[1],
        slots=sum(math.prod(slot.shape) * tf.as_dtype(slot.dtype).size for slot in slots),
        gradients=4 * trainable,
    )
