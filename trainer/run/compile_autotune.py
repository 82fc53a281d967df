"""`jit_compile="auto"`: chooses what XLA compiles, by device, precision, model and data.

A resumed run keeps the mode that its checkpoint records, because modes differ by rounding.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

import scaling
import strategies
from trainer.base.argument_checks import check_choice
from trainer.data.batches import Batches, repeat_first_batch
from trainer.data.errors import found_in, reason_of
from trainer.data.reader import untuned
from trainer.run.build import (
    part_without_xla,
    parts_of_plan,
    warn_of_batches_without_xla,
    where_xla_is_needed,
)
from trainer.run.protocol import Parts, RunnableTrainer
from trainer.run.put_back import put_back
from trainer.step.plan import StepPlan, compiled_as
from trainer.step.types import Batch
from trainer.step.xla import (
    COMPILE_MODES,
    WITH_PASSES,
    check_compile_mode,
    layers_without_xla,
    warn_of_plain_step,
)
from trainer.step.xla_operations import (
    int32_variables_error,
    listed_operations,
    not_compilable_error,
    operations_on_int32_variables,
    operations_sized_by_values,
    operations_without_xla,
    warn_of_int32_variables,
    warn_of_sizes,
)

CompileMode = bool | str

LOOKED_AT = 4  # batches of a dataset whose shapes are compared, where its spec leaves sizes open
# Graphs of steps that were checked: XLA may compile them, and the user has been warned of what may
# be wrong in them.
CHECKED: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def initial_compile_mode(
    jit_compile: CompileMode, precision: scaling.Precision, strategy: tf.distribute.Strategy
) -> CompileMode:
    """Returns the compile mode that a trainer is built with, before it has seen data.

    "auto" begins with False; see `modes_of_auto` for GPUs. The exception is half precision on a CPU
    for which TensorFlow has no fast kernels: TensorFlow would compute convolutions in scalar loops,
    up to hundreds of times slower, so "auto" begins with True and XLA compiles them.

    Raises:
        ValueError: if `jit_compile` is not a compile mode, or the strategy does not allow it.
    """
    check_choice("jit_compile", jit_compile, ("auto", *COMPILE_MODES))
    if jit_compile != "auto":
        check_compile_mode(jit_compile, strategy)
        return jit_compile
    dtype = precision.compute_dtype
    on_cpu = strategies.capabilities(strategy).on_cpu
    return dtype != "float32" and on_cpu and has_only_scalar_kernels(dtype)


@functools.cache
def has_only_scalar_kernels(dtype: str) -> bool:
    """Returns whether TensorFlow computes a half-precision dtype on this CPU in scalar loops.

    TensorFlow has no fast float16 kernels, and has fast bfloat16 kernels only for processors with
    AVX-512 or similar. No function reports this, so the gradient of a convolution is timed: on a
    processor with AVX2 alone, it is 15 times as slow in bfloat16 as in float32.
    """
    return dtype == "float16" or gradient_secs(dtype) > 4 * gradient_secs("float32")


def gradient_secs(dtype: str) -> float:
    """Returns how many seconds the gradient of a small convolution takes on the CPU."""
    secs = []
    with tf.device("CPU:0"):
        images = tf.ones([8, 16, 16, 64], dtype)
        for _ in range(4):
            began = time.perf_counter()
            tf.raw_ops.Conv2DBackpropFilter(
                input=images,
                filter_sizes=[3, 3, 64, 64],
                out_backprop=images,
                strides=[1, 1, 1, 1],
                padding="SAME",
            ).numpy()
            secs.append(time.perf_counter() - began)
    return min(secs)


def modes_of_auto(trainer: RunnableTrainer, plan: StepPlan) -> list[CompileMode]:
    """Returns the modes in which a run may be with "auto": that of a new run, then the others.

    On an H100 (see docs/performance.md), a step that was one program took a third to a ninth of the
    time of one in mode False.
    """
    found = strategies.capabilities(trainer.strategy)
    if found.several_processes or found.decides_in_replica or plan.gathers:
        return [plan.jit_compile]
    alone = found.num_replicas == 1
    update: list[CompileMode] = ["update"] if alone else []
    # Microbatches of unknown sizes cannot be compiled.
    whole: list[CompileMode] = ["step"] if alone and plan.num_microbatches == 1 else []
    first = [] if found.on_cpu or plan.jit_compile else whole
    modes = [*first, plan.jit_compile, False, True, *update, "elementwise", *whole]
    without = WITH_PASSES if layers_without_xla(plan.model) else ()
    return [mode for mode in modes if mode not in without]


def suits_xla(data: Batches) -> bool:
    """Returns whether XLA can compile one program for all batches of one size.

    Examples must be dense numbers, and the data's element spec must say of what shape. Otherwise
    XLA would compile a program for each shape that it meets.
    """
    return part_without_xla(data.first) is None and all(
        isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[1:].is_fully_defined()
        for spec in tf.nest.flatten(data.dataset.element_spec)
    )


def have_several_shapes(data: Batches) -> bool:
    """Returns whether the first batches differ in a shape, but for their numbers of examples.

    Of what Python reads batch by batch, the first two have been compared: the spec leaves open in
    what they differ.
    """
    if data.reader:
        return True

    def shapes(batch: Batch) -> list[tf.TensorShape]:
        return [part.shape[1:] for part in tf.nest.flatten(batch)]

    first = shapes(data.first)
    return any(shapes(batch) != first for batch in untuned(data.dataset.take(LOOKED_AT)))


def settle(
    trainer: RunnableTrainer,
    parts: Parts,
    data: Batches,
    steps: int,
    use: Callable[[Parts], None],
) -> None:
    """Chooses a compile mode and switches the trainer to it.

    Args:
        trainer: a trainer with jit_compile="auto" that has started.
        parts: the trainer's parts, from `build`.
        data: the training data.
        steps: number of steps from here to the end of the run. With 0, the trainer stays in the
            mode that it was built with, unless the run that it resumes was in another one.
        use: a function that replaces the trainer's parts, so that a user's own `train_step` also
            computes with the new parts.
    """
    modes, recorded = modes_of_auto(trainer, parts.plan), recorded_mode(parts)
    if recorded in modes or steps <= 0:
        known = recorded if recorded in modes else trainer.jit_compile
        if known != parts.plan.jit_compile:
            use(parts_in_mode(known, trainer, parts))
        return
    if len(modes) == 1:  # several processes would have to agree on another one
        return
    needed = parts.plan.jit_compile is True  # by the CPU; XLA compiles a program for each shape
    if not suits_xla(data) and not (needed and not have_several_shapes(data)):
        if modes[0] == "step":
            warn_of_plain_data(trainer, data)
        modes = [mode for mode in modes if mode not in WITH_PASSES]
    if modes[0] != parts.plan.jit_compile and not tf.config.functions_run_eagerly():
        likely = parts_in_mode(modes[0], trainer, parts)
        if not modes[0] or passes_trial(trainer, parts, likely, data, use):
            use(likely)


def recorded_mode(parts: Parts) -> CompileMode | None:
    """Returns the mode in which a resumed run took its steps; None if it took none."""
    facts = parts.checkpoints.facts if parts.checkpoints.latest else {}
    mode: CompileMode | None = facts.get("jit_compile") if facts.get("step") else None
    return mode


def passes_trial(
    trainer: RunnableTrainer,
    parts: Parts,
    compiled: Parts,
    data: Batches,
    use: Callable[[Parts], None],
) -> bool:
    """Takes one step that XLA compiles, on the first batch, and restores all variables exactly.

    Returns False if the step fails, with a warning, and if the run is asked to stop before it. It
    returns True if the step cannot be tried, for want of memory for copies of the variables, and if
    it fails for a reason that is named later: wrong data, or what `compilable_parts` finds.

    Args:
        trainer: the trainer.
        parts: its parts.
        compiled: the same in a mode in which XLA compiles the step.
        data: the training data.
        use: see `settle`.
    """
    with contextlib.ExitStack() as afterwards:
        try:
            afterwards.enter_context(put_back(trainer, parts))
        except tf.errors.ResourceExhaustedError:
            return True
        afterwards.callback(use, parts)
        use(compiled)
        try:
            report, _ = compiled.run_steps(iter(repeat_first_batch(data)), tf.constant(1))
        except tf.errors.OpError as error:
            if found_in(error.message) or any(
                reasons_against_xla(trainer, compiled, compiled.run_steps)
            ):
                return True
            logging.warning(
                "A step that XLA compiles failed, so TensorFlow runs it without XLA, which is slow "
                "on a GPU. To see the whole error, pass jit_compile=%r. It begins with: %s",
                compiled.plan.jit_compile,
                reason_of(error.message),
            )
            return False
        return len(report.loss) == 1  # 0 if the run is asked to stop


def warn_of_plain_data(trainer: RunnableTrainer, data: Batches) -> None:
    """Warns that a step on a GPU is not compiled because of the data."""
    part = part_without_xla(data.first)
    if part is not None:
        warn_of_batches_without_xla(trainer, part)
        return
    logging.warning(
        "TensorFlow runs the step without XLA, which is slow on a GPU, because XLA compiles a "
        "program for each shape, and the data's element spec is %s. If all examples have one "
        "shape, say so with tf.ensure_shape in Dataset.map; if not, pad them.",
        data.dataset.element_spec,
    )


def parts_in_mode(mode: CompileMode, trainer: RunnableTrainer, parts: Parts) -> Parts:
    """Returns a trainer's parts for the same step in another compile mode."""
    plan = compiled_as(parts.plan, mode)
    return parts._replace(**parts_of_plan(trainer, plan, parts.state, parts.stop, parts.metrics))


