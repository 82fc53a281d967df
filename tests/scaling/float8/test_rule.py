"""What all float8 rules have in common."""

import inspect

import pytest
import tensorflow as tf

from scaling.float8 import BlockScaling, CurrentScaling, DelayedScaling, losses_of_cast
from scaling.float8.rule import Float8Rule

RULES = [DelayedScaling, CurrentScaling, BlockScaling]


def test_one_loop_serves_every_rule():
    """No rule needs a condition. A tensor that grows saturates under the delayed rule alone; of one
    with an outlier, only blocks keep the small numbers.
    """
    sequence = [[1.0] * 4, [1e4] * 4, [2.0**-12, 2.0**-12, 1.0, 448.0]]
    lost = {}
    for rule in (DelayedScaling(), CurrentScaling(), BlockScaling(block=(2,))):
        state, lost[type(rule)] = rule.initial_state(), []
        for x in map(tf.constant, sequence):
            amax = rule.amax(x)
            spread = rule.spread(rule.choose_scale(state, amax), x)
            counts = losses_of_cast(x, spread, rule.dtype)
            lost[type(rule)].append(tuple(int(count) for count in counts))
            state = rule.advance(state, amax)
    assert lost[DelayedScaling] == [(0, 0), (4, 0), (0, 2)]
    assert lost[CurrentScaling] == [(0, 0), (0, 0), (0, 2)]
    assert lost[BlockScaling] == [(0, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["initial_state", "amax", "choose_scale", "spread", "advance"])
def test_every_rule_has_the_methods_of_the_interface(rule, name):
    """With the same arguments, and a format."""
    found = inspect.signature(getattr(rule, name)).parameters
    assert [*found] == [*inspect.signature(getattr(Float8Rule, name)).parameters]
    assert rule("float8_e5m2").dtype == "float8_e5m2"
