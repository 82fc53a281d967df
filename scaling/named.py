"""Rules by name, as flags and command lines give them."""

import ast
import re
from typing import Any

from scaling.constant import FixedLossScale, NoLossScale
from scaling.dynamic import DynamicLossScale
from scaling.half import is_number
from scaling.headroom import HeadroomLossScale
from scaling.logmax import LogMaxLossScale
from scaling.presets import PRESETS, preset
from scaling.rule import LossScaleRule
from scaling.tolerant import TolerantLossScale

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
    """Returns the rule that a text stands for.

    Args:
        text: a number, for a fixed scale; or none, dynamic, tolerant, logmax, headroom or a
            preset's name, each with fields of its rule behind it, separated by colons:
            "dynamic:growth_interval=500:initial_scale=2^20". Numbers may be powers of two.

    Raises:
        ValueError: for a name, a field or a number that is not known.

    Example:
        >>> parse_rule("2^10")
        FixedLossScale(loss_scale=1024.0)
        >>> parse_rule("pytorch:growth_interval=500").growth_interval
        500
        >>> parse_rule("deepspeed:version=0.16:hysteresis=4").hysteresis
        4
    """
    name, *assignments = text.strip().split(":")
    if is_number(number := parse_value(name)) and not assignments:
        return FixedLossScale(number)
    if name not in RULES and name not in PRESETS:
        raise ValueError(
            f"`loss_scale` must be a number or one of {', '.join([*RULES, *PRESETS])}; got "
            f"{text!r}. No rule has that name. Use for instance 1024 or dynamic."
        )
    fields: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(
                f"`loss_scale` must give fields as field=value; got {assignment!r} in {text!r}. A "
                "name alone says nothing. Use for instance dynamic:growth_interval=500."
            )
        fields[field] = value if field == "version" else parse_value(value)
    try:
        return RULES[name](**fields) if name in RULES else preset(name, **fields)
    except TypeError as error:
        raise ValueError(
            f"`loss_scale` must name fields of the rule; got {text!r}. {name} has no such field, "
            f"or lacks one: {error}."
        ) from error


def parse_value(text: str) -> Any:
    """Returns the number or tuple that a text stands for, or the text if it is neither.

    Example:
        >>> parse_value("2^-3"), parse_value("500"), parse_value("True"), parse_value("growth")
        (0.125, 500, True, 'growth')
    """
    if power := POWER_OF_TWO.fullmatch(text):
        return 2 ** int(power[1])  # an int, unless the exponent is negative
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
