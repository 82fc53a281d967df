"""Parses float8 rules from text, as they are written on the simulator's command line."""

import dataclasses
from typing import Any

from scaling.base.argument_checks import did_you_mean, shown
from scaling.float8.current import CurrentScaling
from scaling.float8.delayed import DelayedScaling
from scaling.float8.presets import PRESETS, preset
from scaling.float8.rule import Float8Rule
from scaling.rules.named import parse_value

RULES: dict[str, type] = {"delayed": DelayedScaling, "current": CurrentScaling}


def parse_float8_rule(text: str, dtype: str) -> Float8Rule:
    """Returns the rule that a text describes.

    Args:
        text: delayed, current or a preset's name, optionally followed by fields of the rule,
            separated by colons: "delayed:history_length=16:margin=1".
        dtype: the float8 format, which the text does not name.

    Raises:
        ValueError: for an unknown name or field, or an invalid value.
        TypeError: if a value has the wrong type.

    Example:
        >>> parse_float8_rule("current:margin=1", "float8_e5m2")
        CurrentScaling(dtype='float8_e5m2', margin=1, power_of_two=True)
    """
    name, *assignments = text.strip().split(":")
    names = [*RULES, *PRESETS]
    if name == "block":
        raise ValueError(
            f"`float8_rules` must be rules for whole tensors; got {shown(text)}. A run records the "
            "largest magnitude of each tensor, not those of its blocks. Use current, which has a "
            "scale for each tensor."
        )
    if name not in names:
        raise ValueError(
            f"`float8_rules` must be some of {', '.join(names)}; got {shown(text)}. There is no "
            f"rule with that name. {did_you_mean(name, names, 'Use for instance delayed.')}"
        )
    rule = RULES[name](dtype) if name in RULES else preset(name, dtype)
    return dataclasses.replace(rule, **parse_fields(rule, assignments, text))


def parse_fields(rule: Any, assignments: list[str], text: str) -> dict[str, Any]:
    """Returns the fields that assignments such as "margin=1" give to a rule.

    Args:
        rule: the rule without them.
        assignments: what stood between the colons.
        text: the whole text, for errors.
    """
    known = [field.name for field in dataclasses.fields(rule) if field.name != "dtype"]
    fields: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not equals or ";" in value:
            raise ValueError(
                "`float8_rules` must give fields as field=value, separated by colons; got "
                f"{shown(assignment)} in {shown(text)}. Commas separate rules. Use for instance "
                "delayed:history_length=16:margin=1."
            )
        if field not in known:
            raise ValueError(
                f"`float8_rules` must name fields of the rule; got {shown(field)} in "
                f"{shown(text)}. It has {', '.join(known)}. "
                f"{did_you_mean(field, known, 'Use only these.')}"
            )
        if field in fields:
            raise ValueError(
                f"`float8_rules` must give each field once; got {shown(field)} twice in "
                f"{shown(text)}. Only one value can be used. Leave one of them out."
            )
        fields[field] = parse_value(value)
    return fields
