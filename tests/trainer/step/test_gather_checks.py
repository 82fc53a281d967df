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
            '`num_microbatches` must be 1 with reduction="global"; got 2. Microbatches are '
            "computed one after the other, so none of them sees the whole batch that the loss "
            "compares. Use more replicas, a smaller batch, or keras.RematScope to save memory.",
        ),
        (
            lambda: check_no_weights(tf.ones),
            '`example_weights` must not be given with reduction="global"; got a function. The '
            "loss is one number, so there is nothing that the trainer could weight. Weight the "
            "examples inside compute_loss, with self.all_gather(weights).",
        ),
        (
            lambda: check_gathers(tf.distribute.get_strategy(), True, None),
            '`jit_compile` must be False with reduction="global" on several replicas; got '
            "True. XLA cannot compile a pass in the middle of which replicas exchange rows. Leave "
            "out jit_compile=.",
        ),
        (
            lambda: check_gathers(tf.distribute.get_strategy(), False, 100),
            '`on_stuck` must not be "float32" with reduction="global" on several replicas; '
            'got "float32". Replicas cannot exchange rows under a condition, here that of a step in '
            'float32. Use "raise" or "hold".',
        ),
    ],
    ids=["microbatches", "weights", "XLA", "float32"],
)
def test_what_is_refused(check, message):
    """What a global loss cannot do is refused by name, with the way out."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        check()

    assert str(error.value) == message


def test_tpus_and_parameter_servers_are_refused(monkeypatch):
    """On several replicas of a TPU or of parameter servers nothing was tried, so it is refused."""
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(
        "trainer.step.gather_checks.strategies.capabilities",
        lambda _: type("Found", (), {"decides_in_replica": True, "asynchronous": False}),
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_gathers(strategy, False, None)

    assert str(error.value) == (
        '`strategy` must be mirrored or multi_worker_mirrored with reduction="global" on '
        f"several replicas; got {type(strategy).__name__}. Replicas exchange rows in the middle of "
        "a step, which was not tried there. Use another strategy, or a single replica."
    )


def test_one_replica_needs_none_of_it():
    """On a single replica XLA may compile the pass, which is a `tf.function` of its own."""
    model = Pair()
    plan = plan_of(model, loss_of_pair(model), reduction="global", jit_compile=True)

    assert not plan.gathers
    assert isinstance(plan.groups[0].differentiate, type(tf.function(len)))
