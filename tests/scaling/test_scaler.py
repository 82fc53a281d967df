"""`LossScaler`: the state in variables, agreement of replicas, saving and merging."""

import dataclasses
import pickle
from typing import NamedTuple

import generators
import hypothesis.strategies as st
import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import scaling
from scaling import Cause, DynamicLossScale, LossScaler, Verdict

SMALL = settings(max_examples=60, stateful_step_count=30, deadline=None)


LARGE = settings(max_examples=250, stateful_step_count=60, deadline=None)


def take_step(scaler, verdict):
    """Takes a whole step with a loss of 1, which is also used as the gradient."""
    scaled, token = scaler.scale(tf.constant(1.0))
    scaler.unscale(scaled, token)
    return scaler.update(verdict)


def numbers(state):
    """A state as plain numbers."""
    return tuple(field.numpy().item() for field in state)


class Scaler(RuleBasedStateMachine):
    """A scaler in any valid or invalid sequence of calls, compared with plain Python."""

    @initialize(rule_=generators.rules())
    def start(self, rule_):
        """Both start with the rule's initial state."""
        self.constants = rule_
        self.scaler = LossScaler(rule_)
        self.expected = oracle.start(rule_)
        self.open = []  # (token, what its loss was multiplied by)
        self.used = []
        self.saved = None

    @precondition(lambda self: len(self.open) < 3)
    @rule(loss=generators.powers_of_two(0, 8))
    def scale(self, loss):
        """L2: the loss is multiplied by the current scale."""
        scaled, token = self.scaler.scale(tf.constant(loss))
        self.open.append((token, self.expected[0]))

        with np.errstate(over="ignore"):
            assert np.float32(loss) * np.float32(self.expected[0]) == scaled.numpy()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def unscale(self, data):
        """L2: a gradient is divided by the scale that its own loss was multiplied by."""
        token, scale = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        gradient = self.scaler.unscale(tf.constant(1.0), token)
        self.used.append(token)

        assert 1.0 / scale == float(gradient)

    @precondition(lambda self: self.used)
    @rule()
    def unscale_again(self):
        """Using a token twice is an error and changes nothing."""
        with pytest.raises(ValueError, match=r"^`token`"):
            self.scaler.unscale(tf.constant(1.0), self.used[-1])

    @rule(verdict=st.sampled_from([True, False, *Cause]))
    def update(self, verdict):
        """L4: the state moves like the oracle's, unless a loss was not unscaled."""
        if isinstance(verdict, Cause):
            if verdict is Cause.NONE:
                return
            verdict = Verdict(tf.constant(False), verdict)
        if self.open:
            with pytest.raises(RuntimeError, match=r"^`unscale`"):
                self.scaler.update(verdict)
            return
        finite = self.scaler.update(verdict)
        if isinstance(verdict, Verdict):
            assert not finite
            if verdict.cause not in (Cause.BACKWARD, Cause.REDUCTION):
                return  # L17: no scale would have helped
        self.expected = oracle.advance(*self.expected, bool(finite), self.constants)

    @rule()
    def save(self):
        """Saves the state."""
        self.saved = self.scaler.state_dict(), self.expected

    @precondition(lambda self: self.saved)
    @rule()
    def restore(self):
        """Restores every field of the saved state."""
        state, self.expected = self.saved
        self.scaler.load_state_dict(state)

    @rule(growth_interval=st.integers(1, 6))
    def reconfigure(self, growth_interval):
        """L4: a rule with another interval continues from the state, even if the count exceeds it."""
        fields = dict(vars(self.constants), growth_interval=growth_interval)
        self.constants = DynamicLossScale(**fields)
        state = self.scaler.state_dict()
        self.scaler = LossScaler(self.constants)
        self.scaler.load_state_dict(state)
        self.open, self.used = [], []

    @invariant()
    def agrees(self):
        """L3, L4: every field equals the oracle's, and the scale is within the bounds."""
        if not hasattr(self, "scaler"):
            return

        assert self.expected == numbers(self.scaler.state)
        assert self.constants.min_scale <= self.expected[0] <= self.constants.max_scale


