"""Before a long run: a step, an evaluation, a checkpoint, tried and put back bit for bit."""

import contextlib
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.data.batches import Batches, batches, repeat_first_batch, repeat_forever, untuned
from trainer.log.model_table import total_size, variable_rows
from trainer.log.run_log import format_results
from trainer.log.summary import format_bytes, power_of_two
from trainer.run.build import Parts, make_checkpoints, optimizers_by_item
from trainer.step.plan import StepPlan
from trainer.step.report import StepReport, describe_skip, step_of
from trainer.step.rollback import copies_of, read_copies, variables_in_reach, write_copies


class Memory(NamedTuple):
    """What a replica keeps in memory during a step, in bytes."""

    weights: int  # whatever the model has
    slots: int  # of the optimizers
    gradients: int  # in float32
    activations: int  # of the forward pass over one microbatch: an order of magnitude

    def __str__(self) -> str:
        """For instance "3.0 MB a replica: weights 605.6 kB, ..."."""
        parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in self._asdict().items())
        return f"about {format_bytes(sum(self))} a replica: {parts}"


class DryRun(NamedTuple):
    """What a dry run has found."""

    step: str  # how the first step went
    loss: float  # of it, unscaled
    evaluation: dict[str, float] | None  # of one batch; None without `eval_data`
    checkpoint_bytes: int
    restored: bool  # whether a checkpoint brought every bit back
    traces: int  # of two steps; more than 1 would be traced again and again
    replicas: int
    replicas_equal: bool  # whether all copies of the weights were the same after the steps
    memory: Memory
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against a long run."""
        equal = self.restored and self.replicas_equal
        return equal and self.traces == 1 and math.isfinite(self.loss)

    def __str__(self) -> str:
        """A line for each finding."""
        tried = format_results(self.evaluation) if self.evaluation else "no eval_data"
        back = "all bits back" if self.restored else "BITS LOST"
        same = "equal to the bit" if self.replicas_equal else "NOT EQUAL"
        again = "" if self.traces == 1 else ": TRACED AGAIN, which it would be in every run"
        lines = {
            "train step": self.step,
            "eval step": tried,
            "checkpoint": f"saved and restored, {back}, {format_bytes(self.checkpoint_bytes)}",
            "traces": f"{self.traces}{again}",
            "replicas": f"{self.replicas}, {same}",
            "memory": str(self.memory),
        }
        told = "\n".join(f"  {name:<11} {text}" for name, text in lines.items())
        return f"dry run in {self.seconds:.1f} s; everything is as it was before\n{told}"


class Overfit(NamedTuple):
    """How training on one batch went."""

    losses: np.ndarray  # shape=(steps,), float32: unscaled, of every step
    skipped: int

    def __str__(self) -> str:
        """For instance "one batch, 100 steps: loss 2.3021 -> 0.0004, 8 skipped"."""
        finite = self.losses[np.isfinite(self.losses)]
        went = f"{finite[0]:.4f} -> {finite[-1]:.4f}" if len(finite) else "never finite"
        return f"one batch, {len(self.losses)} steps: loss {went}, {self.skipped} skipped"


def dry_run(
    trainer: Any,
    parts: Parts,
    data: Batches,
    evaluate: Callable[[], dict[str, float] | None] | None,
) -> DryRun:
    """Tries everything that a run does once; see `Trainer.dry_run`.

    Args:
        trainer: a `Trainer` that has started.
        parts: what it is made of.
        data: to train on.
        evaluate: returns the results of one batch's evaluation; None for none.
    """
    began = time.perf_counter()
    with put_back(trainer, parts):
        iterator = iter(untuned(repeat_forever(data)))
        report, _ = parts.run_steps(iterator, tf.constant(1))
        first = step_of(StepReport(*(field.numpy() for field in report)), 0)
        traced = parts.run_steps.experimental_get_tracing_count()
        parts.run_steps(iterator, tf.constant(1))
        retraced = parts.run_steps.experimental_get_tracing_count() - traced
        # Before a checkpoint is read, which gives all replicas the same.
        equal = replicas_equal(parts.plan)
        evaluation = evaluate() if evaluate else None
        with tempfile.TemporaryDirectory() as scratch:
            taken, restored = saved_and_restored(trainer, parts, pathlib.Path(scratch))
        return DryRun(
            step=step_in_words(first, parts.plan.variable_names),
            loss=float(first.loss),
            evaluation=evaluation,
            checkpoint_bytes=taken,
            restored=restored,
            traces=1 + retraced,
            replicas=trainer.strategy.num_replicas_in_sync,
            replicas_equal=equal,
            memory=memory_of(trainer, data.first),
            seconds=time.perf_counter() - began,
        )


def overfit(trainer: Any, parts: Parts, data: Batches, steps: int) -> Overfit:
    """Trains on the first batch again and again, and puts everything back."""
    dataset = repeat_first_batch(data)
    with put_back(trainer, parts):
        report, _ = parts.run_steps(iter(dataset), tf.constant(steps))
        losses, applied = report.loss.numpy(), report.grads_finite.numpy()
    return Overfit(losses, int((~applied).sum()))


def find_batch_size(make: Callable[[int], Any], data: Any, global_batch: int | None = None) -> int:
    """Returns into how few microbatches a replica's share must be cut to fit into memory.

    It begins with the whole share, and halves it as long as TensorFlow runs out of memory. The
    global batch, and so what is learned, stays the same.

    Args:
        make: makes a new trainer for a `num_microbatches`; each is tried with a dry run.
        data: as for `Trainer.train`.
        global_batch: the batch size, if `data` is arrays.

    Returns:
        The least power of two that fits, for `num_microbatches`.

    Raises:
        ValueError: if one example at a time does not fit.

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
    if not callable(make):
        raise TypeError(
            f"`make` must be a function; got {type(make).__name__}. It makes a trainer for each "
            "trial. Pass for instance lambda parts: Digits(num_microbatches=parts)."
        )
    parts = 1
    while True:
        trainer = make(parts)
        try:
            trainer.dry_run(data, global_batch=global_batch)
        except tf.errors.ResourceExhaustedError as error:
            found = batches(data, "data", trainer.strategy, global_batch)
            share = found.global_batch // trainer.strategy.num_replicas_in_sync
            if parts >= share:
                raise ValueError(
                    f"`data` must fit into memory one example at a time; got {parts} microbatches "
                    f"of one each, and TensorFlow ran out of memory: {first_line(error)}. Take a "
                    "smaller model, or half precision."
                ) from error
            parts = min(2 * parts, share)
        else:
            return parts


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says, without a full stop."""
    return str(error).splitlines()[0].removesuffix(".")


@contextlib.contextmanager
def put_back(trainer: Any, parts: Parts) -> Iterator[None]:
    """Within, a trainer may do what it wants: every bit of its variables is put back after."""
    roots = [trainer.model, trainer.optimizer, parts.state, *vars(trainer).values()]
    roots += [metric for metrics in parts.metrics.values() for metric in metrics.values()]
    variables = variables_in_reach(roots, held_back=())
    before = read_copies(variables, trainer.strategy)
    try:
        yield
    finally:
        write_copies(variables, before, trainer.strategy)


def saved_and_restored(trainer: Any, parts: Parts, scratch: pathlib.Path) -> tuple[int, bool]:
    """Writes a checkpoint, spoils the weights, and reads it; returns its bytes, and the success."""
    strategy = trainer.strategy
    checkpoints = make_checkpoints(trainer, parts.state, parts.metrics[False], scratch)
    facts = {"num_replicas": strategy.num_replicas_in_sync, "loss_scale": repr(trainer.rule)}
    checkpoints.save(0, facts, None)
    checkpoints.wait()
    weights = variables_in_reach([parts.plan.model], held_back=())
    written = read_copies(weights, strategy)
    zeros = [[tf.zeros_like(copy) for copy in copies] for copies in written]
    write_copies(weights, zeros, strategy)
    with strategy.scope():
        checkpoints.restore()
    back = read_copies(weights, strategy)
    pairs = zip(tf.nest.flatten(written), tf.nest.flatten(back), strict=True)
    return sum(checkpoints.bytes.values()), all(same_bits(old, new) for old, new in pairs)


def replicas_equal(plan: StepPlan) -> bool:
    """Returns whether every replica has the same weights, and statistics, to the bit."""
    found = [copies_of(variable, plan.strategy) for variable in plan.model.variables]
    return all(same_bits(copy, copies[0]) for copies in found for copy in copies)


def same_bits(one: Any, other: Any) -> bool:
    """Returns whether two tensors or variables hold the same bits."""
    return one.numpy().tobytes() == other.numpy().tobytes()


def step_in_words(report: StepReport, variable_names: list[str]) -> str:
    """Returns how a step ended, as a person reads it."""
    scale = f"at loss_scale {power_of_two(float(report.loss_scale))}"
    if report.grads_finite:
        return f"applied, loss {float(report.loss):.4f}, {scale}"
    told = describe_skip(report, variable_names)
    return f"skipped, loss {float(report.loss):.4f}, {scale}: {told}"


def memory_of(trainer: Any, batch: Any) -> Memory:
    """Estimates what a replica keeps in memory during a step.

    Args:
        trainer: a `Trainer` that has started.
        batch: a global batch.
    """
    optimizers = optimizers_by_item(trainer.optimizer).values()
    slots = [variable for optimizer in optimizers for variable in optimizer.variables]
    trainable = sum(math.prod(weight.shape) for weight in trainer.model.trainable_variables)
    return Memory(
        weights=total_size(variable_rows(trainer.model))[1],
        slots=sum(math.prod(slot.shape) * tf.as_dtype(slot.dtype).size for slot in slots),
        gradients=4 * trainable,
        activations=activation_bytes(trainer, batch),
    )


def activation_bytes(trainer: Any, batch: Any) -> int:
    """Returns how many bytes the forward pass over a microbatch makes, as far as its graph tells.

    That is every tensor of it, though not all are kept for the backward pass, and XLA joins some.
    """
    shares = trainer.strategy.num_replicas_in_sync * trainer.num_microbatches

    def of_one_share(tensor: tf.Tensor) -> tf.TensorSpec:
        rows = -(-int(tensor.shape[0]) // shares)
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    def forward(share: Any) -> Any:
        with keras.StatelessScope():  # so that nothing is written, not even in the graph
            return trainer.compute_loss(share, training=True)

    specs = tf.nest.map_structure(of_one_share, batch)
    graph = tf.function(forward).get_concrete_function(specs).graph
    made = [
        tensor
        for operation in graph.get_operations()
        if operation.type not in {"Const", "Placeholder", "ReadVariableOp", "Identity", "Reshape"}
        for tensor in operation.outputs
        if tensor.shape.is_fully_defined() and tensor.dtype.is_floating
    ]
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in made)
