"""Rules that move exactly as another system's, by its name.

Each preset was held against the system itself, or against a short program of its law, over
random histories: `tests/scaling/rules/test_presets.py`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from scaling.base.argument_checks import nearest
from scaling.base.number_formats import LARGEST_SCALE, SMALLEST_SCALE
from scaling.rules.dynamic import DynamicLossScale
from scaling.rules.rule import LossScaleRule, check_count
from scaling.rules.tolerant import TolerantLossScale

# Where a system knows no bound, ours is the widest there is.
unbounded = partial(DynamicLossScale, min_scale=SMALLEST_SCALE, max_scale=LARGEST_SCALE)
above_one = partial(DynamicLossScale, min_scale=1.0, max_scale=LARGEST_SCALE)
tolerant = partial(TolerantLossScale, tolerance=0.0, max_scale=LARGEST_SCALE)


def flax(growth_interval: int, **fields: Any) -> DynamicLossScale:
    """Flax compares its count before it adds to it, so its interval of N is N + 1 steps."""
    check_count("growth_interval", growth_interval, "It counts as Flax does.", "2000 is usual", 0)
    return unbounded(growth_interval=growth_interval + 1, **fields)


deepspeed = partial(above_one, initial_scale=2.0**16, growth_interval=1000, hysteresis=2)

# By system and version, the newest last. None: the system's law has but one version.
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
    """Returns the rule of another system, with its defaults and its off-by-ones.

    Every preset moves as its system does for as long as that system stays finite and
    within its own bounds. Outside them ours differ on purpose: the scale is always a power
    of two in [2^-126, 2^126], never 0, inf or NaN, and nothing raises; a training loop's
    bound on consecutive skips does that (`max_consecutive_skips` of `trainer.Trainer`).

    ==========  =========  ========================================================
    name        version    what is its own, and where ours differs
    ==========  =========  ========================================================
    keras3      3.15       No bounds: Keras reaches 0 after 142 overflows from 2^15
                           and inf after 113 growths; ours stops at 2^-126 and 2^126.
    tf_keras               Floor 1. An initial scale below 1, which tf_keras raises
                           to 1 at an overflow, is refused.
    pytorch     2.13       No bounds, as keras3. Factors must be powers of two.
    deepspeed   0.16       ZeRO's `DynamicLossScaler`: hysteresis 2, given back by
                           growth, floor 1. Where it raises at the floor, ours stays.
    deepspeed   0.19       As 0.16, but the step after an overflow and the first one
                           do not count: growth on step N + 1 (since 0.17.1).
    megatron               Starts at 2^32; hysteresis 2, given back by growth; floor 1.
    fairseq                `tolerance` 0; a floor of 2^-13, where fairseq, with its
                           1e-4, raises.
    metaseq                The interval doubles and halves with the scale; floor 2^-5.
    flax        0.12       `growth_interval` N grows on every (N + 1)-th step. Flax's
                           bounds are the float32 range, which is no power of two.
    jmp         0.0.4      Floor 1, which jmp loses and resets at any tree operation.
    ==========  =========  ========================================================

    Args:
        name: the system.
        version: of the system, where its law changed; None is the newest.
        **overrides: fields of the rule that is returned, `DynamicLossScale` or for fairseq
            and metaseq `TolerantLossScale`; `growth_interval` counts as that system does.

    Raises:
        ValueError: for a name or version that is not in the table.
        TypeError: for a field that the rule does not have.

    Source:
        The systems' own sources, read and run: Keras 3.15.1, PyTorch 2.13.0, jmp 0.0.4, flax
        0.12.8; tf_keras, DeepSpeed (2025-02 and 0.19.6), Megatron-Core, fairseq, metaseq.

    Example:
        >>> rule = preset("pytorch", growth_interval=500)
        >>> rule.initial_scale, rule.growth_interval
        (65536.0, 500)
        >>> preset("deepspeed", version="0.16").grace_steps
        0
    """
    if name not in PRESETS:
        own = "Use one of these, or scaling.DynamicLossScale with constants of your own."
        raise ValueError(
            f"`name` must be one of {', '.join(PRESETS)}; got {name!r}. A preset is known by the "
            f"system it moves like. {nearest(name, PRESETS, own)}"
        )
    versions = PRESETS[name]
    if version is not None and version not in versions:
        rule = (
            f"be one of {', '.join(map(str, versions))}" if None not in versions else "be left out"
        )
        raise ValueError(
            f"`version` must {rule} for {name}; got {version!r}. Only what the table lists was "
            "held against the system. Read there where its law changed, or give no version."
        )
    known = fields_of(name)
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise TypeError(
            f"`overrides` must be fields of the preset's rule; got {', '.join(unknown)}. {name} "
            f"has {', '.join(known)}. {nearest(unknown[0], known, 'Use these names.')}"
        )
    make = versions[version] if version else list(versions.values())[-1]
    return make(**overrides)


def fields_of(name: str) -> list[str]:
    """Returns the fields of a preset's rule, which its versions have in common; sorted."""
    rule: Any = list(PRESETS[name].values())[-1]()
    return sorted(field.name for field in dataclasses.fields(rule))
