"""The named types."""

import pytest
import tensorflow as tf
from generators import ONE_OF_EACH

from scaling.base.types import RuleState


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=lambda rule: type(rule).__name__)
def test_the_state_of_every_rule_is_a_rule_state(rule):
    """A state has `loss_scale` and the methods of a NamedTuple; a number and a tensor do not."""
    state = rule.initial_state()

    assert isinstance(state, RuleState)
    assert list(state._asdict()) == list(state._fields)
    assert float(state._replace(loss_scale=tf.constant(2.0)).loss_scale) == 2.0
    assert not isinstance(2.0, RuleState)
    assert not isinstance(tf.constant(2.0), RuleState)
