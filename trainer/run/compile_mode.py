"""`jit_compile="auto"`: looks up what XLA compiles, by device, precision, division and data.

Nothing is measured; `python -m trainer.tune` does that on request.
"""

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

import scaling
import strategies
from trainer.data.batches import Batches
from trainer.run.build import layers_of_trainer_without_xla, parts_of_plan, where_xla_is_needed
from trainer.run.parts import Parts
from trainer.step.plan import StepPlan, compiled_as
from trainer.step.xla import WITH_PASSES, check_compile_mode, operations_sized_by_values

if TYPE_CHECKING:
    from trainer.trainer import Trainer

CompileMode = bool | str


def initial_compile_mode(
    jit_compile: CompileMode, precision: scaling.Precision, strategy: tf.distribute.Strategy
) -> CompileMode:
    """Returns the compile mode that a trainer is built with, before it has seen data.

    "auto" begins with False; see `mode_of_auto` for GPUs. The exception is half precision on a CPU
    for which TensorFlow has no fast kernels: it would compute convolutions in scalar loops, up to
    hundreds of times slower than XLA. Those are float16, and bfloat16 without AVX-512.

    Raises:
        ValueError: if the strategy does not allow the mode.
    """
    if jit_compile != "auto":
        check_compile_mode(jit_compile, strategy)
        return jit_compile
    dtype = precision.compute_dtype
    slow = dtype == "float16" or (dtype == "bfloat16" and not has_avx512())
    return slow and strategies.capabilities(strategy).on_cpu


def has_avx512() -> bool:
    """Returns whether this CPU is known to have AVX-512."""
    file = pathlib.Path("/proc/cpuinfo")
    return file.exists() and "avx512f" in file.read_text()


def compilable_parts(trainer: "Trainer", parts: Parts, trace: Callable[[Parts], Any]) -> Parts:
    """Returns a trainer's parts, or those of mode False if "auto" must not compile the step.

    That is if XLA might compute wrong numbers. If XLA was asked to compile the step all the same,
    it warns.

    Traces the step, unless it was traced before for data with the same spec. The loop uses the same
    trace.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        trace: traces the step of parts with the training data, and returns the concrete function.
    """
    traced = hasattr(parts.run_steps, "get_concrete_function")
    with_passes = parts.plan.jit_compile in WITH_PASSES
    if not (with_passes and traced) or tf.config.functions_run_eagerly():
        return parts
    sized = operations_sized_by_values(trace(parts))
    if not sized:
        return parts
    logging.warning(
        "XLA may compute wrong numbers behind operations whose sizes depend on values, as %s. %s",
        sized,
        "So TensorFlow runs the step without XLA, which may be slow."
        if trainer.compile_mode_open
        else "Compare a few steps with jit_compile=False.",
    )
    return parts_in_mode(False, trainer, parts) if trainer.compile_mode_open else parts


def mode_of_auto(trainer: "Trainer", plan: StepPlan, data: Batches) -> CompileMode:
    """Returns the compile mode that "auto" takes for data: see `docs/performance.md`.

    On an H100, a step that was one program took a third to a ninth of the time of one in mode
    False. XLA compiles a program for each shape, so passes are compiled only if the data's element
    spec says the shapes of the examples. On a GPU, XLA's programs cannot reach int32 variables,
    which TensorFlow keeps in the host's memory.

    Args:
        trainer: a trainer with jit_compile="auto" that has started.
        plan: the trainer's plan.
        data: the training data.
    """
    mode, found = trainer.jit_compile, strategies.capabilities(trainer.strategy)
    one_device = found.num_replicas == 1 and plan.num_microbatches == 1
    if one_device and found.on_gpu and not found.several_processes:
        on_host = any(each.dtype in ("int32", tf.int32) for each in plan.held_back + plan.declared)
        mode = False if on_host or layers_of_trainer_without_xla(trainer) else "step"
    specs = tf.nest.flatten(data.dataset.element_spec)
    if mode in WITH_PASSES and not all(map(has_one_shape, specs)):
        mode = False
        logging.warning(
            "TensorFlow runs the step without XLA, which is slow %s: XLA needs dense numbers of "
            "known shapes, and the data's element spec is %s. Use tf.ensure_shape in Dataset.map.",
            *(where_xla_is_needed(trainer), data.dataset.element_spec),
        )
    return mode


def has_one_shape(spec: tf.TypeSpec) -> bool:
    """Returns whether a spec is that of dense numbers, and leaves open their number alone."""
    dense = isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string
    return dense and bool(spec.shape.rank) and spec.shape[1:].is_fully_defined()


def parts_in_mode(mode: CompileMode, trainer: "Trainer", parts: Parts) -> Parts:
    """Returns a trainer's parts for the same step in a compile mode."""
    if mode == parts.plan.jit_compile:
        return parts
    plan = compiled_as(parts.plan, mode)
    return parts._replace(**parts_of_plan(trainer, plan, parts.state, parts.stop, parts.metrics))


def tracing(iterator: tf.data.Iterator) -> Callable[[Parts], Any]:
    """Returns a function that traces the loop of parts with the data of an iterator."""
    return lambda parts: parts.run_steps.get_concrete_function(iterator, tf.constant(1))
