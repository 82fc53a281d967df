"""`jit_compile="auto"`: what XLA shall compile is measured, on a run's own first batch.

Before its first step, a run that is long enough to win it back takes some steps in every mode
that comes into question. Then every bit is put back, the fastest mode is kept, and
`model_dir/jit_compile.json` remembers it, so that a run that is taken up computes as before.
"""

import contextlib
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import scaling
import strategies
from trainer.base.argument_checks import check_choice
from trainer.base.atomic_files import write_atomically
from trainer.data.batches import Batches, repeat_first_batch
from trainer.run.build import Parts, parts_of_plan
from trainer.run.dry_run import put_back
from trainer.step.fused import fused_rule
from trainer.step.plan import StepPlan, compiled_as
from trainer.step.xla import COMPILE_MODES, can_compile_update, check_compile_mode

LONG = 1000  # steps; in fewer, measuring is not won back
MOST_SECS = 15.0  # no mode is begun that would not be ready by then
TURN_SECS = 0.2  # of one turn of a mode; at least one step
TURNS = 5
HOPELESS = 1.3  # times as slow as the best: no further turn
AS_GOOD = 1.03  # times as slow as the best: taken, if it was tried before it
FILE = "jit_compile.json"


class Choice(NamedTuple):
    """What was measured."""

    jit_compile: bool | str  # the fastest mode, or the first that is as good
    millisecs: dict[bool | str, float]  # a step in each mode that was tried: medians
    secs: float  # that measuring took
    parts: Parts  # of a trainer that computes so, their loop traced and compiled

    def __str__(self) -> str:
        """For instance "XLA compiles nothing: 4.1 ms a step (...); measured in 8.0 s"."""
        others = ", ".join(
            f"{COMPILE_MODES[mode]} {millisecs:.3g}"
            for mode, millisecs in self.millisecs.items()
            if mode != self.jit_compile
        )
        best = (
            f"{COMPILE_MODES[self.jit_compile]}: {self.millisecs[self.jit_compile]:.3g} ms a step"
        )
        return f"XLA compiles {best} ({others}); measured in {self.secs:.1f} s"


def initial_compile_mode(
    jit_compile: bool | str, precision: scaling.Precision, strategy: tf.distribute.Strategy
) -> bool | str:
    """Returns what XLA compiles as long as nothing has been measured.

    For "auto" that is half precision on a CPU for which TensorFlow has no fast kernels of it:
    its convolutions are scalar loops there, up to hundreds of times slower.

    Raises:
        ValueError: if there is no such mode, or not under this strategy.
    """
    check_choice("jit_compile", jit_compile, ("auto", *COMPILE_MODES))
    if jit_compile != "auto":
        check_compile_mode(jit_compile, strategy)
        return jit_compile
    dtype = precision.compute_dtype
    return (
        dtype != "float32" and strategies.capabilities(strategy).on_cpu and computes_in_loops(dtype)
    )


@functools.cache
def computes_in_loops(dtype: str) -> bool:
    """Returns whether TensorFlow has no fast kernels of a half precision for this CPU.

    It has none of float16; of bfloat16, only where a processor has AVX-512 or the like. It tells
    nobody, so a convolution's gradient is tried: 15 times as slow as in float32 on a processor
    with AVX2 alone.
    """
    return dtype == "float16" or gradient_secs(dtype) > 4 * gradient_secs("float32")


def gradient_secs(dtype: str) -> float:
    """Returns the seconds that the gradient of a small convolution takes on the CPU."""
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


def modes_to_try(trainer: Any, plan: StepPlan) -> list[bool | str]:
    """Returns the modes that come into question, the likeliest first; one: nothing to measure."""
    strategy = trainer.strategy
    alone = not (strategies.is_asynchronous(strategy) or strategies.has_workers(strategy))
    if not alone or strategies.decides_inside(strategy) or plan.jit_compile is True:
        return [plan.jit_compile]
    optimizers = [each.optimizer for each in plan.objectives]
    unfused = any(fused_rule(optimizer) is None for optimizer in optimizers)
    update = ["update"] if unfused and can_compile_update(strategy) else []
    if trainer.precision.compute_dtype == "bfloat16" and strategies.capabilities(strategy).on_cpu:
        # XLA's own products know nothing of a processor's instructions for it.
        return [False, "elementwise", *update, True]
    return [False, True, *update, "elementwise"]


