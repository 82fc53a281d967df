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


KNOWN = (
    "none, fixed, dynamic, tolerant, logmax, headroom, keras3, tf_keras, pytorch, deepspeed, "
    "megatron, fairseq, metaseq, flax, jmp"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dynamix",
            f"`loss_scale` must be a number or one of {KNOWN}; got 'dynamix'. There is no rule "
            "with that name. Did you mean 'dynamic'?",
        ),
        (
            "1,024",
            f"`loss_scale` must be a number or one of {KNOWN}; got '1,024'. There is no rule with "
            "that name. Use for instance 1024 or dynamic.",
        ),
        (
            "dynamic:growth_interval=500,initial_scale=2^20",
            "`loss_scale` must separate fields by colons; got "
            "'dynamic:growth_interval=500,initial_scale=2^20'. A comma belongs to a field's value. "
            "Use dynamic:growth_interval=500:initial_scale=2^20.",
        ),
        (
            "dynamic:hysteresis",
            "`loss_scale` must give fields as field=value; got 'hysteresis' in "
            "'dynamic:hysteresis'. A field needs a value. Use for instance "
            "dynamic:growth_interval=500.",
        ),
        (
            "dynamic:hysteresis_refill=growth=now",
            '`hysteresis_refill` must be "growth" or "finite_step"; got \'growth=now\'. This argument says what resets the count of overflows. Use "growth", the default of Megatron-LM and DeepSpeed.',
        ),
        (
            "headroom:bits=3",
            "`loss_scale` must name fields of the rule; got 'bits' in 'headroom:bits=3'. headroom "
            "has backoff_factor, growth_factor, growth_interval, headroom_bits, initial_scale, "
            "max_scale, min_scale. Use only these.",
        ),
        (
            "jmp:intial_scale=8",
            "`loss_scale` must name fields of the rule; got 'intial_scale' in 'jmp:intial_scale=8'. "
            "jmp has backoff_factor, grace_steps, growth_factor, growth_interval, hysteresis, "
            "hysteresis_refill, initial_scale, low_scale_intervals, max_scale, min_scale, version. "
            "Did you mean 'initial_scale'?",
        ),
        (
            "none:loss_scale=1",
            "`loss_scale` must name fields of the rule; got 'loss_scale' in 'none:loss_scale=1'. "
            "none has no fields. Use none.",
        ),
        (
            "fixed",
            "`loss_scale` must include the value of a fixed scale; got 'fixed'. There is no default. Use for "
            "instance 1024 or fixed:loss_scale=1024.",
        ),
        (
            "2^10:growth_interval=5",
            "`loss_scale` must not have fields after a number; got '2^10:growth_interval=5'. A number means a fixed scale, which has no other fields. Use 2^10, or dynamic:initial_scale=2^10:growth_interval=5.",
        ),
        (
            "2^999",
            f"`loss_scale` must be a power of two between 2^-126 and 2^126; got {2**999}. Only powers of "
            "two scale and unscale gradients without changing their bits. Use 1024.0.",
        ),
        (
            "1000",
            "`loss_scale` must be a power of two between 2^-126 and 2^126; got 1000. Only powers of "
            "two scale and unscale gradients without changing their bits. Use 1024.0.",
        ),
    ],
)
def test_errors(text, message):
    """The error for an unknown name, field or value lists what is accepted."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        parse_rule(text)

    assert message == str(error.value)
