"""Rules by name: `preset` for those of other systems, `parse_rule` for flags and command lines.

Presets reproduce the loss scaling of the systems that they are named after.
`tests/scaling/rules/test_named.py` compares each over random histories with the system itself, or
with a short reimplementation of it.
"""

import ast
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from scaling.base.argument_checks import is_number, shown
from scaling.base.number_formats import LARGEST_SCALE, SMALLEST_SCALE
from scaling.rules.constant import FixedLossScale, NoLossScale
from scaling.rules.dynamic import DynamicLossScale
from scaling.rules.headroom import HeadroomLossScale
from scaling.rules.logmax import LogMaxLossScale
from scaling.rules.rule import LossScaleRule
from scaling.rules.tolerant import TolerantLossScale

# A system without bounds gets the widest bounds that a rule accepts.
unbounded = partial(DynamicLossScale, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
above_one = partial(DynamicLossScale, min_scale=1.0, max_scale=LARGEST_SCALE)
tolerant = partial(TolerantLossScale, tolerance=0.0, max_scale=LARGEST_SCALE)


def flax(growth_interval: int, **fields: Any) -> DynamicLossScale:
    """Returns Flax's rule. Flax compares before it counts: an interval of N takes N + 1 steps."""
    return unbounded(growth_interval=growth_interval + 1, **fields)


deepspeed = partial(above_one, initial_scale=2.0**16, growth_interval=1000, hysteresis=2)

# Keyed by system, then by version, newest last. None means that all versions agree.
PRESETS: dict[str, dict[str | None, Callable[..., LossScaleRule]]] = {
    "keras3": {"3.15": partial(unbounded, initial_scale=2.0**15, growth_interval=2000)},
    "tf_keras": {None: partial(above_one, initial_scale=2.0**15, growth_interval=2000)},
    "pytorch": {"2.13": partial(unbounded, initial_scale=2.0**16, growth_interval=2000)},
    "deepspeed": {"0.16": deepspeed, "0.19": partial(deepspeed, grace_steps=1)},
    "megatron": {
        None: partial(above_one, initial_scale=2.0**32, growth_interval=1000, hysteresis=2)
    },
    "fairseq": {
        None: partial(tolerant, initial_scale=2.0**15, growth_interval=2000, min_scale=2.0**-13)
    },
    "metaseq": {
        None: partial(
            tolerant, initial_scale=4.0, growth_interval=256, min_scale=2.0**-5, scale_interval=True
        )
    },
    "flax": {"0.12": partial(flax, initial_scale=2.0**16, growth_interval=2000)},
    "jmp": {"0.0.4": partial(above_one, initial_scale=2.0**15, growth_interval=2000)},
}


def preset(name: str, version: str | None = None, **overrides: Any) -> LossScaleRule:
    """Returns the rule of another system, with its defaults and its off-by-one behavior.

    As long as the system's scale stays finite and within the system's bounds, the preset's
    scale moves in exactly the same way. Beyond that, presets differ on purpose: the scale is
    always a power of two in [2^-126, 2^126], never 0, inf or NaN, and no preset raises an
    error. A training loop limits consecutive skips instead (`max_consecutive` of
    `trainer.Skips`).

    ==========  =========  ========================================================
    name        version    characteristics, and differences from the system
    ==========  =========  ========================================================
    keras3      3.15       No bounds: Keras reaches 0 after 142 overflows from 2^15 and
                           inf after 113 growths; the preset stops at 2^-126 and 2^126.
    tf_keras               Floor 1. An initial scale below 1 is an error; tf_keras
                           raises it to 1 at the first overflow.
    pytorch     2.13       No lower bound, and it stops at 2^127. Factors must be powers
                           of two.
    deepspeed   0.16       ZeRO's `DynamicLossScaler`: hysteresis 2, refilled by growth;
                           floor 1, where DeepSpeed raises an error.
    deepspeed   0.19       Like 0.16, but the first step and the step after an overflow
                           do not count: growth on step N + 1 (since 0.17.1).
    megatron               Starts at 2^32; hysteresis 2, refilled by growth; floor 1.
    fairseq                Its `DynamicLossScaler`; its command line starts at 2^7, and
                           divides its interval by the devices. `tolerance` 0; floor
                           2^-13, where fairseq, with a floor of 1e-4, raises an error.
    metaseq                The interval doubles and halves with the scale; floor 2^-5.
    flax        0.12       `growth_interval` N grows on every (N + 1)-th step. Flax's
                           ceiling is the largest float32, which is no power of two.
    jmp         0.0.4      Floor 1; in jmp itself, any tree operation drops the floor.
    ==========  =========  ========================================================

    Args:
        name: the system's name.
        version: the system's version, if its rule has changed; None means the newest.
        **overrides: fields of the rule that is returned: `TolerantLossScale` for fairseq and
            metaseq, `DynamicLossScale` otherwise. `growth_interval` has that system's
            meaning.

    Raises:
        ValueError: for a name or version that is not in the table.
        TypeError: for a field that the rule does not have.

    Source:
        The systems' own source code, read and run: Keras 3.15.1, PyTorch 2.13.0, jmp 0.0.4, flax
        0.12.8; tf_keras, DeepSpeed (2025-02 and 0.19.6), Megatron-Core, fairseq, metaseq.

    Example:
        >>> rule = preset("pytorch", growth_interval=500)
        >>> rule.initial_scale, rule.growth_interval
        (65536.0, 500)
        >>> preset("deepspeed", version="0.16").grace_steps
        0
    """
    if name not in PRESETS:
        raise ValueError(f"`name` must be one of {', '.join(PRESETS)}; got {shown(name)}")
    versions = PRESETS[name]
    if version is not None and version not in versions:
        known = ", ".join(map(str, versions))
        raise ValueError(f"`version` must be one of {known} for {name}; got {shown(version)}")
    make = versions[version] if version else list(versions.values())[-1]
    return make(**overrides)


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
