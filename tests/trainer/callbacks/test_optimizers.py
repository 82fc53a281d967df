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
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        check_rates_are_numbers(holder, "a callback", "it would not count", "leave it out")
    assert str(error.value) == (
        "`optimizer` must have a number as its learning rate with a callback; got "
        "ExponentialDecay. The schedule decides the learning rate, so it would not count. Make the "
        "optimizer with a number, or leave it out."
    )


class Around(keras.optimizers.Optimizer):
    """Holds another optimizer."""

    def __init__(self, inner):
        """Holds it."""
        super().__init__(1.0)
        self.inner = inner


def test_an_optimizer_in_another_is_refused():
    """The outer learning rate may have no effect."""
    holder = Holder(Around(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        check_rates_are_numbers(holder, "a callback", "it would not count", "leave it out")
    assert str(error.value) == (
        "`optimizer` must not hold another optimizer with a callback; got Around with SGD in it. "
        "Which of their learning rates counts is not known. Set it in a hook instead, as with "
        "self.optimizer.inner.learning_rate.assign(0.001)."
    )
