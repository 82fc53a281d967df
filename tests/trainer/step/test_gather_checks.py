"""What a step refuses if its loss couples the batch."""

import pytest
import tensorflow as tf
from plans import Pair, loss_of_pair, plan_of

from trainer.step.gather_checks import check_gathers, check_loss_reduction, check_no_weights


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda: check_loss_reduction("global", 2),
            "`num_microbatches` ",
        ),
        (
            lambda: check_no_weights(tf.ones),
            "`example_weights` ",
        ),
        (
            lambda: check_gathers(tf.distribute.get_strategy(), True, None),
            "`jit_compile` ",
        ),
        (
            lambda: check_gathers(tf.distribute.get_strategy(), False, 100),
            "`on_stuck` ",
        ),
    ],
    ids=["microbatches", "weights", "XLA", "float32"],
)
def test_what_is_refused(check, message):
    """What a global loss cannot do is refused by name, with the way out."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        check()

    assert str(error.value).startswith(message)


def test_tpus_and_parameter_servers_are_refused(monkeypatch):
    """On several replicas of a TPU or of parameter servers nothing was tried, so it is refused."""
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(
        "trainer.step.gather_checks.strategies.capabilities",
        lambda _: type("Found", (), {"decides_in_replica": True, "asynchronous": False}),
    )
    with pytest.raises(ValueError, match="`strategy`"):
        check_gathers(strategy, False, None)


def test_one_replica_needs_none_of_it():
    """On a single replica XLA may compile the pass, which is a `tf.function` of its own."""
    model = Pair()
    plan = plan_of(model, loss_of_pair(model), reduction="global", jit_compile=True)

    assert not plan.gathers
    assert isinstance(plan.groups[0].differentiate, type(tf.function(len)))
