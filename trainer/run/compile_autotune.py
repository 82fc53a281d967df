"""`jit_compile="auto"`: finds the fastest compile mode by timing steps on the first batch.

Measuring takes time, so only long runs do it; others take the most likely mode. Before its first
step, a long run times some steps in each compile mode that may be the fastest. Then all variables
are restored exactly, the fastest mode is kept, and `model_dir/jit_compile.json` records it, so that
a resumed run computes in the same mode.
"""

import contextlib
import functools
import json
import math
import pathlib
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

import scaling
import strategies
from trainer.base.argument_checks import check_choice
from trainer.base.atomic_files import write_atomically
from trainer.data.batches import Batches, repeat_first_batch
from trainer.data.errors import reason_of
from trainer.data.value_checks import found_in
from trainer.run.build import (
    part_without_xla,
    parts_of_plan,
    warn_of_batches_without_xla,
    where_xla_is_needed,
)
from trainer.run.protocol import Parts, RunnableTrainer
from trainer.run.put_back import put_back
from trainer.step.fused import fused_rule
from trainer.step.plan import StepPlan, compiled_as
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

MIN_STEPS = 1000  # in shorter runs, measuring takes longer than it saves
MAX_SECS = 15.0  # limit for compiling the modes; one expected to exceed it is not tried
TURN_SECS = 0.2  # how long a mode is timed in each turn; at least one step is taken
TURNS = 5
TOO_SLOW = 1.3  # a mode more than this many times as slow as the best gets no further turns
AS_GOOD = 1.03  # of the modes at most this many times as slow as the best, the first is chosen
FILE = "jit_compile.json"
# Graphs of steps that were checked: XLA may compile them, and the user has been warned of what may
# be wrong in them.
CHECKED: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


class Choice(NamedTuple):
    """The result of a measurement."""

    jit_compile: CompileMode  # the first mode that is as good as the fastest; see `AS_GOOD`
    millisecs: dict[CompileMode, float]  # median time of a step in each mode that was tried
    secs: float  # duration of the measurement
    parts: Parts  # the trainer's parts in the chosen mode; the loop is traced and compiled

    def __str__(self) -> str:
        """Returns for example "XLA compiles nothing: 4.1 ms a step (...); measured in 8.0 s"."""
        others = ", ".join(
            f"{COMPILE_MODES[mode]} {millisecs:.3g}"
            for mode, millisecs in self.millisecs.items()
            if mode != self.jit_compile
        )
        millisecs = self.millisecs[self.jit_compile]
        best = f"{COMPILE_MODES[self.jit_compile]}: {millisecs:.3g} ms a step"
        tried = others or "no other mode was tried"
        return f"XLA compiles {best} ({tried}); measured in {self.secs:.1f} s"


