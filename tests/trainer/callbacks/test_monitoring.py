"""Settings of monitoring; what they do is tested where they are used."""

import pytest

from trainer import Monitoring


@pytest.mark.parametrize("steps", [(9, 3), (0, 3), (1, 2, 3)])
def test_steps_that_cannot_be_profiled_are_refused(steps):
    """Nothing would be profiled, without a word."""
    with pytest.raises(ValueError, match=r"^`profile_steps` must "):
        Monitoring(profile_steps=steps)