def test_a_scaler_agrees_with_plain_python_in_any_order_of_calls(full):
    """L2, L3, L4: in any order of scale, unscale, update, save, restore and reconfigure."""
    run_state_machine_as_test(Scaler, settings=LARGE if full else SMALL)


def test_gradients_are_unscaled_by_the_scale_of_their_token():
    """L2: gradients are divided by the scale of their token, even if the scale has moved since."""
    scaler = LossScaler(DynamicLossScale(initial_scale=8.0))
    scaled, token = scaler.scale(tf.constant(3.0))
    scaler.assign(scaler.state._replace(loss_scale=tf.constant(16.0)))

    assert float(token.loss_scale) == 8.0
    assert float(scaler.unscale(scaled, token)) == 3.0


@pytest.mark.parametrize(
    "where", ["eager", "graph", "loop", "branch", "inner function", "replicas"]
)
def test_a_loss_that_is_not_unscaled_is_found(where, mirrored):
    """Its gradients would be too large by the loss scale. Nothing moves; a whole step goes on."""
    with mirrored(2).scope():
        scaler = LossScaler(DynamicLossScale(8.0, growth_interval=1))

    def scale_twice():
        scaled, token = scaler.scale(tf.constant(1.0))
        scaler.unscale(scaled, token)
        return scaler.scale(tf.constant(1.0))[0]

    def step():
        if where == "loop":
            tf.while_loop(lambda i: i < 1, lambda i: (scale_twice(), i + 1)[1:], [0])
        elif where == "branch":
            tf.cond(tf.constant(True), scale_twice, scale_twice)
        else:
            tf.function(scale_twice)() if where == "inner function" else scale_twice()
        return scaler.update(True)

    forgetful = (lambda: mirrored(2).run(step)) if where == "replicas" else step
    run = (lambda function: function()) if where == "eager" else (lambda each: tf.function(each)())
    with pytest.raises(RuntimeError, match="`unscale` must be called for each `scale`"):
        run(forgetful)
    assert float(scaler.loss_scale) == 8.0
    scaler.reset()
    run(lambda: take_step(scaler, True))
    assert float(scaler.loss_scale) == 16.0


def test_a_token_is_used_once_where_it_was_made():
    """A token from outside of a function would be a constant in it: the scale of the first call."""
    scaler, other = LossScaler(DynamicLossScale(8.0)), LossScaler(DynamicLossScale(8.0))
    scaled, token = scaler.scale(tf.constant(1.0))
    for unscale in (other.unscale, tf.function(scaler.unscale, autograph=False)):
        with pytest.raises(ValueError, match=r"^`token`"):
            unscale(scaled, token)
    scaler.unscale(scaled, token)
    with pytest.raises(ValueError, match=r"^`token`"):
        scaler.unscale(scaled, token)


def test_an_update_outside_of_the_replicas_covers_them_all(mirrored):
    """A loss that one replica has not unscaled is found there, too."""
    with mirrored(2).scope():
        scaler = LossScaler(DynamicLossScale(8.0))

    def outside():
        with mirrored(2).scope():
            mirrored(2).run(lambda: scaler.scale(tf.constant(1.0))[0])
            return scaler.update(True)

    with pytest.raises(RuntimeError, match="`unscale`"):
        tf.function(outside)()


@pytest.mark.parametrize("bad", [[1], [0, 1]], ids=str)
@pytest.mark.parametrize("replicas", [2, 3])
def test_an_overflow_on_one_replica_backs_off_on_all(mirrored, on_replicas, replicas, bad):
    """L5: an overflow on one or more replicas backs off the copies of the scale on all of them."""
    strategy = mirrored(replicas)
    with strategy.scope():
        scaler = LossScaler(DynamicLossScale(initial_scale=8.0))
    vetoes = tf.constant([index - replicas + 2 in bad for index in range(replicas)])

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        # A replica without an overflow has no cause.
        cause = tf.where(vetoes[index], int(Cause.BACKWARD), int(Cause.NONE))
        return take_step(scaler, Verdict(~vetoes[index], cause)), scaler.loss_scale

    finite, scales = on_replicas(strategy, replica)

    assert [False] * replicas == [bool(flag) for flag in finite]
    assert [4.0] * replicas == [float(scale) for scale in scales]


