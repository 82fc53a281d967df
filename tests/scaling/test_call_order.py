"""The order of a scaler's calls: which orders are errors, and which are not."""

import pytest
import tensorflow as tf

import scaling
from scaling import DynamicLossScale, LossScaler


def take_step(scaler, verdict):
    """One whole step, with a loss of 1 that is its own gradient."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    return scaler.update(verdict)


def test_tokens_are_told_apart_by_replica(mirrored):
    """Each replica traces its own three calls; another replica's token is refused."""
    strategy = mirrored(2)
    with strategy.scope():
        scaler = LossScaler(DynamicLossScale())
    tokens = []

    def replica():
        scaled, token = scaler.scale(tf.constant(1.0))
        tokens.append(token)
        scaler.unscale(scaled, tokens[0])

    with pytest.raises(ValueError, match="got one from another graph or replica"):
        tf.function(lambda: strategy.run(replica))()


def not_a_token(scaler):
    """A state in place of the token."""
    scaler.unscale(tf.constant(1.0), scaler.state)


def twice(scaler):
    """One token for two gradients."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    scaler.unscale(scaled, token)


def of_another(scaler):
    """A token of another scaler."""
    scaled, token = LossScaler(DynamicLossScale()).scale(tf.constant(1.0))
    scaler.unscale(scaled, token)


def from_outside(scaler):
    """A token from outside the function."""
    scaled, token = scaler.scale(tf.constant(1.0))
    tf.function(lambda: scaler.unscale(scaled, token))()


def not_unscaled(scaler):
    """Two losses, one unscaled."""
    for _ in range(2):
        scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    scaler.update(True)


def before_reset(scaler):
    """A token of a step that was given up."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.reset()
    scaler.unscale(scaled, token)


def in_a_branch(scaler):
    """An update in both branches."""
    finite = tf.constant(True)
    tf.cond(finite, lambda: scaler.update(True), lambda: scaler.update(False))


def nothing_scaled(scaler):
    """An update and nothing else."""
    scaler.update(True)


def updated_twice(scaler):
    """Two updates for one loss."""
    take_step(scaler, True)
    scaler.update(True)


NEITHER = (
    "`update` must come after `scale` and `unscale`; got neither since the last update in this "
    "graph and on this replica. Each step moves the scale once. Call `scale`, `unscale` and "
    "`update` in this order, in the same function."
)


# Calls out of order, each with its message.
MISTAKES = [
    (
        not_a_token,
        "`token` must be the token that `scale` returned; got DynamicLossScaleState. It holds the "
        "scale that multiplied the loss. Call `scale` first, and pass its token.",
    ),
    (
        twice,
        "`token` must be used only once; got one that was used before. Gradients must not be "
        "unscaled twice. Call `scale` once for each `unscale`.",
    ),
    (
        of_another,
        "`token` must come from this scaler; got one from another scaler. The two may have "
        "different scales. Call `unscale` on the scaler whose `scale` returned the token.",
    ),
    (
        from_outside,
        "`token` must be used in the function that called `scale`; got one from another graph or "
        "replica, or from before `reset`. The loss scale may have moved since. Call `scale` and "
        "`unscale` in the same function.",
    ),
    (
        not_unscaled,
        "`update` must come after every `unscale`; got 2 calls of `scale` and 1 of `unscale` since "
        "the last update. The scale must not move before all gradients are unscaled. Call "
        "`unscale` once for each `scale`, or call `reset` after a step that was abandoned.",
    ),
    (before_reset, "got one from another graph or replica, or from before `reset`."),
    (nothing_scaled, NEITHER),
    (updated_twice, NEITHER),
    (
        in_a_branch,
        "`update` must be called outside a branch; got a call inside tf.cond, or inside an `if` on "
        "a tensor. Both branches are traced, but only one runs. Call it before or after the "
        "branch; `update` takes the flag as its argument.",
    ),
]


LEGAL = {
    ("from_outside", True),  # a function inside the function is the same place
    ("nothing_scaled", True),  # an inner function, traced before, may have scaled
    ("in_a_branch", False),  # eagerly only one branch runs; but nothing was scaled
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("mistake", "message"), MISTAKES, ids=lambda value: getattr(value, "__name__", "")
)
def test_calls_out_of_order_are_refused(mistake, message, traced):
    """A wrong order is an error that says which call comes first, and the state stays."""
    if (mistake.__name__, traced) in LEGAL:
        pytest.skip("that is no mistake")
    scaler = LossScaler(DynamicLossScale(growth_interval=100))
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        tf.function(lambda: mistake(scaler))() if traced else mistake(scaler)

    assert message in str(error.value)
    assert float(scaler.loss_scale) == 2.0**15


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("scale", lambda scaler, _: scaler.scale(1.0)),
        ("unscale", lambda scaler, token: scaler.unscale(1.0, token)),
        ("update", lambda scaler, _: scaler.update(True)),
        ("reset", lambda scaler, _: scaler.reset()),
    ],
)
def test_no_call_may_stand_in_a_branch(name, call):
    """The error names the call."""
    scaler = LossScaler(DynamicLossScale())

    @tf.function
    def branching(finite):
        _, token = scaler.scale(tf.constant(1.0))
        tf.cond(finite, lambda: call(scaler, token) and None, lambda: None)

    with pytest.raises(RuntimeError, match=f"`{name}` must be called outside a branch"):
        branching(tf.constant(True))


def test_a_reset_without_need_does_nothing():
    """Neither before the first step nor twice."""
    scaler = LossScaler(DynamicLossScale())
    scaler.reset()
    scaler.reset()

    assert take_step(scaler, True)


def test_an_attempt_given_up_is_forgotten_on_request():
    """After an exception between `scale` and `unscale`, `reset` clears the way for the next step."""
    scaler = LossScaler(DynamicLossScale())
    caught = []
    try:
        _, token = scaler.scale(tf.constant(1.0))
        raise KeyboardInterrupt  # noqa: TRY301 - the step itself is interrupted
    except KeyboardInterrupt as error:
        caught.append((error, token))  # a notebook keeps the last exception, and its frames
    with pytest.raises(
        RuntimeError, match=r"got 2 calls of `scale` and 1 of `unscale`.*or call `reset`"
    ):
        take_step(scaler, True)
    scaler.reset()

    assert take_step(scaler, True)


def test_an_inner_function_may_scale_and_unscale():
    """A function that is traced once serves all the functions that call it, and later traces."""
    scaler = LossScaler(DynamicLossScale(8.0))

    @tf.function
    def gradient(x):
        scaled, token = scaler.scale(x)
        return scaler.unscale(scaled, token)

    @tf.function
    def step(x, factor):
        return scaler.update(scaling.all_finite(factor * gradient(x)))

    assert step(tf.constant(1.0), 1.0)
    assert not step(tf.constant(1.0), float("inf"))  # traced anew; `gradient` is not
    assert float(scaler.loss_scale) == 4.0


def test_microbatches_in_a_loop():
    """Scale and unscale in the body of a loop, one update behind it."""
    scaler = LossScaler(DynamicLossScale(8.0))

    @tf.function
    def step(x):
        def body(index, total):
            scaled, token = scaler.scale(x)
            return index + 1, total + scaler.unscale(scaled, token)

        _, total = tf.while_loop(lambda index, _: index < 3, body, (0, 0.0))
        return total, scaler.update(scaling.all_finite(total))

    total, finite = step(tf.constant(2.0))

    assert (float(total), bool(finite)) == (6.0, True)
