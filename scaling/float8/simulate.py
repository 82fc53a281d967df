"""Simulates float8 rules on what a run has recorded, to choose the rule of the next run.

    python -m scaling.float8.simulate RUN/metrics.jsonl --float8_rules=delayed,keras3,current

For each tensor and rule, this prints how often the largest magnitude would have saturated, how many
factors of two above it were left unused, and how often the scale moved. The simulation makes these
assumptions:

- The magnitudes are those of the recorded run, even where a rule would have rounded other numbers.
- A run that records only some of its steps is taken as if there were no others: a history of 16 is
  one of 16 lines.
- Steps that the run skipped count as others do, unless the tensor was not finite. The run's own
  scales did not move on them.
- A step is judged by its largest magnitude alone: it saturates if that number does. What the
  smaller ones lose is not in the record.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from absl import app, flags

from scaling.base.argument_checks import shown
from scaling.float8.cast import FORMATS, saturates
from scaling.float8.current import CurrentScaling
from scaling.float8.delayed import DelayedScaling
from scaling.float8.presets import PRESETS, preset
from scaling.rules.named import parse_value

RULES: dict[str, type] = {"delayed": DelayedScaling, "current": CurrentScaling}
Rule: TypeAlias = DelayedScaling | CurrentScaling
RECORDED = "as recorded"
HEADINGS = ("saturated", "unused bits", "scale moves")

FLOAT8_RULES = flags.DEFINE_list(
    "float8_rules",
    ["delayed", "current"],
    "Comma-separated float8 rules to simulate: delayed, current, keras3, flax or "
    "transformer_engine, with fields such as delayed:history_length=16:margin=1.",
)


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """One float8 tensor of a run: NumPy arrays of shape (lines,), in the order of the steps."""

    name: str
    dtype: str  # the float8 format
    step: np.ndarray  # int64: a run may record only some of its steps
    amax: np.ndarray  # float32: the largest magnitude before the cast; NaN if it was not finite
    scale: np.ndarray  # float32: what the step divided by


class Outcome(NamedTuple):
    """The result of simulating a rule on one tensor."""

    rule: str  # the rule, as text that `parse_float8_rule` accepts
    scale: np.ndarray  # shape=(lines,), float32: the scale of each step
    saturated: np.ndarray  # shape=(lines,), bool: whether the largest magnitude saturates
    # shape=(lines,), float64: number of factors of two between the largest magnitude and the
    # largest number of the format; NaN where it saturates, is 0 or is not finite
    unused_bits: np.ndarray
    moves: int  # how often the scale changed


def parse_float8_rule(text: str, dtype: str) -> Rule:
    """Returns the rule that a text describes.

    Args:
        text: delayed, current or a preset's name, optionally followed by fields of the rule,
            separated by colons: "delayed:history_length=16:margin=1".
        dtype: the float8 format, which the text does not name.

    Raises:
        ValueError: for an unknown name, or an invalid value.
        TypeError: for an unknown field.

    Example:
        >>> parse_float8_rule("current:margin=1", "float8_e5m2")
        CurrentScaling(dtype='float8_e5m2', margin=1, power_of_two=True)
    """
    name, *assignments = text.strip().split(":")
    pairs = [assignment.partition("=") for assignment in assignments]
    fields = {field: parse_value(value) for field, _, value in pairs}
    if name not in [*RULES, *PRESETS]:
        known = ", ".join([*RULES, *PRESETS])
        raise ValueError(f"`float8_rules` must be some of {known}; got {shown(text)}")
    rule: Rule = RULES[name](dtype) if name in RULES else preset(name, dtype)
    return dataclasses.replace(rule, **fields)


def read_tensors(path: pathlib.Path) -> list[TensorRecord]:
    """Reads the float8 tensors of a run from its `metrics.jsonl`, in the order of the file.

    A run that was stopped and resumed may have written a step twice; the later line counts.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it says nothing about float8 tensors, or a line is no JSON.
    """
    rows: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        for name, tensor in line.get("float8", {}).items():
            earlier = rows.setdefault((name, tensor["format"]), [])
            while earlier and earlier[-1][0] >= line["step"]:
                earlier.pop()
            # A magnitude that was not finite is null.
            amax = math.nan if tensor["amax"] is None else tensor["amax"]
            earlier.append((line["step"], amax, tensor["scale"]))
    if not rows:
        raise ValueError(f"{path} has no float8 tensors: train with precision='mixed_float8'")
    tensors = []
    for (name, dtype), found in rows.items():
        step, amax, scale = zip(*found, strict=True)
        columns = np.array(amax, np.float32), np.array(scale, np.float32)
        tensors.append(TensorRecord(name, dtype, np.array(step), *columns))
    return tensors


def simulate_float8_rule(rule: Rule, amax: np.ndarray) -> np.ndarray:
    """Simulates a rule on tensors of one format, in one graph call.

    Args:
        rule: the rule.
        amax: shape (lines, tensors), float32.

    Returns:
        The scale of each step, shape (lines, tensors), float32.
    """
    lines, tensors = amax.shape
    if isinstance(rule, DelayedScaling):  # no more history than these steps can reach
        rule = dataclasses.replace(rule, history_length=min(rule.history_length, lines))
    steps = tf.constant(amax)

    def one_step(index: tf.Tensor, state: Any, scales: tf.TensorArray) -> tuple[Any, ...]:
        scales = scales.write(index, rule.choose_scale(state, steps[index]))
        return index + 1, rule.advance(state, steps[index]), scales

    def all_steps() -> tf.Tensor:
        array = tf.TensorArray(tf.float32, lines)
        start = (tf.constant(0), rule.initial_state((tensors,)), array)
        return tf.while_loop(lambda index, *_: index < lines, one_step, start)[-1].stack()

    # The function is called only once, so skip the checks for retracing.
    return np.asarray(tf.function(all_steps).get_concrete_function()().numpy())


def outcome_of(rule: str, scale: np.ndarray, tensor: TensorRecord) -> Outcome:
    """Returns the outcome for one tensor, given the scales that a rule used."""
    form = FORMATS[tensor.dtype]
    with np.errstate(all="ignore"):
        ratio = tensor.amax / scale
        bits = math.log2(form.largest) - np.log2(ratio.astype(np.float64))
    saturated = saturates(tf.constant(ratio), form).numpy()
    measured = (tensor.amax > 0) & ~saturated & (ratio > 0)
    return Outcome(
        rule=rule,
        scale=scale,
        saturated=saturated,
        # Up to half a unit above the largest number is rounded to it.
        unused_bits=np.where(measured, np.maximum(bits, 0.0), np.nan),
        moves=int(np.count_nonzero(scale[1:] != scale[:-1])),
    )


def compare(tensors: Sequence[TensorRecord], rules: Iterable[str]) -> list[list[Outcome]]:
    """Returns for each tensor the outcome as it was, then the simulated outcome of each rule.

    Args:
        tensors: the recorded tensors.
        rules: rules as text, as `parse_float8_rule` accepts them.

    Raises:
        ValueError, TypeError: as `parse_float8_rule` does.
    """
    # All texts are parsed before any is simulated.
    parsed = {text: {name: parse_float8_rule(text, name) for name in FORMATS} for text in rules}
    outcomes = [[outcome_of(RECORDED, tensor.scale, tensor)] for tensor in tensors]
    # Tensors of one format and with as many lines are simulated together.
    groups: dict[tuple[str, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, len(tensor.step)), []).append(place)
    for text, by_format in parsed.items():
        for (dtype, _), places in groups.items():
            amax = np.stack([tensors[place].amax for place in places], axis=1)
            scales = simulate_float8_rule(by_format[dtype], amax)
            for column, place in enumerate(places):
                outcomes[place].append(outcome_of(text, scales[:, column], tensors[place]))
    return outcomes


def table(tensors: Sequence[TensorRecord], outcomes: Sequence[Sequence[Outcome]]) -> str:
    """Returns the outcomes as a text table: first of all tensors together, then of each.

    Args:
        tensors: the recorded tensors.
        outcomes: for each tensor, the outcomes as `compare` returns them.
    """
    width = max(len(outcome.rule) for outcome in outcomes[0]) + 2
    first = min(int(tensor.step[0]) for tensor in tensors)
    last = max(int(tensor.step[-1]) for tensor in tensors)
    lines = [
        f"{len(tensors)} float8 tensors, steps {first} to {last}",
        "  ".join([" " * width, *HEADINGS]),
        "all tensors",
        *(row(together, width) for together in zip(*outcomes, strict=True)),
    ]
    for tensor, own in zip(tensors, outcomes, strict=True):
        lines.append(f"{tensor.name}, {tensor.dtype}")
        lines += [row([outcome], width) for outcome in own]
    lines.append(
        "Saturated counts the steps whose largest magnitude was beyond the format. In the others, "
        "the scale left so many factors of two above it unused, on average: unused bits."
    )
    distance = max(np.max(np.diff(tensor.step), initial=1) for tensor in tensors)
    if distance > 1:
        lines.append(
            f"Lines are up to {distance} steps apart. The rules take each line for one step: a "
            "history of 16 is one of 16 lines."
        )
    return "\n".join(lines)


def row(outcomes: Sequence[Outcome], width: int) -> str:
    """Returns the line of one rule, for one tensor or for several together.

    Args:
        outcomes: of one rule, for each tensor.
        width: characters of the first column.
    """
    bits = np.concatenate([outcome.unused_bits for outcome in outcomes])
    unused = f"{np.nanmean(bits):.2f}" if not np.isnan(bits).all() else "-"
    saturated = sum(int(outcome.saturated.sum()) for outcome in outcomes)
    moves = sum(outcome.moves for outcome in outcomes)
    cells = [
        f"{text:>{len(name)}}"
        for text, name in zip((str(saturated), unused, str(moves)), HEADINGS, strict=True)
    ]
    return "  ".join([f"  {outcomes[0].rule}".ljust(width), *cells])


def main(arguments: list[str]) -> None:
    """Runs the program: prints the table."""
    if len(arguments) != 2:
        raise app.UsageError("Pass one file: python -m scaling.float8.simulate RUN/metrics.jsonl")
    try:
        tensors = read_tensors(pathlib.Path(arguments[1]))
        print(table(tensors, compare(tensors, FLOAT8_RULES.value)))
    except (OSError, TypeError, ValueError) as error:
        sys.exit(f"{arguments[1]}: {error}")


if __name__ == "__main__":
    app.run(main)