def test_an_update_in_cross_replica_context_moves_every_copy(mirrored, on_replicas):
    """Outside `strategy.run` one update changes the copies on all replicas."""
    with mirrored(2).scope():
        scaler = LossScaler(DynamicLossScale(initial_scale=8.0))
        take_step(scaler, False)

    scales = on_replicas(mirrored(2), lambda: scaler.loss_scale)

    assert [float(scale) for scale in scales] == [4.0, 4.0]


@pytest.mark.parametrize("bad", range(3))
def test_the_rule_receives_the_largest_magnitude_of_all_replicas(mirrored, on_replicas, bad):
    """On each of three replicas, the rule receives the largest of their magnitudes."""
    strategy = mirrored(3)
    with strategy.scope():
        scaler = LossScaler(scaling.HeadroomLossScale(headroom_bits=0))

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        magnitude = tf.where(index == bad, 2.0**10, 1.0)
        take_step(scaler, Verdict(tf.constant(True), max_magnitude=magnitude))
        return scaler.loss_scale

    # 2^5 is the largest scale at which 2^10 fits into float16.
    assert [float(scale) for scale in on_replicas(strategy, replica)] == [2.0**5] * 3


@pytest.mark.parametrize("last", [Cause.FORWARD, Cause.WEIGHTS])
def test_an_incurable_cause_on_one_replica_keeps_the_scale(mirrored, on_replicas, last):
    """L17: the earliest of several causes counts; replica 0 alone would have backed off."""
    strategy = mirrored(3)
    with strategy.scope():
        scaler = LossScaler(DynamicLossScale(initial_scale=8.0))

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        # The NaN of one replica must not affect the values of the others.
        magnitude = tf.where(index == 1, 1.0, np.nan)
        cause = tf.where(index == 2, int(last), int(Cause.BACKWARD))
        take_step(scaler, Verdict(index == 1, cause, magnitude))
        return scaler.loss_scale

    assert [float(scale) for scale in on_replicas(strategy, replica)] == [8.0] * 3


@pytest.mark.parametrize("rule_", [DynamicLossScale(8.0, 3, hysteresis=2), scaling.NoLossScale()])
@pytest.mark.parametrize("mode", ["graph", "xla", "replica", "loop"])
def test_eager_graph_xla_replica_and_loop_agree(mirrored, rule_, mode):
    """L15: six steps lead to the same state, wherever the three calls are made together."""
    history = [True, False, False, True, True, True]
    eager, scaler = LossScaler(rule_), LossScaler(rule_)
    for finite in history:
        take_step(eager, finite)
    if mode == "replica":
        with mirrored(2).scope():
            scaler = LossScaler(rule_)

    def step(finite):
        if mode == "replica":
            mirrored(2).run(lambda: take_step(scaler, finite))
        elif mode == "loop":
            tf.while_loop(lambda i: i < 1, lambda i: (take_step(scaler, finite), i + 1)[1:], [0])
        else:
            take_step(scaler, finite)

    traced = tf.function(step, jit_compile=mode == "xla" or None)
    for finite in history:
        traced(tf.constant(finite))

    assert numbers(eager.state) == numbers(scaler.state)
    assert traced.experimental_get_tracing_count() == 1


def test_a_scaler_created_outside_the_scope_is_an_error(mirrored):
    """L4: replicas that share one variable would each move it."""
    scaler = LossScaler(DynamicLossScale(8.0))
    with pytest.raises(RuntimeError, match="`LossScaler` must be created inside"):
        tf.function(lambda: mirrored(2).run(lambda: take_step(scaler, False)))()

    assert float(scaler.loss_scale) == 8.0


