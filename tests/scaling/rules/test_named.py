"""Parsing rules from text."""

import pytest

import scaling
from scaling import DynamicLossScale, FixedLossScale, HeadroomLossScale, parse_rule
from scaling.rules.named import RULES, format_rule
from scaling.rules.presets import PRESETS


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1024", FixedLossScale(1024.0)),
        ("2^-3", FixedLossScale(0.125)),
        ("dynamic:growth_interval=2^9", DynamicLossScale(growth_interval=512)),
        ("fixed:loss_scale=2^4", FixedLossScale(16.0)),
        ("none", scaling.NoLossScale()),
        ("dynamic", DynamicLossScale()),
        (
            "dynamic:growth_interval=7:hysteresis_refill=finite_step:initial_scale=2^20",
            DynamicLossScale(2.0**20, 7, hysteresis_refill="finite_step"),
        ),
        (
            "dynamic:low_scale_intervals=((2.0,25),)",
            DynamicLossScale(low_scale_intervals=((2.0, 25),)),
        ),
        ("headroom:headroom_bits=2", HeadroomLossScale(headroom_bits=2)),
        ("logmax", scaling.LogMaxLossScale()),
        ("tolerant:scale_interval=True", scaling.TolerantLossScale(scale_interval=True)),
        ("deepspeed:version=0.16", scaling.preset("deepspeed", version="0.16")),
        ("deepspeed", scaling.preset("deepspeed", version="0.19")),
        (
            "flax:growth_interval=9",
            DynamicLossScale(2.0**16, 10, min_scale=2.0**-126, max_scale=2.0**126),
        ),
    ],
)
def test_rules_are_parsed_from_text(text, rule):
    """A text may be a name, a number or a power of two, and may set fields."""
    assert rule == parse_rule(text)


@pytest.mark.parametrize(
    "text",
    [
        *(name for name in RULES if name != "fixed"),
        *PRESETS,
        "fixed:loss_scale=2^-126",
        "dynamic:initial_scale=2^20:low_scale_intervals=((2.0,25),):hysteresis_refill=finite_step",
        "headroom:headroom_bits=3",
    ],
)
def test_a_text_of_every_rule_is_parsed_to_it(text):
    """`format_rule` is the inverse of `parse_rule`."""
    rule = parse_rule(text)

    assert parse_rule(format_rule(rule)) == rule


def test_a_rule_of_ones_own_has_no_text():
    """Nor does a subclass of a built-in rule."""

    class Own(DynamicLossScale):
        pass

    assert format_rule(Own()) is None


@pytest.mark.parametrize("name", [*RULES, *PRESETS])
def test_every_name_can_be_parsed(name):
    """Every name gives a rule; only a fixed scale needs a number."""
    text = "fixed:loss_scale=8" if name == "fixed" else name

    assert float(parse_rule(text).initial_state().loss_scale) > 0


@pytest.mark.parametrize("text", ["dynamix", "1,024", "1000", "2^999"])
def test_texts_of_no_rule_are_errors(text):
    """Unknown names, and numbers that are no powers of two."""
    with pytest.raises(ValueError, match=r"^`loss_scale`"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("dynamic:growth_interval=500,initial_scale=2^20", "growth_interval"),
        ("dynamic:hysteresis", "hysteresis"),
        ("dynamic:hysteresis_refill=growth=now", "hysteresis_refill"),
        ("headroom:bits=3", "bits"),
        ("jmp:intial_scale=8", "intial_scale"),
        ("none:loss_scale=1", "loss_scale"),
        ("fixed", "loss_scale"),
        ("2^10:growth_interval=5", "growth_interval"),
    ],
)
def test_wrong_fields_are_errors(text, word):
    """Of the rule's own checks, or of Python's."""
    with pytest.raises((TypeError, ValueError), match=word):
        parse_rule(text)
