"""`FixedLossScale` and `NoLossScale`: one step as formulas, and the claim."""

from typing import Any

import z3

from proofs import transition as shared
from proofs.formulas import FLOAT
from proofs.source import Change, loaded
from proofs.transition import Transition
from scaling.rules import constant

VARIANTS = ("FixedLossScale", "NoLossScale")
STATE = {"loss_scale": "float"}


def step_of(rule: str, change: Change = None) -> Transition:
    """Returns a step of a rule, or of a mutant, as formulas."""
    names = loaded(constant, change)
    # `tf.constant` does not take the tensor that stands for the constant.
    fixed = {"initial_state": lambda self: names["FixedLossScaleState"](self.loss_scale)}
    if rule == "FixedLossScale":
        names[rule] = type(rule, (names[rule],), fixed)
    constants = {"loss_scale": "float"} if rule == "FixedLossScale" else {}
    return shared.transition(names, rule, constants, STATE)


def given(step: Transition) -> list[Any]:
    """Returns what the constructor demands, and what holds of every possible state."""
    return [
        shared.power_of_two(each["loss_scale"]) for each in (step.constants, step.state) if each
    ]


def claims(rule: str) -> dict[str, Any]:
    """Returns the claims: functions of a step that return a formula."""

    def never_moves(step: Transition) -> Any:
        """L3: after any step the scale is the rule's own, also if another one was saved."""
        own = step.constants["loss_scale"] if rule == "FixedLossScale" else z3.FPVal(1.0, FLOAT)
        return step.after["loss_scale"] == own

    return {"never_moves": never_moves}