@pytest.mark.parametrize(
    "rule_",
    [
        DynamicLossScale(growth_interval=10, hysteresis=3),
        scaling.TolerantLossScale(growth_interval=2, scale_interval=True),
        scaling.LogMaxLossScale(),
        scaling.HeadroomLossScale(growth_interval=3),
    ],
    ids=lambda rule_: type(rule_).__name__,
)
@pytest.mark.parametrize("saved_by", ["checkpoint", "state_dict"])
def test_every_field_comes_back(rule_, saved_by, tmp_path):
    """L12: a checkpoint and `state_dict` both restore every field of every rule."""
    before, after = LossScaler(rule_), LossScaler(rule_)
    for magnitude in [np.inf, 0.75, 0.5]:
        finite = tf.constant(np.isfinite(magnitude))
        take_step(before, Verdict(finite, max_magnitude=tf.constant(magnitude, tf.float32)))
    if saved_by == "checkpoint":
        path = tf.train.Checkpoint(scaler=before).write(str(tmp_path / "scaler"))
        tf.train.Checkpoint(scaler=after).read(path).assert_consumed()
    else:
        after.load_state_dict(before.state_dict())

    first = numbers(rule_.initial_state())
    expected = numbers(before.state)
    moved = [
        name
        for name, old, new in zip(before.state._fields, first, expected, strict=True)
        if old != new
    ]
    assert expected == numbers(after.state)
    assert len(moved) >= 2, f"the history moves only {moved}"


def test_a_state_with_other_fields_is_an_error():
    """If the fields are those of another rule, nothing is loaded."""
    scaler = LossScaler(DynamicLossScale())
    for fields in ({"loss_scale": 2.0, "counter": 3}, {}):
        with pytest.raises(ValueError, match=r"^`state`"):
            scaler.load_state_dict(fields)
    with pytest.raises(ValueError, match=r"^`loss_scale`"):
        scaler.load_state_dict({"loss_scale": 3.0, "finite_steps": 0, "overflows_left": 1})
    with pytest.raises(TypeError):
        scaler.load_state_dict({"loss_scale": 8.0, "finite_steps": 1.5, "overflows_left": 1})
    assert float(scaler.loss_scale) == 2.0**15


def test_a_state_saved_with_other_constants_adapts_to_the_new_ones():
    """L3, L4: after one step, scale and hysteresis are within the limits of the new rule."""
    saved = {"loss_scale": 2.0**20, "finite_steps": 0, "overflows_left": 9}
    scaler = LossScaler(DynamicLossScale(8.0, max_scale=16.0, hysteresis=2))
    scaler.load_state_dict(saved)
    take_step(scaler, False)

    assert scaler.state_dict() == {"loss_scale": 16.0, "finite_steps": 0, "overflows_left": 1}
    fixed = LossScaler(scaling.FixedLossScale(1024.0))
    fixed.load_state_dict({"loss_scale": 1.0})
    take_step(fixed, True)
    assert float(fixed.loss_scale) == 1024.0


@given(
    verdicts=st.lists(st.booleans(), min_size=1, max_size=4),
    finite_steps=st.integers(0, 6),
)
def test_asynchronous_workers_merge_their_states(verdicts, finite_steps):
    """When workers merge steps that used the same state, finite steps add up, several overflows
    count once, and steps that arrive after the scale has moved are ignored.
    """
    rule = scaling.DynamicLossScale(initial_scale=2.0**6, growth_interval=8)
    scaler = scaling.LossScaler(rule)
    scaler.load_state_dict(scaler.state_dict() | {"finite_steps": finite_steps})
    used = scaler.state
    for good in verdicts:
        scaler.merge(used, rule.advance(used, good))

    expected = {"loss_scale": 2.0**6, "finite_steps": finite_steps, "overflows_left": 1}
    for good in verdicts:
        if not good:
            expected |= {"loss_scale": 2.0**5, "finite_steps": 0, "overflows_left": 0}
            break
        expected["finite_steps"] += 1
    assert scaler.state_dict() == expected


