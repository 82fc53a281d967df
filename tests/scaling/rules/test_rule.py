"""What all rules have in common: their interface, bounds, causes and constants."""

import generators
import numpy as np
import oracle
import pytest
import tensorflow as tf

import scaling
from scaling import Cause, Verdict
from scaling.rules.rule import try_rule

COUNTING = [
    scaling.DynamicLossScale(growth_interval=2, hysteresis=2, max_scale=2.0**17),
    scaling.DynamicLossScale(
        8.0,
        4,
        hysteresis=2,
        hysteresis_refill="finite_step",
        grace_steps=1,
        low_scale_intervals=((4.0, 1), (8.0, 2)),
    ),
    scaling.TolerantLossScale(growth_interval=3, tolerance=0.25),
    scaling.TolerantLossScale(growth_interval=2, scale_interval=True),
]


MEASURING = [
    scaling.LogMaxLossScale(),
    scaling.HeadroomLossScale(growth_interval=2),
]


MOVING = [*COUNTING, *MEASURING]


RULES = [*MOVING, scaling.FixedLossScale(8.0), scaling.NoLossScale()]


CLASSES = sorted({type(rule) for rule in MOVING}, key=lambda rule: rule.__name__)


def name(rule):
    """A rule's name, for the ids of tests."""
    return type(rule).__name__


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_every_rule_keeps_the_contract(rule):
    """A rule is frozen; its state's first field is `loss_scale`, shape (), float32; and `advance`
    returns a state of the same type, shapes and dtypes.
    """
    state = rule.initial_state()
    after = rule.advance(state, Verdict(tf.constant(False), Cause.BACKWARD, tf.constant(np.inf)))

    assert state._fields[0] == "loss_scale"
    assert (state.loss_scale.shape, state.loss_scale.dtype) == ((), tf.float32)
    assert rule.needs_magnitude is (rule in MEASURING)
    assert type(after) is type(state)
    assert [(f.shape, f.dtype) for f in after] == [(f.shape, f.dtype) for f in state]
    with pytest.raises(AttributeError):
        rule.needs_magnitude = 3.0
    with pytest.raises(AttributeError):
        rule.loss_scale = 3.0


def mixed_history():
    """Finite steps, overflows and incurable steps, with and without a finite magnitude."""
    for magnitude in (0.0, 0.3, 0.7, np.inf, 0.3, 0.01, 0.02, np.nan, np.inf, 5.0, 0.1, 0.1, 0.1):
        finite = np.isfinite(magnitude)
        cause = Cause.FORWARD if np.isnan(magnitude) else Cause.BACKWARD
        yield Verdict(tf.constant(finite), tf.constant(int(cause)), tf.constant(float(magnitude)))


@pytest.mark.sampled
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("rule", MOVING, ids=name)
def test_eager_graph_and_xla_agree(rule, jit_compile):
    """L15: a mixed history gives the same states eagerly, in a graph and under XLA."""
    traced = tf.function(rule.advance, jit_compile=jit_compile)
    eager = state = rule.initial_state()
    for step, verdict in enumerate(mixed_history()):
        eager = rule.advance(eager, verdict)
        state = traced(state, verdict)

        assert float(eager.loss_scale) == float(state.loss_scale), f"at step {step}"
        # XLA may round a product and a sum once instead of twice: sums of logarithms show it.
        slack = 1e-5 if isinstance(rule, scaling.LogMaxLossScale) else 0.0
        for left, right in zip(oracle.numbers(eager), oracle.numbers(state), strict=True):
            assert abs(left - right) <= slack * max(1.0, abs(left)), f"at step {step}"
    assert traced.experimental_get_tracing_count() == 1


@pytest.mark.sampled
@pytest.mark.parametrize("cause", generators.INCURABLE)
@pytest.mark.parametrize("rule", RULES, ids=name)
def test_incurable_causes_change_nothing(rule, cause):
    """L17: after weights, forward, unscaling and model, every field of the state is unchanged,
    whatever the magnitude.
    """
    state = rule.initial_state()
    for next_verdict in (*mixed_history(), None):
        for magnitude in (np.nan, np.inf, 0.0, 0.3):
            verdict = Verdict(tf.constant(False), cause, tf.constant(magnitude, tf.float32))

            assert oracle.numbers(state) == oracle.numbers(rule.advance(state, verdict))
        if next_verdict is not None:
            state = rule.advance(state, next_verdict)


@pytest.mark.parametrize("rule", MOVING, ids=name)
def test_a_scale_saved_with_other_bounds_enters_these(rule):
    """L3: a scale outside the bounds is brought within them by the next step, finite or not."""
    for saved, bound in ((2.0**-100, rule.min_scale), (2.0**100, rule.max_scale)):
        for verdict in (fits(1e-3), OVERFLOW):
            state = rule.initial_state()._replace(loss_scale=tf.constant(saved))
            scale = float(rule.advance(state, verdict).loss_scale)

            assert rule.min_scale <= scale <= rule.max_scale
            if rule not in MEASURING:
                assert scale == bound


