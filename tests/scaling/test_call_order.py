"""The order of a scaler's calls: which orders are errors, and which are not."""

import gc
import weakref

import pytest
import tensorflow as tf

import scaling
from scaling import DynamicLossScale, LossScaler


def take_step(scaler, verdict):
    """Takes a whole step with a loss of 1, which is also used as the gradient."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    return scaler.update(verdict)


def test_the_token_of_another_replica_is_an_error(mirrored):
    """Each replica traces its own calls, and cannot use the token of another replica."""
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


def state_as_token(scaler):
    """Passes a state instead of the token."""
    scaler.unscale(tf.constant(1.0), scaler.state)


def token_used_twice(scaler):
    """Uses one token for two gradients."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    scaler.unscale(scaled, token)


def token_of_another_scaler(scaler):
    """Uses the token of another scaler."""
    scaled, token = LossScaler(DynamicLossScale()).scale(tf.constant(1.0))
    scaler.unscale(scaled, token)


def token_from_outside(scaler):
    """Uses a token from outside the function."""
    scaled, token = scaler.scale(tf.constant(1.0))
    tf.function(lambda: scaler.unscale(scaled, token))()


def not_unscaled(scaler):
    """Scales two losses and unscales one."""
    for _ in range(2):
        scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    scaler.update(True)


def token_from_before_reset(scaler):
    """Uses a token of an abandoned step after `reset`."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.reset()
    scaler.unscale(scaled, token)


def in_a_branch(scaler):
    """Calls `update` in both branches of a condition."""
    finite = tf.constant(True)
    tf.cond(finite, lambda: scaler.update(True), lambda: scaler.update(False))


def nothing_scaled(scaler):
    """Calls only `update`."""
    scaler.update(True)


def updated_twice(scaler):
    """Calls `update` twice for one loss."""
    take_step(scaler, True)
    scaler.update(True)


def before_a_branch(scaler):
    """Calls `update` in a branch, after the other two."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    tf.cond(tf.constant(True), lambda: scaler.update(True), lambda: False)


def only_update_outside(scaler):
    """Calls `scale` and `unscale` in a branch, within a loop, and `update` after it."""

    def gradient():
        scaled, token = scaler.scale(tf.constant(1.0))
        return scaler.unscale(scaled, token)

    def turn(i, total):
        return i + 1, total + tf.cond(i > 0, gradient, lambda: 0.0)

    tf.while_loop(lambda i, _: i < 2, turn, [0, 0.0])
    scaler.update(True)


def scaled_before_a_branch(scaler):
    """Calls `unscale` in a branch, after `scale`."""
    scaled, token = scaler.scale(tf.constant(1.0))
    tf.cond(tf.constant(True), lambda: scaler.unscale(scaled, token), lambda: 1.0)


IN_A_BRANCH = (
    "`update` must be in the same branch as `scale` and `unscale`, or all three outside of "
    "branches; got {}. A branch is tf.cond, or an `if` on a tensor: both sides are traced, and "
    "only one runs. Move the calls together; `update` takes the verdict as its argument, so it "
    "needs no branch."
)
NEITHER = (
    "`update` must come after `scale` and `unscale`; got neither since the last update in this "
    "graph and on this replica. Each step moves the scale once. Call `scale`, `unscale` and "
    "`update` in this order, in the same function."
)