def settle(
    trainer: Any, parts: Parts, data: Batches, steps: int, use: Callable[[Parts], None]
) -> Choice | None:
    """Has a trainer use parts that are compiled as they shall be from its next step on.

    Args:
        trainer: a `Trainer` with jit_compile="auto" that has started.
        parts: what it is made of.
        data: what it is about to train on.
        steps: that it is about to take.
        use: gives the trainer other parts: its step may be the user's, and looks there.

    Returns:
        What was measured, if something was.
    """
    modes, choice = modes_to_try(trainer, parts.plan), None
    if parts.checkpoints.latest:
        mode = parts.checkpoints.facts.get("jit_compile")
    else:
        mode = remembered(trainer.model_dir)
    if mode is None and len(modes) > 1 and steps >= LONG:
        choice = measure(trainer, parts, data, modes, use)
        if choice:
            remember(trainer.model_dir, choice)
            use(choice.parts)
    elif mode in modes and mode != parts.plan.jit_compile:
        use(parts_for(mode, trainer, parts))
    return choice


def parts_for(mode: bool | str, trainer: Any, parts: Parts) -> Parts:
    """Returns the parts of a trainer of whose step XLA compiles something else."""
    plan = compiled_as(parts.plan, mode)
    return parts._replace(**parts_of_plan(trainer, plan, parts.state, parts.stop))


def measure(
    trainer: Any,
    parts: Parts,
    data: Batches,
    modes: list[bool | str],
    use: Callable[[Parts], None],
) -> Choice | None:
    """Takes steps in every mode, in turn, and puts everything back bit for bit.

    Returns:
        What came of it; None if somebody has asked the run to stop, or it cannot take steps.
    """
    began = time.perf_counter()
    dataset = repeat_first_batch(data)
    secs: dict[bool | str, list[float]] = {}
    steps: dict[bool | str, int] = {}
    racing = {}
    longest = 0.0  # that a mode has taken to be ready
    with put_back(trainer, parts), contextlib.ExitStack() as afterwards:
        afterwards.callback(use, parts)
        for mode in modes:
            now = time.perf_counter()
            if secs and now - began + longest > MOST_SECS:
                break
            racing[mode] = parts_for(mode, trainer, parts)
            use(racing[mode])
            seconds_of(racing[mode], dataset, 1)  # traces and compiles
            secs[mode] = [seconds_of(racing[mode], dataset, 1)]
            steps[mode] = max(1, round(TURN_SECS / secs[mode][0]))  # 1 if it cannot
            longest = max(longest, time.perf_counter() - now)
        for _ in range(TURNS):
            for mode in in_sight(secs):
                secs[mode].append(seconds_of(racing[mode], dataset, steps[mode]))
    medians = {mode: statistics.median(turns[1:] or turns) for mode, turns in secs.items()}
    best = next(mode for mode in medians if medians[mode] <= AS_GOOD * min(medians.values()))
    if medians[best] == math.inf:
        return None
    millisecs = {mode: 1e3 * median for mode, median in medians.items() if median < math.inf}
    return Choice(best, millisecs, time.perf_counter() - began, racing[best])


def in_sight(secs: dict[bool | str, list[float]]) -> list[bool | str]:
    """Returns the modes that have not been found far slower than the best, by their best turn."""
    best = min(min(turns) for turns in secs.values())
    return [mode for mode, turns in secs.items() if min(turns) <= HOPELESS * best]


def seconds_of(parts: Parts, dataset: tf.data.Dataset, steps: int) -> float:
    """Returns the seconds of one of some steps; infinitely many if not all could be taken."""
    iterator = iter(dataset)
    began = time.perf_counter()
    try:
        report, _ = parts.run_steps(iterator, tf.constant(steps))
    except tf.errors.OpError:  # XLA knows no strings, for instance
        return math.inf
    taken = len(report.loss.numpy())
    return (time.perf_counter() - began) / steps if taken == steps else math.inf


def remembered(model_dir: pathlib.Path | None) -> bool | str | None:
    """Returns what an earlier start of a run has chosen; None if there was none."""
    try:
        return json.loads((model_dir / FILE).read_text())["jit_compile"] if model_dir else None
    except (OSError, ValueError, KeyError):
        return None


def remember(model_dir: pathlib.Path | None, choice: Choice) -> None:
    """Keeps a choice, in a file that is there whole or not at all."""
    if model_dir is None:
        return
    told = {
        COMPILE_MODES[mode]: round(millisecs, 3) for mode, millisecs in choice.millisecs.items()
    }
    facts = {
        "jit_compile": choice.jit_compile,
        "milliseconds_a_step": told,
        "seconds": round(choice.secs, 1),
    }
    write_atomically(model_dir / FILE, json.dumps(facts, indent=1))
