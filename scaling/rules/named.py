"""Parses rules from text, as they are written in flags and on command lines."""

import ast
import dataclasses
import re
from typing import Any

from scaling.base.argument_checks import did_you_mean, is_number, shown
from scaling.rules.constant import FixedLossScale, NoLossScale
from scaling.rules.dynamic import DynamicLossScale
from scaling.rules.headroom import HeadroomLossScale
from scaling.rules.logmax import LogMaxLossScale
from scaling.rules.presets import PRESETS, fields_of, preset
from scaling.rules.rule import LossScaleRule
from scaling.rules.tolerant import TolerantLossScale

POWER_OF_TWO = re.compile(r"2\^(-?[0-9]{1,3})")
NEXT_FIELD = re.compile(r"[,;]\s*([a-z_]+=)")

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
        TypeError: if `text` is not a string.
        ValueError: for an unknown name or field, or an invalid value.

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
            f"`text` must be a string; got {shown(text)}. The text describes a rule, as in a flag. "
            "Pass "
            'for instance "dynamic", or construct the rule itself.'
        )
    name, *assignments = text.strip().split(":")
    if is_number(number := parse_value(name)):
        fixed = FixedLossScale(number)
        if assignments:
            raise ValueError(
                f"`loss_scale` must not have fields after a number; got {shown(text)}. A number "
                f"means a fixed scale, which has no other fields. Use {name}, or "
                f"dynamic:initial_scale={text.strip().rstrip(':')}."
            )
        return fixed
    names = [*RULES, *PRESETS]
    if name not in names:
        raise ValueError(
            f"`loss_scale` must be a number or one of {', '.join(names)}; got {shown(text)}. There "
            "is no rule with that name. "
            f"{did_you_mean(name, names, 'Use for instance 1024 or dynamic.')}"
        )
    fields = parse_fields(name, assignments, text)
    if name == "fixed" and not fields:
        raise ValueError(
            f"`loss_scale` must include the value of a fixed scale; got {shown(text)}. There is no "
            "default. Use for instance 1024 or fixed:loss_scale=1024."
        )
    return RULES[name](**fields) if name in RULES else preset(name, **fields)


def format_rule(rule: LossScaleRule) -> str | None:
    """Returns a text from which `parse_rule` makes an equal rule; None for a class of one's own.

    Example:
        >>> format_rule(FixedLossScale(1024.0))
        'fixed:loss_scale=1024.0'
    """
    for name, kind in RULES.items():
        if type(rule) is kind:
            fields = [f"{field}={getattr(rule, field)!r}" for field in rule_fields(name)]
            return ":".join([name, *fields])
    return None


def parse_fields(name: str, assignments: list[str], text: str) -> dict[str, Any]:
    """Returns the fields that assignments such as "growth_interval=500" give to a rule.

    Args:
        name: the rule's or preset's name.
        assignments: what stood between the colons.
        text: the whole text, for errors.
    """
    known = [*fields_of(name), "version"] if name in PRESETS else rule_fields(name)
    fields: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(
                f"`loss_scale` must give fields as field=value; got {shown(assignment)} in "
                f"{shown(text)}. A field needs a value. Use for instance "
                "dynamic:growth_interval=500."
            )
        if field not in known:
            raise ValueError(
                f"`loss_scale` must name fields of the rule; got {shown(field)} in {shown(text)}. "
                f"{name} has {', '.join(known) or 'no fields'}. "
                f"{did_you_mean(field, known, 'Use only these.' if known else 'Use ' + name + '.')}"
            )
        if NEXT_FIELD.search(value):
            separated = NEXT_FIELD.sub(r":\1", text)
            raise ValueError(
                f"`loss_scale` must separate fields by colons; got {shown(text)}. A comma belongs "
                f"to a field's value. Use {separated}."
            )
        if field in fields:
            raise ValueError(
                f"`loss_scale` must give each field once; got {shown(field)} twice in "
                f"{shown(text)}. Only one value can be used. Leave one of them out."
            )
        fields[field] = value if field == "version" else parse_value(value)
    return fields


def rule_fields(name: str) -> list[str]:
    """Returns the names of the fields of a rule in `RULES`, sorted."""
    return sorted(field.name for field in dataclasses.fields(RULES[name]))


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
