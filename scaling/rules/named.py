"""Rules by name, as flags and command lines give them."""

import ast
import dataclasses
import re
from typing import Any

from scaling.base.argument_checks import is_number, nearest
from scaling.rules.constant import FixedLossScale, NoLossScale
from scaling.rules.dynamic import DynamicLossScale
from scaling.rules.headroom import HeadroomLossScale
from scaling.rules.logmax import LogMaxLossScale
from scaling.rules.presets import PRESETS, fields_of, preset
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
    """Returns the rule that a text stands for.

    Args:
        text: a number, for a fixed scale; or none, dynamic, tolerant, logmax, headroom or a
            preset's name, each with fields of its rule behind it, separated by colons:
            "dynamic:growth_interval=500:initial_scale=2^20". Numbers may be powers of two.

    Raises:
        TypeError: if it is no text.
        ValueError: for a name, a field or a number that is not known.

    Example:
        >>> parse_rule("2^10")
        FixedLossScale(loss_scale=1024.0)
        >>> parse_rule("pytorch:growth_interval=500").growth_interval
        500
        >>> parse_rule("deepspeed:version=0.16:hysteresis=4").hysteresis
        4
    """
    if not isinstance(text, str):
        raise TypeError(
            f"`text` must be a string; got {text!r}. It is what stands on a command line. Pass for "
            'instance "dynamic", or make the rule itself.'
        )
    name, *assignments = text.strip().split(":")
    if is_number(number := parse_value(name)):
        if assignments:
            raise ValueError(
                f"`loss_scale` must have no fields behind a number; got {text!r}. A fixed scale "
                f"never moves. Use {name} alone, or dynamic:initial_scale={text}."
            )
        return FixedLossScale(number)
    names = [*RULES, *PRESETS]
    if name not in names:
        raise ValueError(
            f"`loss_scale` must be a number or one of {', '.join(names)}; got {text!r}. No rule "
            f"has that name. {nearest(name, names, 'Use for instance 1024 or dynamic.')}"
        )
    known = [*fields_of(name), "version"] if name in PRESETS else own_fields(name)
    fields: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(
                f"`loss_scale` must give fields as field=value; got {assignment!r} in {text!r}. A "
                "name alone says nothing. Use for instance dynamic:growth_interval=500."
            )
        if field not in known:
            raise ValueError(
                f"`loss_scale` must name fields of the rule; got {field!r} in {text!r}. {name} has "
                f"{', '.join(known) or 'no fields'}. {nearest(field, known, 'Name only these.')}"
            )
        fields[field] = value if field == "version" else parse_value(value)
    if name == "fixed" and not fields:
        raise ValueError(
            f"`loss_scale` must say which scale is fixed; got {text!r}. No scale is usual. Use for "
            "instance 1024 or fixed:loss_scale=1024."
        )
    return RULES[name](**fields) if name in RULES else preset(name, **fields)


def own_fields(name: str) -> list[str]:
    """Returns the fields of a rule of this room, sorted."""
    return sorted(field.name for field in dataclasses.fields(RULES[name]))


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
