"""Float8 rules from text, and the errors of texts that are none."""

import pytest

from scaling.float8 import CurrentScaling, DelayedScaling, preset
from scaling.float8.named import parse_float8_rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("delayed", DelayedScaling("float8_e5m2")),
        (
            " delayed:history_length=2^4:margin=-1:algorithm=most_recent",
            DelayedScaling("float8_e5m2", 16, "most_recent", -1),
        ),
        ("keras3", preset("keras3", "float8_e5m2")),
        ("current:power_of_two=False", CurrentScaling("float8_e5m2", power_of_two=False)),
    ],
)
def test_a_text_gives_a_rule(text, rule):
    """A name, then fields behind colons; the format is the tensor's."""
    assert parse_float8_rule(text, "float8_e5m2") == rule


NAMES = "delayed, current, keras3, flax, transformer_engine"
FORM = ". Commas separate rules. Use for instance delayed:history_length=16:margin=1."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "delay",
            f"`float8_rules` must be some of {NAMES}; got 'delay'. There is no rule with that name. "
            "Did you mean 'delayed'?",
        ),
        (
            "",
            f"`float8_rules` must be some of {NAMES}; got ''. There is no rule with that name. Use "
            "for instance delayed.",
        ),
        (
            "block",
            "`float8_rules` must be rules for whole tensors; got 'block'. A run records the largest "
            "magnitude of each tensor, not those of its blocks. Use current, which has a scale for "
            "each tensor.",
        ),
        (
            "delayed:history_length=16;margin=1",
            "`float8_rules` must give fields as field=value, separated by colons; got "
            f"'history_length=16;margin=1' in 'delayed:history_length=16;margin=1'{FORM}",
        ),
        (
            "delayed:16",
            "`float8_rules` must give fields as field=value, separated by colons; got '16' in "
            f"'delayed:16'{FORM}",
        ),
        (
            "current:history_length=16",
            "`float8_rules` must name fields of the rule; got 'history_length' in "
            "'current:history_length=16'. It has margin, power_of_two. Use only these.",
        ),
        (
            "current:margin=1:margin=2",
            "`float8_rules` must give each field once; got 'margin' twice in "
            "'current:margin=1:margin=2'. Only one value can be used. Leave one of them out.",
        ),
        (
            "delayed:margin=much",
            "`margin` must be an int from -64 to 64; got 'much'. It counts factors of two above the "
            "largest magnitude. Use 0, the default.",
        ),
    ],
)
def test_other_texts_are_refused(text, message):
    """An error says what is wrong and what to write."""
    with pytest.raises(ValueError, match="must") as error:
        parse_float8_rule(text, "float8_e4m3fn")
    assert str(error.value) == message
