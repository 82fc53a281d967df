"""The cases of Flax's `DynamicScale` tests (`tests/dynamic_scale_test.py`, `tests/optim_test.py`)."""

import numpy as np
import tensorflow as tf

import scaling
from scaling import DynamicLossScale, LossScaler


def scales_of(rule, history):
    """The loss scale after each step of a history of verdicts."""
    state, scales = rule.initial_state(), []
    for finite in history:
        state = rule.advance(state, finite)
        scales.append(float(state.loss_scale))
    return scales


def test_grows_after_growth_interval_finite_steps():
    """With an interval of 3, the third and the sixth finite step double the scale. The preset is of
    flax 0.12, which counted one step more; a later Flax counts as `DynamicLossScale` does.
    """
    rule = DynamicLossScale(growth_interval=3, initial_scale=4.0)
    before = scaling.preset("flax", growth_interval=3, initial_scale=4.0)

    assert scales_of(rule, [True] * 6) == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0]
    assert scales_of(before, [True] * 6) == [4.0, 4.0, 4.0, 8.0, 8.0, 8.0]


def test_a_nonfinite_step_backs_off_and_restarts_the_count():
    """Two finite steps after an overflow are needed to grow again."""
    rule = DynamicLossScale(growth_interval=2, initial_scale=4.0)

    assert scales_of(rule, [True, False, True, True]) == [4.0, 2.0, 2.0, 4.0]


def test_dynamic_scale_in_float16():
    """The square of 1 in float16, from 2^16: the gradients of the first two scales overflow, and 2^14
    fits. flax 0.12 grows on the third finite step of an interval of 2, and the next step overflows
    again. The loss is scaled in float32 here, so it is 1 in the first step too, where Flax's is NaN.
    """
    scaler = LossScaler(scaling.preset("flax", growth_interval=2))
    weight, seen = tf.Variable(1.0), []
    for _ in range(6):
        with tf.GradientTape() as tape:
            loss = tf.cast(weight, tf.float16) ** 2
            scaled, token = scaler.scale(loss)
        [gradient] = scaler.unscale([tape.gradient(scaled, weight)], token)
        finite = scaler.update(scaling.all_finite(gradient))
        seen.append((bool(finite), float(loss), float(scaler.loss_scale), float(gradient)))

    assert seen == [
        (False, 1.0, 32768.0, np.inf),
        (False, 1.0, 16384.0, np.inf),
        (True, 1.0, 16384.0, 2.0),
        (True, 1.0, 16384.0, 2.0),
        (True, 1.0, 32768.0, 2.0),
        (False, 1.0, 16384.0, np.inf),
    ]
