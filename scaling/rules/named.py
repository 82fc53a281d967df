"""Parses rules from text, as they are written in flags and on command lines."""

import ast
import re
from typing import Any

from scaling.base.argument_checks import is_number, shown
from scaling.rules.constant import FixedLossScale, NoLossScale
from scaling.rules.dynamic import DynamicLossScale
from scaling.rules.headroom import HeadroomLossScale
from scaling.rules.logmax import LogMaxLossScale
from scaling.rules.presets import PRESETS, preset
from scaling.rules.rule import LossScaleRule
from scaling.rules.tolerant import TolerantLossScale

POWER_OF_TWO = re.compile(r"2\^(-?[0-9]{1,3})")

RULES: dict[str, type] = {
    "none": NoLossScale,
    "fixed": FixedLossScale,
    "dynamic": DynamicLossScale,
    "tolerant": TolerantLossScale,
    "logmax": LogMaxLossScale,
    "headroom": HeadroomLossScale,
}


def parse_rule(text: str) -> LossScaleRule:
    """Returns the rule that a text describes.

    Args:
        text: a number, which means a fixed scale; or none, fixed, dynamic, tolerant, logmax,
            headroom or a preset's name, optionally followed by fields of the rule, separated
            by colons: "dynamic:growth_interval=500:initial_scale=2^20". A power of two can be
            written as 2^20.

    Raises:
        ValueError: for an unknown name, or an invalid value.
        TypeError: for an unknown field.

    Example:
        >>> parse_rule("2^10")
        FixedLossScale(loss_scale=1024.0)
        >>> parse_rule("pytorch:growth_interval=500").growth_interval
        500
        >>> parse_rule("deepspeed:version=0.16:hysteresis=4").hysteresis
        4
    """
    name, *assignments = text.strip().split(":")
    fields = {}
    for assignment in assignments:
        field, _, value = assignment.partition("=")
        fields[field] = value if field == "version" else parse_value(value)
    if is_number(number := parse_value(name)):
        return FixedLossScale(number, **fields)
    if name in RULES:
        rule: LossScaleRule = RULES[name](**fields)
        return rule
    if name in PRESETS:
        return preset(name, **fields)
    known = ", ".join([*RULES, *PRESETS])
    raise ValueError(f"`loss_scale` must be a number or one of {known}; got {shown(text)}")


def format_rule(rule: LossScaleRule) -> str | None:
    """Returns a text from which `parse_rule` makes an equal rule; None for a class of one's own.

    Example:
        >>> format_rule(FixedLossScale(1024.0))
        'fixed:loss_scale=1024.0'
    """
    for name, kind in RULES.items():
        if type(rule) is kind:
            fields = [f"{field}={value!r}" for field, value in sorted(vars(rule).items())]
            return ":".join([name, *fields])
    return None


def parse_value(text: str) -> Any:
    """Returns the Python literal or power of two that a text denotes; other text is unchanged.

    Example:
        >>> parse_value("2^-3"), parse_value("500"), parse_value("True"), parse_value("growth")
        (0.125, 500, True, 'growth')
    """
    if power := POWER_OF_TWO.fullmatch(text):
        return 2 ** int(power[1])  # an int, unless the exponent is negative
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):  # TypeError: a set of lists
        return text