def fits(magnitude):
    """The verdict on a finite step with this magnitude."""
    return Verdict(tf.constant(True), Cause.NONE, tf.constant(magnitude))


OVERFLOW = Verdict(False, Cause.BACKWARD, np.inf)


@pytest.mark.parametrize("rule", MEASURING, ids=name)
def test_rules_that_need_a_magnitude_raise_without_one(rule):
    """The error says that the rule needs the largest magnitude."""
    for verdict in (True, False, Verdict(tf.constant(True))):
        with pytest.raises(ValueError, match=r"^`verdict\.max_magnitude`"):
            rule.advance(rule.initial_state(), verdict)


@pytest.mark.parametrize("rule", MOVING, ids=name)
def test_a_verdict_must_be_one_bool(rule):
    """Of a verdict for each gradient, a rule would make a scale for each."""
    for wrong in (tf.constant(1.0), tf.constant([True, False])):
        with pytest.raises(ValueError, match=r"^`verdict`"):
            rule.advance(rule.initial_state(), wrong)


@pytest.mark.parametrize("rule", CLASSES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(
    "arguments",
    [
        {"initial_scale": 1000.0},
        {"initial_scale": True},
        {"min_scale": 2.0**-127},
        {"max_scale": 2.0**127},
        {"min_scale": 4.0, "max_scale": 2.0, "initial_scale": 2.0},
        {"initial_scale": 8.0, "max_scale": 4.0, "min_scale": 1.0},
        {"initial_scale": 2.0, "min_scale": 4.0},
    ],
)
def test_errors_about_bounds(rule, arguments):
    """L3: bounds that the scale could leave are errors in every rule."""
    with pytest.raises(ValueError, match=f"^`{next(iter(arguments))}`"):
        rule(**arguments)


COUNTERS = [scaling.DynamicLossScale, scaling.TolerantLossScale, scaling.HeadroomLossScale]


@pytest.mark.parametrize("rule", COUNTERS, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_factor": 3.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 0.75},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"growth_interval": 2.0},
        {"growth_interval": 2**30 + 1},
    ],
)
def test_errors_about_factors_and_intervals(rule, arguments):
    """L3: factors that are not powers of two or on the wrong side of 1, and intervals that are no
    counts, are errors in every rule.
    """
    assert rule(growth_interval=2**30).growth_interval == 2**30
    with pytest.raises(ValueError, match=f"^`{next(iter(arguments))}`"):
        rule(**arguments)


class Own:
    """A rule of one's own, with a backoff factor."""

    needs_magnitude = False

    def __init__(self, start, factor):
        """Stores the scale and the factor."""
        self.start, self.factor = start, factor

    def initial_state(self):
        """A scale alone."""
        return scaling.FixedLossScaleState(tf.constant(self.start))

    def advance(self, state, verdict):
        """Backs off, and never grows."""
        factor = tf.where(scaling.as_verdict(verdict).overflowed, self.factor, 1.0)
        return state._replace(loss_scale=state.loss_scale * factor)


def test_a_rule_of_ones_own_is_tried():
    """L3: a scale that is no power of two would round every gradient."""
    try_rule(Own(8.0, 0.5))
    with pytest.raises(ValueError, match=r"^`rule\.initial_state\(\)\.loss_scale`"):
        try_rule(Own(1000.0, 0.5))
    with pytest.raises(ValueError, match=r"^`rule\.advance\(\)\.loss_scale`"):
        try_rule(Own(8.0, 0.75))


@pytest.mark.parametrize("number", [np.float16, np.float32, np.float64, int])
@pytest.mark.parametrize("rule", CLASSES, ids=lambda rule: rule.__name__)
def test_constants_may_have_any_numeric_type(rule, number):
    """Constants of any numeric type give the same states as Python floats."""
    constants = {"initial_scale": 8.0, "min_scale": 1.0, "max_scale": 16.0}
    if rule in COUNTERS:
        constants |= {"growth_factor": 2.0, "growth_interval": 1}
        # A backoff factor below 1 cannot be an int.
        constants |= {} if number is int else {"backoff_factor": 0.5}
    same = rule(**constants)
    typed = {key: number(value) for key, value in constants.items()}
    typed |= {"growth_interval": np.int64(1)} if rule in COUNTERS else {}
    typed = rule(**typed)
    expected, state = same.initial_state(), typed.initial_state()
    for step, verdict in enumerate(mixed_history()):
        expected, state = same.advance(expected, verdict), typed.advance(state, verdict)

        assert oracle.numbers(expected) == oracle.numbers(state), f"at step {step}"
