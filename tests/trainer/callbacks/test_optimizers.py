"""The optimizers whose learning rates a callback sets."""

import keras
import pytest

from trainer.callbacks.optimizers import check_rates_are_numbers, optimizers_of


class Holder:
    """Stands for a trainer."""

    def __init__(self, optimizer):
        """Holds it."""
        self.optimizer = optimizer


def test_every_optimizer_counts_once():
    """Those of a dict, and those inside a MultiOptimizer."""
    one, two = keras.optimizers.SGD(), keras.optimizers.Adam()
    assert optimizers_of(Holder(one)) == [one]
    assert optimizers_of(Holder({"a": one, "b": two})) == [one, two]


def test_a_schedule_is_refused():
    """Whatever a callback would set has no effect."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    holder = Holder({"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.SGD(schedule)})
    with pytest.raises(ValueError, match="`optimizer` must have a number"):
        check_rates_are_numbers(holder, "a callback")
