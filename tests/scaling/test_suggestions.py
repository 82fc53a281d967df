"""The suggestions in errors: each is accepted when it is applied, and leaves a rule that works."""

import ast
import contextlib
import functools
import itertools
import math
import re

import numpy as np
import pytest
import tensorflow as tf

import scaling
from scaling import Cause, Verdict

POWERS = [0, 0.0, -8.0, 3.0, 1000, 100000.0, 1e-300, 1e300, 2.0**-127, 2.0**127, 2.0**-40, 2.0**60]
POWERS += [math.inf, -math.inf, math.nan, True, "8", None, 2**5000, np.float32(3.0)]
COUNTS = [0, -1, 1.5, True, "3", None, 2**31, 2**70]
FRACTIONS = [-0.1, 1.0, 2, math.nan, math.inf, "0.5", None]
# Bad values for each argument, and a few that are good on their own.
BAD = {
    "initial_scale": POWERS,
    "min_scale": POWERS,
    "max_scale": POWERS,
    "growth_factor": [*POWERS, 1.0, 0.5],
    "backoff_factor": [*POWERS, 1.0, 2.0],
    "growth_interval": COUNTS,
    "hysteresis": COUNTS,
    "hysteresis_refill": ["never", None, 1],
    "grace_steps": COUNTS[1:],
    "low_scale_intervals": [(2.0, 25), 3, ((3.0, 25),), ((0.0, 25),), ((8.0, 0),), ((8.0, 2**31),)],
    "tolerance": FRACTIONS,
    "scale_interval": ["no", None, 2],
    "headroom_bits": [*COUNTS[1:], 41],
    "mean_decay": FRACTIONS,
    "deviation_decay": FRACTIONS,
    "deviations": [-1.0, 101, math.nan, "3", None],
}
RULES = [
    scaling.DynamicLossScale,
    scaling.TolerantLossScale,
    scaling.HeadroomLossScale,
    scaling.LogMaxLossScale,
]
CASES = [
    (rule, argument, value)
    for rule, (argument, values) in itertools.product(RULES, BAD.items())
    if argument in rule.__dataclass_fields__
    for value in values
]
VALUE = (
    r"(2\.0\*\*-?\d+|-?\d+(?:\.\d+)?(?:e-?\d+)?|\"\w+\"|True|False|\(\(.*?\)\)|\(.*?\))(?=[,. ]|$)"
)
USE = re.compile(rf"Use (?:for instance )?{VALUE}")  # "Use X", "Use for instance X"
SET = re.compile(rf"`(\w+)` to {VALUE}")  # "Set `a` to X, or `b` to Y"


def parse(text):
    """Returns the value of a suggestion: a power of two or a Python literal."""
    base, _, exponent = text.partition("**")
    return float(base) ** int(exponent) if exponent else ast.literal_eval(text)


def suggested_changes(message, arguments):
    """Returns the changes of arguments that an error suggests: one dict for each alternative."""
    argument = re.match(r"`(\w+)`", message)[1]
    if "Lower `min_scale` or raise `max_scale`" in message:
        low = arguments.get("min_scale", 2.0**-14)
        high = arguments.get("max_scale", 2.0**24)
        return [{"min_scale": high / 2}, {"max_scale": 2 * low}]
    if pairs := SET.findall(message):
        return [{name: parse(text)} for name, text in pairs]
    value = parse(USE.search(message)[1])
    return [{argument: (value,) if "for this pair" in message else value}]


def accepted_rules(make, arguments, depth=3):
    """Yields the rules that are built by following at most `depth` suggestions in a row."""
    try:
        yield make(**arguments)
    except ValueError as error:
        message = str(error)
    except TypeError as error:
        message = str(error)
    else:
        return
    assert depth, f"{arguments} must be accepted, but: {message}"
    for changes in suggested_changes(message, arguments):
        yield from accepted_rules(make, arguments | changes, depth - 1)