def test_every_overflow_that_read_the_same_state_counts():
    """Two workers that both overflow before either has merged use up a hysteresis of two."""
    rule = scaling.DynamicLossScale(initial_scale=2.0**6, hysteresis=2)
    scaler = scaling.LossScaler(rule)
    used = scaler.state
    for _ in range(2):
        scaler.merge(used, rule.advance(used, False), verdict=False)

    assert scaler.state_dict() == {"loss_scale": 2.0**5, "finite_steps": 0, "overflows_left": 0}


def test_growth_counts_the_steps_that_were_merged():
    """A step that read an old count does not complete an interval that an overflow has begun anew."""
    rule = scaling.DynamicLossScale(initial_scale=2.0**6, growth_interval=2, hysteresis=2)
    scaler = scaling.LossScaler(rule)
    scaler.load_state_dict(scaler.state_dict() | {"finite_steps": 1})
    used = scaler.state
    scaler.merge(used, rule.advance(used, False), verdict=False)
    scaler.merge(used, rule.advance(used, True), verdict=True)

    assert scaler.state_dict() == {"loss_scale": 2.0**6, "finite_steps": 1, "overflows_left": 1}


def test_a_step_at_an_outdated_scale_is_ignored():
    """`merge` ignores a step that used another scale than the current one."""
    scaler = scaling.LossScaler(scaling.DynamicLossScale(initial_scale=2.0**6))
    used = scaler.state
    moved = scaler.rule.advance(scaler.rule.advance(used, False), False)
    scaler.assign(moved)
    before = scaler.state_dict()
    scaler.merge(used, scaler.rule.advance(used, False))

    assert scaler.state_dict() == before
    assert before["loss_scale"] == 2.0**4


class OwnStep(keras.Sequential):
    """A Keras model with a scaler in its `train_step`."""

    def train_step(self, data):
        """Skips a batch that overflows."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            scaled, token = self.scaler.scale(loss)
        gradients = self.scaler.unscale(tape.gradient(scaled, self.trainable_variables), token)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)
            return True

        tf.cond(self.scaler.update(scaling.all_finite(gradients)), apply, lambda: False)
        return {"loss": loss}

    def kernel_and_bias(self):
        """Returns the weights in one vector."""
        return tf.concat([tf.reshape(weight, [-1]) for weight in self.trainable_variables], axis=0)


@pytest.mark.sampled
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_steps_of_keras_in_one_call_are_those_of_several(steps, jit_compile):
    """Keras calls `train_step` in a branch if steps_per_execution is greater than 1."""
    model = OwnStep([keras.Input([2]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.scaler = LossScaler(DynamicLossScale(8.0, growth_interval=3))
    optimizer = keras.optimizers.SGD(0.125)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, steps_per_execution=steps, jit_compile=jit_compile)
    x = np.ones([8, 2], np.float32)
    x[2] = np.inf
    model.fit(x, np.ones([8, 1]), batch_size=1, shuffle=False, verbose=0)

    # Each of seven steps leaves a quarter of the error, 1: its derivative is (2, 2, 2).
    assert float(tf.reduce_sum(model.kernel_and_bias())) == pytest.approx(1.0 + 0.25**7, rel=1e-6)
    assert model.scaler.state_dict() == {"loss_scale": 8.0, "finite_steps": 2, "overflows_left": 1}


class Counts(NamedTuple):
    """A state with a counter of its own, in whatever numbers a rule finds convenient."""

    loss_scale: tf.Tensor
    steps: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Counting:
    """A rule of one's own that counts with Python's numbers."""

    def initial_state(self):
        """Four, and no steps."""
        return Counts(4.0, 0)

    def advance(self, state, verdict):
        """Forgets the steps after an overflow."""
        del verdict
        return state._replace(loss_scale=8.0, steps=1)


def test_a_rule_may_return_numbers_of_python():
    """They are stored in the dtypes of the first state, and no others are."""
    scaler = LossScaler(Counting())
    assert scaler.state_dict() == {"loss_scale": 4.0, "steps": 0}
    take_step(scaler, tf.constant(True))
    assert scaler.state_dict() == {"loss_scale": 8.0, "steps": 1}
    scaler.assign(Counts(2.0, 3))
    assert scaler.state_dict() == {"loss_scale": 2.0, "steps": 3}
    assert scaler.state.steps.dtype == tf.int32

    with pytest.raises(ValueError, match="int64"):
        scaler.assign(Counts(tf.constant(4.0), tf.constant(2**40, tf.int64)))
    assert scaler.state_dict() == {"loss_scale": 2.0, "steps": 3}


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_a_checkpoint_of_a_keras_model_holds_its_scaler(tmp_path):
    """Keras's own files hold only the weights."""

    def model(initial_scale):
        made = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        made.scaler = scaling.LossScaler(scaling.DynamicLossScale(initial_scale=initial_scale))
        return made

    trained, restored = model(8.0), model(4.0)
    path = tf.train.Checkpoint(model=trained).save(tmp_path / "both")
    trained.save_weights(tmp_path / "model.weights.h5")
    restored.load_weights(tmp_path / "model.weights.h5")
    assert float(restored.scaler.loss_scale) == 4.0
    tf.train.Checkpoint(model=restored).restore(path)
    assert float(restored.scaler.loss_scale) == 8.0