def initial_compile_mode(
    jit_compile: CompileMode, precision: scaling.Precision, strategy: tf.distribute.Strategy
) -> CompileMode:
    """Returns the compile mode that a trainer is built with, before it has seen data.

    "auto" begins with False; see `modes_to_try` for GPUs. The exception is half precision on a CPU
    for which TensorFlow has no fast kernels: TensorFlow would compute convolutions in scalar loops,
    up to hundreds of times slower, so "auto" begins with True and XLA compiles them. With depthwise
    convolutions it is the other way round, so a long run measures both.

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


def modes_to_try(trainer: RunnableTrainer, plan: StepPlan) -> list[CompileMode]:
    """Returns the modes that may be the fastest, the most likely first.

    The first one is that of runs which are too short to be measured. On an H100 (see
    docs/performance.md), a step that was one program took a third to a ninth of the time of one
    in mode False.

    If there is only one mode, nothing needs to be measured.
    """
    found = strategies.capabilities(trainer.strategy)
    if found.several_processes or found.decides_in_replica or plan.gathers:
        return [plan.jit_compile]
    unfused = any(
        fused_rule(one) is None for objective in plan.objectives for one in objective.updating
    )
    alone = found.num_replicas == 1
    update: list[CompileMode] = ["update"] if unfused and alone else []
    # Microbatches of unknown sizes cannot be compiled.
    whole: list[CompileMode] = ["step"] if alone and plan.num_microbatches == 1 else []
    modes: list[CompileMode]
    if plan.jit_compile is True:  # the CPU lacks the half precision: see `initial_compile_mode`
        modes = [True, False, *whole]
    elif trainer.precision.compute_dtype == "bfloat16" and found.on_cpu:
        # XLA's matrix products do not use the processor's bfloat16 instructions: try them last.
        modes = [False, "elementwise", *update, True, *whole]
    elif found.on_cpu:
        modes = [False, True, *update, "elementwise", *whole]
    else:
        modes = [*whole, False, True, *update, "elementwise"]
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


def settle(
    trainer: RunnableTrainer,
    parts: Parts,
    data: Batches,
    steps: int,
    use: Callable[[Parts], None],
) -> Choice | None:
    """Chooses a compile mode and switches the trainer to it.

    Args:
        trainer: a trainer with jit_compile="auto" that has started.
        parts: the trainer's parts, from `build`.
        data: the training data.
        steps: number of steps from here to the end of the run. With 0, the trainer stays in the
            mode that it was built with, unless the run that it resumes was in another one.
        use: a function that replaces the trainer's parts, so that a user's own `train_step` also
            computes with the new parts.

    Returns:
        The result of the measurement; None if nothing was measured.
    """
    modes, recorded = modes_to_try(trainer, parts.plan), recorded_mode(trainer, parts)
    if recorded in modes or steps <= 0:
        known = recorded if recorded in modes else trainer.jit_compile
        if known != parts.plan.jit_compile:
            use(parts_in_mode(known, trainer, parts))
        return None
    if parts.plan.jit_compile is not True and not suits_xla(data):
        if modes[0] == "step":
            warn_of_plain_data(trainer, data)
        modes = [mode for mode in modes if mode not in WITH_PASSES]
    if recorded is None and len(modes) > 1 and steps >= MIN_STEPS:
        choice = measure(trainer, parts, data, modes, use)
        if choice:
            write_choice(trainer.model_dir, choice)
            use(choice.parts)
        return choice
    if modes[0] != parts.plan.jit_compile and not tf.config.functions_run_eagerly():
        likely = parts_in_mode(modes[0], trainer, parts)
        if not modes[0] or passes_trial(trainer, parts, likely, data, use):
            use(likely)
    return None


def recorded_mode(trainer: RunnableTrainer, parts: Parts) -> CompileMode | None:
    """Returns the mode in which a resumed run took its steps; None if it took none."""
    facts = parts.checkpoints.facts if parts.checkpoints.latest else {}
    mode: CompileMode | None = facts.get("jit_compile") if facts.get("step") else None
    return read_choice(trainer.model_dir) if mode is None else mode


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


def measure(
    trainer: RunnableTrainer,
    parts: Parts,
    data: Batches,
    modes: list[CompileMode],
    use: Callable[[Parts], None],
) -> Choice | None:
    """Times steps in each mode, in turn, and restores all variables exactly.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        data: the training data; only its first batch is used, repeatedly.
        modes: the modes to compare.
        use: see `settle`.

    Returns:
        The result; None if the run was asked to stop, or if no step can be taken.
    """
    began = time.perf_counter()
    on_cpu = strategies.capabilities(trainer.strategy).on_cpu
    dataset = repeat_first_batch(data)
    secs: dict[CompileMode, list[float]] = {}
    candidates: dict[CompileMode, Parts] = {}
    longest = 0.0  # the longest time in seconds that any mode has taken to get ready
    with put_back(trainer, parts), contextlib.ExitStack() as afterwards:
        afterwards.callback(use, parts)
        for mode in modes:
            now = time.perf_counter()
            works = any(turns[0] < math.inf for turns in secs.values())
            # Mode False compiles nothing, so on a CPU it is ready soon. On a GPU it was not.
            limited = works and (mode or not on_cpu)
            if limited and now - began + longest > MAX_SECS:
                continue
            candidates[mode] = parts_in_mode(mode, trainer, parts)
            use(candidates[mode])
            secs[mode] = [first_turn(candidates[mode], dataset)]
            longest = max(longest, time.perf_counter() - now)
        for _ in range(TURNS - 1):
            for mode in still_promising(secs):
                secs[mode].append(take_turn(candidates[mode], dataset, secs[mode][-1]))
    medians = {mode: statistics.median(turns) for mode, turns in secs.items()}
    best = next(mode for mode in medians if medians[mode] <= AS_GOOD * min(medians.values()))
    if medians[best] == math.inf:
        return None
    millisecs = {mode: 1e3 * median for mode, median in medians.items() if median < math.inf}
    return Choice(best, millisecs, time.perf_counter() - began, candidates[best])


def still_promising(secs: dict[CompileMode, list[float]]) -> list[CompileMode]:
    """Returns the modes whose best turn is at most `TOO_SLOW` times as slow as the fastest."""
    best = min(min(turns) for turns in secs.values())
    return [mode for mode, turns in secs.items() if min(turns) <= TOO_SLOW * best < math.inf]


def first_turn(parts: Parts, dataset: tf.data.Dataset) -> float:
    """Compiles a step, and returns its mean time in the first turn; inf if it is not to be used."""
    seconds_per_step(parts, dataset, 1)  # traces and compiles
    if sized_by_values(parts, parts.run_steps):
        return math.inf
    single = seconds_per_step(parts, dataset, 1)
    # A short step takes less time than the call around it, which one step alone pays in full.
    return single if single >= TURN_SECS else take_turn(parts, dataset, single)


def take_turn(parts: Parts, dataset: tf.data.Dataset, secs: float) -> float:
    """Returns the mean time of the steps of one turn, given how long a step took before."""
    return seconds_per_step(parts, dataset, max(1, round(TURN_SECS / secs)))


def seconds_per_step(parts: Parts, dataset: tf.data.Dataset, steps: int) -> float:
    """Returns the mean time of `steps` steps; inf if not all of them could be taken."""
    iterator = iter(dataset)
    began = time.perf_counter()
    try:
        report, _ = parts.run_steps(iterator, tf.constant(steps))
    except tf.errors.OpError:  # for example, XLA does not support strings
        return math.inf
    taken = len(report.loss.numpy())
    return (time.perf_counter() - began) / steps if taken == steps else math.inf


def read_choice(model_dir: pathlib.Path | None) -> CompileMode | None:
    """Returns the mode recorded when the run was first started; None if there is no record."""
    try:
        return json.loads((model_dir / FILE).read_text())["jit_compile"] if model_dir else None
    except (OSError, ValueError, KeyError):
        return None


def write_choice(model_dir: pathlib.Path | None, choice: Choice) -> None:
    """Writes a choice to `model_dir`, atomically."""
    if model_dir is None:
        return
    millisecs = {COMPILE_MODES[mode]: round(value, 3) for mode, value in choice.millisecs.items()}
    facts = {
        "jit_compile": choice.jit_compile,
        "milliseconds_a_step": millisecs,
        "seconds": round(choice.secs, 1),
    }
    write_atomically(model_dir / FILE, json.dumps(facts, indent=1))