@functools.cache  # most suggestions lead to the same few rules
def assert_moves(rule):
    """Asserts that overflows lower the scale from its ceiling and finite steps raise its floor."""
    overflow = Verdict(tf.constant(False), Cause.BACKWARD, tf.constant(math.inf))
    finite = Verdict(tf.constant(True), Cause.NONE, tf.constant(2.0**-100))
    start = rule.initial_state()
    state = start._replace(loss_scale=tf.constant(rule.max_scale))
    for _ in range(3):
        state = rule.advance(state, overflow)

    assert float(state.loss_scale) < rule.max_scale, f"{rule} does not back off"
    state = start._replace(loss_scale=tf.constant(rule.min_scale))
    if "finite_steps" in state._fields:
        state = state._replace(finite_steps=tf.constant(rule.growth_interval - 1))
    assert float(rule.advance(state, finite).loss_scale) > rule.min_scale, f"{rule} does not grow"


@pytest.mark.parametrize(
    ("make", "argument", "value"),
    CASES,
    ids=[f"{make.__name__} {argument} {str(value)[:12]}" for make, argument, value in CASES],
)
def test_every_suggestion_gives_a_rule_that_moves(make, argument, value):
    """L3, L11: if the suggestion of each error is applied, the rule is accepted after at most three
    errors, can back off, and can grow.
    """
    for rule in accepted_rules(make, {argument: value}):
        assert_moves(rule)


@pytest.mark.parametrize(
    ("argument", "value", "suggested"),
    [
        ("min_scale", 0, 2.0**-14),
        ("min_scale", -1.0, 2.0**-14),
        ("min_scale", 1e300, 2.0**-14),
        ("min_scale", 2.0**-127, 2.0**-126),
        ("min_scale", 3e-5, 2.0**-15),
        ("max_scale", math.inf, 2.0**24),
        ("max_scale", 0, 2.0**24),
        ("max_scale", 2.0**127, 2.0**126),
        ("max_scale", 65504.0, 65536.0),
        ("initial_scale", 0, 2.0**15),
        ("initial_scale", math.nan, 2.0**15),
        ("initial_scale", 1e300, 2.0**15),
        ("initial_scale", 65504.0, 65536.0),
    ],
)
@pytest.mark.parametrize("make", RULES)
def test_a_bound_is_suggested_that_suits_the_argument(make, argument, value, suggested):
    """L3: a usual bound in place of one that makes no sense, and else the nearest power of two."""
    [rule] = accepted_rules(make, {argument: value}, depth=1)

    assert getattr(rule, argument) == suggested


@pytest.mark.parametrize("value", [*POWERS, 2.0**-100 * 3, 2.0**100 * 3], ids=lambda v: str(v)[:12])
def test_a_fixed_scale_is_suggested_that_fits_float16(value):
    """L3: no error suggests a scale at which float16 would hold no gradient at all."""
    with contextlib.suppress(ValueError):
        scaling.FixedLossScale(value)
        return
    [rule] = accepted_rules(scaling.FixedLossScale, {"loss_scale": value}, depth=1)

    assert 2.0**-24 <= rule.loss_scale <= 2.0**40


@pytest.mark.parametrize("argument", ["max_layer_scale", "max_total_scale"])
@pytest.mark.parametrize("value", POWERS, ids=lambda value: str(value)[:12])
def test_a_layerwise_bound_is_suggested_that_scales(argument, value):
    """No error suggests a bound of 1, with which nothing is scaled."""
    for rule in accepted_rules(scaling.LayerwiseLossScale, {argument: value}, depth=2):
        assert getattr(rule, argument) > 1


@pytest.mark.parametrize(
    "text",
    [
        "1000",
        "0",
        "2^999",
        "fixed",
        "dynamix",
        "dynamic:growth_interval",
        "1024:growth_interval=5",
        "2^10:growth_interval=5",
        "headroom:bits=3",
        "none:loss_scale=1",
    ],
)
def test_a_text_is_suggested_that_can_be_parsed(text):
    """Each rule that an error of `parse_rule` suggests can be parsed."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the suggestions in it are tried
        scaling.parse_rule(text)
    remedy = re.search(r"(?:Use|Did you mean) (.*)", str(error.value))[1].replace(
        "for instance ", ""
    )
    suggested = [each.strip("'?. ") for each in re.split(r", or | or ", remedy)]

    for each in suggested:
        if each != "only these":
            assert scaling.parse_rule(each)
