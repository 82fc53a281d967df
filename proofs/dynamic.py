"""`DynamicLossScale` as formulas of its constants and its state, traced from its own `advance`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
import z3

import scaling
from proofs.formulas import FLOAT, formulas_of
from proofs.transition import LARGEST_COUNT, overflowed, power_of_two
from scaling.rules.dynamic import DynamicLossScale, DynamicLossScaleState

SPECS = {"float": tf.TensorSpec([], tf.float32), "int": tf.TensorSpec([], tf.int32)}
CONSTANTS = {
    "growth_interval": "int",
    "growth_factor": "float",
    "backoff_factor": "float",
    "min_scale": "float",
    "max_scale": "float",
    "hysteresis": "int",
    "grace_steps": "int",
}
STATE = {"loss_scale": "float", "finite_steps": "int", "overflows_left": "int"}


class Step(NamedTuple):
    """One step of the rule: any constants, any state, any verdict."""

    constants: dict[str, Any]
    pairs: list[tuple[Any, Any]]  # `low_scale_intervals`
    state: dict[str, Any]
    finite: Any
    cause: Any
    after: dict[str, Any]  # the state after the step, as formulas of all of the above
    refill: str  # `hysteresis_refill`

    @property
    def overflowed(self) -> Any:
        """Whether the step was not finite and a smaller scale may help."""
        return overflowed(self.finite, self.cause)


def variable(name: str, kind: str) -> Any:
    """Returns a free variable of a tensor's kind."""
    return z3.FP(name, FLOAT) if kind == "float" else z3.BitVec(name, 32)


def traced(refill: str, pairs: int, advance: Callable[..., Any]) -> Any:
    """Returns `advance` as a graph whose inputs are the constants, the state and the verdict.

    Args:
        refill: `hysteresis_refill`, which the code branches on.
        pairs: the length of `low_scale_intervals`.
        advance: the method `DynamicLossScale.advance`, or a mutant of it.
    """

    def run(constants: Any, low: Any, state: Any, finite: Any, cause: Any) -> Any:
        rule = object.__new__(DynamicLossScale)  # unchecked: its constants are tensors
        fixed = {"hysteresis_refill": refill, "low_scale_intervals": tuple(low)}
        for name, value in (constants | fixed).items():
            object.__setattr__(rule, name, value)
        moved = advance(rule, DynamicLossScaleState(**state), scaling.Verdict(finite, cause))
        return [getattr(moved, name) for name in STATE]

    return tf.function(run, autograph=False).get_concrete_function(
        {name: SPECS[kind] for name, kind in CONSTANTS.items()},
        [(SPECS["float"], SPECS["int"])] * pairs,
        {name: SPECS[kind] for name, kind in STATE.items()},
        tf.TensorSpec([], tf.bool),
        SPECS["int"],
    )


def step_of(
    refill: str = "growth",
    pairs: int = 0,
    advance: Callable[..., Any] = DynamicLossScale.advance,
) -> Step:
    """Returns a step of the rule, as formulas; for the arguments see `traced`."""
    constants = {name: variable(name, kind) for name, kind in CONSTANTS.items()}
    low = [
        (variable(f"scale_{at}", "float"), variable(f"interval_{at}", "int")) for at in range(pairs)
    ]
    state = {name: variable(name, kind) for name, kind in STATE.items()}
    finite, cause = z3.Bool("grads_finite"), z3.BitVec("cause", 32)
    arguments = tf.nest.flatten([constants, low, state, finite, cause])
    after = formulas_of(traced(refill, pairs, advance), arguments)
    return Step(constants, low, state, finite, cause, dict(zip(STATE, after, strict=True)), refill)


def given(step: Step) -> list[Any]:
    """Returns what the constructor demands, and what holds of every possible state."""
    return [*valid_constants(step), *possible(step.state)]


def valid_constants(step: Step) -> list[Any]:
    """Returns what the constructor demands of the constants."""
    named, one = step.constants, z3.FPVal(1.0, FLOAT)
    scales = [scale for scale, _ in step.pairs]
    counts = [named["growth_interval"], named["hysteresis"], *(each for _, each in step.pairs)]
    floats = [term for name, term in named.items() if CONSTANTS[name] == "float"]
    return [
        *(power_of_two(term) for term in [*floats, *scales]),
        *(z3.And(term >= 1, term <= LARGEST_COUNT) for term in counts),
        z3.And(named["grace_steps"] >= 0, named["grace_steps"] <= LARGEST_COUNT),
        named["growth_factor"] > one,
        named["backoff_factor"] < one,
        named["min_scale"] <= named["max_scale"],
    ]


def possible(state: dict[str, Any]) -> list[Any]:
    """Returns what holds of every state that a rule with any valid constants can leave behind."""
    counts = state["finite_steps"], state["overflows_left"]
    return [
        power_of_two(state["loss_scale"]),
        z3.And(counts[0] >= -LARGEST_COUNT, counts[0] <= LARGEST_COUNT),
        z3.And(counts[1] >= 0, counts[1] <= LARGEST_COUNT),
    ]


def in_bounds(step: Step, state: dict[str, Any]) -> Any:
    """Returns whether a state's scale is within the rule's bounds."""
    scale, named = state["loss_scale"], step.constants
    return z3.And(scale >= named["min_scale"], scale <= named["max_scale"])


def interval(step: Step) -> Any:
    """Returns the growth interval at the state's scale."""
    shortest = step.constants["growth_interval"]
    for scale, count in step.pairs:
        shorter = z3.And(step.state["loss_scale"] < scale, count < shortest)
        shortest = z3.If(shorter, count, shortest)
    return shortest