def test_one_scaler_for_each_loss_with_a_joint_verdict():
    """L5: an overflow of one loss halves the scale of that loss, and stops all losses."""
    scalers = [LossScaler(DynamicLossScale(8.0, growth_interval=1)) for _ in range(2)]
    for scaler in scalers:
        scaler.unscale(*scaler.scale(tf.constant(1.0)))

    assert not scaling.update_together(scalers, [False, True])
    assert [float(scaler.loss_scale) for scaler in scalers] == [4.0, 16.0]


def test_a_joint_update_that_fails_moves_no_scale():
    """All that may fail comes before the first scale moves; the corrected call still counts the step."""
    rules = DynamicLossScale(8.0, growth_interval=1), scaling.LogMaxLossScale()
    scalers = [LossScaler(rule_) for rule_ in rules]
    for scaler in scalers:
        scaler.unscale(*scaler.scale(tf.constant(1.0)))

    for wrong, named in (
        ([True, 0.0], "`verdict`"),
        ([True, True], "max_magnitude"),
        ([True], "shorter"),
    ):
        with pytest.raises(ValueError, match=named):
            scaling.update_together(scalers, wrong)
    with pytest.raises(ValueError, match=r"^`scalers`"):
        scaling.update_together([scalers[0], scalers[0]], [True, True])
    assert float(scalers[0].loss_scale) == 8.0
    measured = scaling.Verdict(True, max_magnitude=tf.constant(1.0))
    assert scaling.update_together(scalers, [True, measured])
    assert float(scalers[0].loss_scale) == 16.0
    scalers[1].scale(tf.constant(1.0))
    with pytest.raises(RuntimeError, match=r"^`unscale`"):
        scaling.update_together(scalers, [True, measured])
    assert float(scalers[0].loss_scale) == 16.0


def test_a_scaler_can_be_copied():
    """A copy, as a pickle makes it, has the rule and the state, bit for bit, in variables of its own."""
    scaler = LossScaler(DynamicLossScale(initial_scale=8.0, growth_interval=3))
    scaler.assign(scaler.rule.advance(scaler.state, verdict=False))
    before = scaler.state_dict()
    other = pickle.loads(pickle.dumps(scaler))  # noqa: S301  # our own

    assert (other.rule, other.state_dict()) == (scaler.rule, before)
    assert scaler.trainable_variables == ()
    other.assign(other.rule.initial_state())
    assert scaler.state_dict() == before != other.state_dict()
