"""The rules that never move."""

import numpy as np
import pytest

from scaling import FixedLossScale, NoLossScale


@pytest.mark.parametrize("rule", [FixedLossScale(8.0), NoLossScale()])
def test_constant_rules_stay(rule):
    """The scales of `FixedLossScale` and `NoLossScale` never move, whatever the verdict."""
    state = rule.initial_state()

    assert float(rule.advance(rule.advance(state, False), True).loss_scale) == state.loss_scale


def test_the_scale_of_constant_rules():
    """A fixed scale is the given number, also if it is a NumPy number; no scale is a scale of 1."""
    assert float(FixedLossScale(8.0).initial_state().loss_scale) == 8.0
    assert float(FixedLossScale(np.float16(4.0)).initial_state().loss_scale) == 4.0
    assert float(NoLossScale().initial_state().loss_scale) == 1.0


def test_a_fixed_scale_must_be_a_power_of_two():
    """L3: a fixed scale is a power of two as well."""
    with pytest.raises(ValueError, match=r"^`loss_scale`"):
        FixedLossScale(1000.0)