def compilable_parts(
    trainer: RunnableTrainer, parts: Parts, trace: Callable[[Parts], Any], *, auto: bool
) -> Parts:
    """Returns parts whose step TensorFlow can run: if XLA cannot compile it, those of mode False.

    "auto" also takes those of mode False if XLA may compute wrong numbers.

    Traces the step, unless it was traced before for data with the same spec. The loop uses the same
    trace.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        trace: traces the step of parts with the training data, and returns the concrete function.
        auto: whether `jit_compile` was "auto". If so, a warning says what XLA cannot compile, or
            only with a risk of wrong numbers.

    Raises:
        ValueError: if XLA was asked to compile the step and cannot.
    """
    traced = hasattr(parts.run_steps, "get_concrete_function")
    mode = parts.plan.jit_compile
    if mode not in (*WITH_PASSES, "update") or not traced or tf.config.functions_run_eagerly():
        return parts
    step = trace(parts)
    if step.graph in CHECKED:
        return parts
    names, on_host, sized = reasons_against_xla(trainer, parts, step)
    if names and not auto:
        raise not_compilable_error(mode, names)
    if on_host and not auto:
        raise int32_variables_error(mode, on_host)
    if names:
        warn_of_plain_step(listed_operations(names), where_xla_is_needed(trainer))
    elif on_host:
        warn_of_int32_variables(on_host)
    elif sized:
        warn_of_sizes(sized, compiled=not auto)
    if auto and (names or on_host or sized):
        return parts_in_mode(False, trainer, parts)
    CHECKED.add(step.graph)
    return parts


def reasons_against_xla(
    trainer: RunnableTrainer, parts: Parts, step: Any
) -> tuple[list[str], list[str], list[str]]:
    """Returns operations in a traced step that speak against compiling it.

    Args:
        trainer: the trainer.
        parts: the parts whose step was traced.
        step: the step: a concrete function, or a `tf.function`, of which all traces are searched.

    Returns:
        Those that XLA cannot compile; on a GPU, those on int32 variables, which a TPU keeps; and
        those behind which XLA may compute wrong numbers.
    """
    on_gpu = strategies.capabilities(trainer.strategy).on_gpu
    on_host = operations_on_int32_variables(step) if on_gpu else []
    return operations_without_xla(step), on_host, sized_by_values(parts, step)


def sized_by_values(parts: Parts, step: Any) -> list[str]:
    """Returns operations behind which XLA may compute wrong numbers, if it compiles the passes."""
    compiles = parts.plan.jit_compile in WITH_PASSES
    return operations_sized_by_values(step) if compiles else []


def tracing(iterator: tf.data.Iterator) -> Callable[[Parts], Any]:
    """Returns a function that traces the loop of parts with the data of an iterator."""
    return lambda parts: parts.run_steps.get_concrete_function(iterator, tf.constant(1))