# Calls in a wrong order, each with the message of its error.
MISTAKES = [
    (
        state_as_token,
        "`token` must be the token that `scale` returned; got DynamicLossScaleState. A token holds the scale that multiplied the loss. Call `scale` first, and pass its token.",
    ),
    (
        token_used_twice,
        "`token` must be used only once; got a token that was used before. Gradients must not be "
        "unscaled twice. Call `scale` once for each `unscale`.",
    ),
    (
        token_of_another_scaler,
        "`token` must come from this scaler; got one from another scaler. The two scalers may have different scales. Call `unscale` on the scaler whose `scale` returned the token.",
    ),
    (
        token_from_outside,
        "`token` must be used in the function that called `scale`; got one from another graph or "
        "replica, or from before `reset`. The loss scale may have moved since. Call `scale` and "
        "`unscale` in the same function, and in the same branch of it.",
    ),
    (
        not_unscaled,
        "`update` must come after every `unscale`; got 2 calls of `scale` and 1 of `unscale` since "
        "the last update. The scale must not move before all gradients are unscaled. Call "
        "`unscale` once for each `scale`, or call `reset` after a step that was abandoned.",
    ),
    (token_from_before_reset, "got one from another graph or replica, or from before `reset`."),
    (nothing_scaled, NEITHER),
    (updated_twice, NEITHER),
    (in_a_branch, IN_A_BRANCH.format("`update` alone in a branch")),
    (before_a_branch, IN_A_BRANCH.format("`update` alone in a branch")),
    (only_update_outside, IN_A_BRANCH.format("`scale` in a branch that `update` comes after")),
    (scaled_before_a_branch, "`token` must be used in the function that called `scale`; got one"),
]


VALID = {
    ("nothing_scaled", True),  # an inner function that was traced before may have scaled
    # In eager mode only one branch runs.
    ("in_a_branch", False),
    ("before_a_branch", False),
    ("only_update_outside", False),
    ("scaled_before_a_branch", False),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("mistake", "message"), MISTAKES, ids=lambda value: getattr(value, "__name__", "")
)
def test_calls_out_of_order_are_errors(mistake, message, traced):
    """A wrong order is an error that says which call is missing; the state does not change."""
    if (mistake.__name__, traced) in VALID:
        pytest.skip("this order is valid in this mode")
    scaler = LossScaler(DynamicLossScale(growth_interval=100))
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        tf.function(lambda: mistake(scaler))() if traced else mistake(scaler)

    assert message in str(error.value)
    assert float(scaler.loss_scale) == 2.0**15


def of_an_iterator(step, values):
    """Takes a step with each element of an iterator: AutoGraph puts the steps into a branch."""
    for value in iter(values):
        step(value)


def until_negative(step, values):
    """Takes a step with each element up to a negative one. What follows `break` is a branch."""
    for value in values:
        if value < 0:
            break
        step(value)


@pytest.mark.parametrize("loop", [of_an_iterator, until_negative])
def test_all_calls_may_be_in_the_same_branch(loop):
    """Loops that AutoGraph makes have branches which nobody has written."""
    scaler, weight = LossScaler(DynamicLossScale(8.0, growth_interval=2)), tf.Variable(0.0)

    def step(value):
        scaled, token = scaler.scale(value)
        gradient = scaler.unscale(scaled, token)
        if scaler.update(scaling.all_finite(gradient)):
            weight.assign_add(gradient)

    values = tf.data.Dataset.from_tensor_slices([1.0, float("inf"), 2.0, 4.0, 8.0])
    tf.function(loop)(step, values)

    assert float(weight) == 15.0
    assert scaler.state_dict() == {"loss_scale": 8.0, "finite_steps": 1, "overflows_left": 1}


@pytest.mark.parametrize("loop", [of_an_iterator, until_negative])
def test_a_wrong_order_is_an_error_in_the_branch_of_a_loop(loop):
    """A forgotten `unscale` is noticed there, too."""
    scaler = LossScaler(DynamicLossScale(8.0))

    def step(value):
        scaler.scale(value)
        scaler.update(True)

    values = tf.data.Dataset.from_tensor_slices([1.0])
    with pytest.raises(RuntimeError, match=r"got 1 calls of `scale` and 0 of `unscale`"):
        tf.function(loop)(step, values)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_update_outside_of_the_replicas_is_about_all_of_them(mirrored, unscaled, traced):
    """In cross-replica context, in the strategy's scope, each replica's calls count."""
    strategy = mirrored(2)
    with strategy.scope():
        scaler = LossScaler(DynamicLossScale(8.0, growth_interval=1))

        def replica():
            scaled, token = scaler.scale(tf.constant(1.0))
            return scaler.unscale(scaled, token) if unscaled else scaled

        def step():
            strategy.run(replica)
            return scaler.update(True)

        step = tf.function(step) if traced else step
        if unscaled:
            assert [bool(step()) for _ in range(3)] == [True] * 3
            assert float(scaler.loss_scale) == 64.0
        else:
            with pytest.raises(RuntimeError, match="got 1 calls of `scale` and 0 of `unscale`"):
                step()


