"""Simulates what float8 rules would have done in a run, using its recorded magnitudes.

The simulation makes these assumptions:

- The magnitudes are those of the recorded run, even where a rule would have rounded other numbers.
- A run that records only some of its steps is taken as if there were no others: a history of 16 is
  one of 16 lines.
- Steps that the run skipped count as others do, unless the tensor was not finite. The run's own
  scales did not move on them.
- A step is judged by its largest magnitude alone: it saturates if that number does. What the
  smaller ones lose is not in the record.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaling.float8.cast import saturates
from scaling.float8.delayed import DelayedScaling
from scaling.float8.formats import FORMATS, format_of
from scaling.float8.named import parse_float8_rule
from scaling.float8.rule import Float8Rule
from scaling.telemetry.float8_record import TensorRecord

RECORDED = "as recorded"


@dataclasses.dataclass(frozen=True)
class Float8Outcome:
    """The result of simulating a rule on one tensor."""

    rule: str  # the rule, as text that `parse_float8_rule` accepts
    scale: np.ndarray  # shape=(lines,), float32: the scale of each step
    saturated: np.ndarray  # shape=(lines,), bool: whether the largest magnitude saturates
    # shape=(lines,), float64: number of factors of two between the largest magnitude and the
    # largest number of the format; NaN where it saturates, is 0 or is not finite
    unused_bits: np.ndarray
    moves: int  # how often the scale changed


def simulate_float8_rule(rule: Float8Rule, amax: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Simulates a rule on tensors of one format, in one graph call.

    Args:
        rule: the rule.
        amax: shape (lines, tensors), float32.
        present: shape (lines, tensors), bool: false where a tensor has fewer lines than others;
            these must be its last.

    Returns:
        The scale of each step, shape (lines, tensors), float32. Where a tensor has no line, its
        scale means nothing.
    """
    lines, tensors = amax.shape
    rule = without_idle_history(rule, lines)
    steps, mask = tf.constant(amax), tf.constant(present)

    def one_step(index: tf.Tensor, state: Any, scales: tf.TensorArray) -> tuple[Any, ...]:
        newest = tf.where(mask[index], steps[index], 0.0)
        scales = scales.write(index, rule.choose_scale(state, newest))
        return index + 1, rule.advance(state, newest), scales

    def all_steps() -> tf.Tensor:
        array = tf.TensorArray(tf.float32, lines)
        start = (tf.constant(0), rule.initial_state((tensors,)), array)
        return tf.while_loop(lambda index, *_: index < lines, one_step, start)[-1].stack()

    # The function is called only once, so skip the checks for retracing.
    return np.asarray(tf.function(all_steps).get_concrete_function()().numpy())


def without_idle_history(rule: Float8Rule, lines: int) -> Float8Rule:
    """Returns a rule that moves alike over so many lines, without room for more in its history."""
    if not isinstance(rule, DelayedScaling):
        return rule
    return dataclasses.replace(rule, history_length=min(rule.history_length, lines))


def outcome_of(rule: str, scale: np.ndarray, tensor: TensorRecord) -> Float8Outcome:
    """Returns the outcome for one tensor, given the scales that a rule used."""
    largest = format_of(tensor.dtype).largest
    with np.errstate(all="ignore"):
        ratio = tensor.amax / scale
        bits = math.log2(largest) - np.log2(ratio.astype(np.float64))
    saturated = saturates(tf.constant(ratio), format_of(tensor.dtype)).numpy()
    measured = (tensor.amax > 0) & ~saturated & (ratio > 0)
    return Float8Outcome(
        rule=rule,
        scale=scale,
        saturated=saturated,
        # Up to half a unit above the largest number is rounded to it.
        unused_bits=np.where(measured, np.maximum(bits, 0.0), np.nan),
        moves=int(np.count_nonzero(scale[1:] != scale[:-1])),
    )


def groups(tensors: Sequence[TensorRecord]) -> list[list[int]]:
    """Returns the places of tensors that are simulated together: of one format, and of which none
    has more than twice the lines of another, so that little memory is left empty.

    Example:
        >>> def tensor(lines):
        ...     x = np.ones(lines)
        ...     return TensorRecord("a", "float8_e5m2", x, x, x, x, x)
        >>> groups([tensor(7), tensor(4), tensor(8)])
        [[0, 1], [2]]
    """
    found: dict[tuple[str, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, len(tensor.step).bit_length()), []).append(place)
    return [*found.values()]


def compare_float8(
    tensors: Sequence[TensorRecord], rules: Iterable[str]
) -> list[list[Float8Outcome]]:
    """Returns for each tensor the outcome as it was, then the simulated outcome of each rule.

    Args:
        tensors: the recorded tensors.
        rules: rules as text, as `parse_float8_rule` accepts them.

    Raises:
        ValueError: if a text is no rule.
        TypeError: if a value in it has the wrong type.
    """
    # All texts are parsed before any is simulated.
    parsed = {text: {name: parse_float8_rule(text, name) for name in FORMATS} for text in rules}
    outcomes = [[outcome_of(RECORDED, tensor.scale, tensor)] for tensor in tensors]
    for text, by_format in parsed.items():
        for places in groups(tensors):
            chosen = [tensors[place] for place in places]
            lines = max(len(tensor.step) for tensor in chosen)
            amax = np.zeros([lines, len(chosen)], np.float32)
            present = np.zeros([lines, len(chosen)], bool)
            for column, tensor in enumerate(chosen):
                amax[: len(tensor.amax), column] = tensor.amax
                present[: len(tensor.amax), column] = True
            scales = simulate_float8_rule(by_format[chosen[0].dtype], amax, present)
            for column, place in enumerate(places):
                own = scales[: len(tensors[place].step), column]
                outcomes[place].append(outcome_of(text, own, tensors[place]))
    return outcomes
