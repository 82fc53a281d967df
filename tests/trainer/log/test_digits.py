"""Numbers print with the digits that they need."""

import pytest

from trainer.log.digits import format_number


@pytest.mark.parametrize("value", [1e-30, 3.3e-6, 0.0042, 0.5, 12.5, 999.5, 123456.0, 1e30])
def test_a_number_can_be_read_back(value):
    """No number becomes 0 or loses more than a percent, and none is long."""
    for signed in (value, -value):
        assert float(format_number(signed)) == pytest.approx(signed, rel=0.01)
        assert len(format_number(signed)) <= 10