def test_functions_are_not_kept_alive():
    """A scaler outlives the functions that were traced with it, also if `update` is elsewhere."""
    scaler = LossScaler(DynamicLossScale(8.0))
    function = gradient_function(scaler)
    graph = weakref.ref(function.get_concrete_function(tf.constant(1.0)).graph)
    assert graph() is not None
    del function
    gc.collect()

    assert graph() is None


@pytest.mark.parametrize("call", ["unscale", "update"])
def test_a_loop_must_not_repeat_what_belongs_to_one_loss(call):
    """A loop is traced once. Each turn would unscale the same loss again, or move the scale."""
    scaler = LossScaler(DynamicLossScale(8.0))
    calls = {
        "unscale": lambda token: scaler.unscale(tf.constant(1.0), token),
        "update": lambda _: tf.cast(scaler.update(False), tf.float32),
    }

    @tf.function
    def step():
        _, token = scaler.scale(tf.constant(1.0))
        if call == "update":
            scaler.unscale(tf.constant(1.0), token)
        return tf.while_loop(
            lambda index, _: index < 3, lambda index, _: (index + 1, calls[call](token)), (0, 0.0)
        )

    messages = {
        "unscale": (
            "`token` must be used where `scale` was called; got one from outside of this loop. The "
            "loop would divide gradients by the scale of one loss many times. Call `scale` and "
            "`unscale` together, both inside the loop or both outside."
        ),
        "update": (
            "`update` must not be called in a loop if `unscale` was called outside; got such a "
            "call. It would move the scale in every turn, for one step. Call `update` after the "
            "loop, or all three inside."
        ),
    }
    with pytest.raises((ValueError, RuntimeError)) as error:
        step()
    assert messages[call] in str(error.value)
    assert float(scaler.loss_scale) == 8.0


def test_an_unneeded_reset_does_nothing():
    """`reset` may be called before the first step, and several times."""
    scaler = LossScaler(DynamicLossScale())
    scaler.reset()
    scaler.reset()

    assert take_step(scaler, True)


def test_reset_forgets_an_abandoned_step():
    """After an exception between `scale` and `unscale`, `reset` makes the next step possible."""
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


def gradient_function(scaler):
    """Returns a `tf.function` that scales its argument and unscales it."""

    @tf.function
    def gradient(x):
        scaled, token = scaler.scale(x)
        return scaler.unscale(scaled, token)

    return gradient


def test_an_inner_function_may_scale_and_unscale():
    """An inner function that is traced only once can be called by several functions and traces."""
    scaler = LossScaler(DynamicLossScale(8.0))

    gradient = gradient_function(scaler)

    @tf.function
    def step(x, factor):
        return scaler.update(scaling.all_finite(factor * gradient(x)))

    assert step(tf.constant(1.0), 1.0)
    assert not step(tf.constant(1.0), float("inf"))  # traced anew; `gradient` is not
    assert float(scaler.loss_scale) == 4.0


@pytest.mark.parametrize("before", [False, True], ids=["traced here", "traced before"])
def test_an_inner_function_may_be_called_for_each_of_several_updates(before):
    """As for several updates of a critic. When the inner function was traced makes no difference."""
    scaler = LossScaler(DynamicLossScale(8.0))

    gradient = gradient_function(scaler)

    @tf.function
    def step(x):
        return [scaler.update(scaling.all_finite(factor * gradient(x))) for factor in (1.0, x)]

    if before:
        gradient(tf.constant(1.0))
    assert step(tf.constant(1.0)) == [True, True]
    assert step(tf.constant(float("inf"))) == [False, False]
    assert float(scaler.loss_scale) == 2.0


def test_microbatches_in_a_loop():
    """`scale` and `unscale` may be inside a loop that is followed by one `update`."""
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
