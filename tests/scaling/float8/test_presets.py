"""The float8 presets against the systems that they are named after."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from scaling.float8 import losses_of_cast, preset
from scaling.float8.cast import FORMATS

LENGTH = 64
SYSTEMS = ["keras3", "flax", "transformer_engine"]


def magnitudes(steps, kinds):
    """Random largest magnitudes; a third of the tensors meet zeros, a third inf and NaN as well."""
    rng = np.random.default_rng(0)
    drift = np.cumsum(rng.normal(0, 1, (steps, kinds)), axis=0)
    found = np.float32(2.0 ** np.clip(drift + rng.uniform(-60, 60, kinds), -100, 100))
    rare = rng.random((steps, kinds))
    some = np.arange(kinds) % 3
    found[(rare < 0.2) & (some > 0)] = 0.0
    found[(rare > 0.998) & (some > 1)] = np.inf
    found[(rare > 0.999) & (some > 1)] = np.nan
    return found


def moves(rule, steps):
    """Every step's scale, and the last history."""

    @tf.function
    def run(steps):
        state = rule.initial_state(steps.shape[1:])
        scales = tf.TensorArray(tf.float32, len(steps))
        for at in tf.range(len(steps)):
            scales = scales.write(at, state.scale)
            state = rule.advance(state, steps[at])
        return scales.stack(), state.history

    return [each.numpy() for each in run(tf.constant(steps))]


def moves_of_keras3(steps, largest):
    """What a layer of Keras does: it uses the scale that it holds, then makes a new one from the
    history as it was before the step.
    """
    push = keras.quantizers.compute_float8_amax_history

    @tf.function
    def run(steps):
        scale, history = tf.ones(steps.shape[1:]), tf.zeros([steps.shape[1], LENGTH])
        scales = tf.TensorArray(tf.float32, len(steps))
        for at in tf.range(len(steps)):
            scales = scales.write(at, scale)
            before = tf.reduce_max(history, axis=1)
            scale = keras.quantizers.compute_float8_scale(before, scale, largest)
            history = tf.vectorized_map(lambda both: push(*both), (steps[at], history))
        return scales.stack(), tf.transpose(history)

    return [each.numpy() for each in run(tf.constant(steps))]


def moves_of_flax(steps, largest):
    """What flax does: it makes a new scale from the history, uses it, and appends to the history."""
    jax = pytest.importorskip("jax")
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops")

    push = jax.vmap(fp8_ops.compute_amax_history)
    scale, history = np.ones(steps.shape[1], np.float32), np.zeros([steps.shape[1], LENGTH])
    history, scales = jax.numpy.asarray(history, "float32"), []
    for amax in steps:  # not in one program, which XLA would round differently
        scale = fp8_ops.compute_scale(history.max(axis=1), scale, np.float32(largest))
        scales.append(np.asarray(scale))
        history = push(amax, history)
    return [np.stack(scales), np.asarray(history).T]


def moves_of_transformer_engine(steps, largest):
    """The recipe of its documentation: at the end of a step the history takes in its largest
    magnitude, and the next scale is largest / max(history) / 2^margin, or as before if that is not
    usable. It multiplies by its scale, so that ours is the reciprocal.
    """
    scale, history = np.ones(steps.shape[1], np.float32), np.zeros([LENGTH, steps.shape[1]])
    history, scales = np.float32(history), []
    for amax in steps:
        scales.append(np.float32(1) / scale)
        history = np.roll(history, -1, axis=0)
        history[0] = amax
        most = history.max(axis=0)
        with np.errstate(all="ignore"):
            found = np.float32(largest) / most
        usable = (most > 0) & np.isfinite(most) & np.isfinite(found)
        scale = np.where(usable, found, scale)
    return [np.stack(scales), history]


OTHERS = {
    "keras3": moves_of_keras3,
    "flax": moves_of_flax,
    "transformer_engine": moves_of_transformer_engine,
}


def compare(system, dtype, steps, kinds):
    """Asserts that all scales and the last histories are the same, and prints how many."""
    drawn = magnitudes(steps, kinds)
    if system == "flax":  # XLA's maximum on a CPU leaves NaN out, and not on every device
        drawn = np.where(np.isnan(drawn), np.inf, drawn)
    rule = dataclasses.replace(preset(system, dtype), history_length=LENGTH)
    ours = moves(rule, drawn)
    theirs = OTHERS[system](drawn, FORMATS[dtype].largest)
    print(f"{system}, {dtype}: {steps * kinds:,} steps")  # noqa: T201
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(np.unique(ours[0])) > steps


@pytest.mark.extras
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_preset_moves_as_its_system(system, dtype):
    """Every scale has the bits of the system's, over random magnitudes with zeros, inf and NaN."""
    compare(system, dtype, steps=200, kinds=30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_preset_moves_as_its_system_for_a_million_steps(system, dtype):
    """1,000 steps of 1,000 tensors."""
    compare(system, dtype, steps=1000, kinds=1000)


@pytest.mark.parametrize(("system", "steps"), [("keras3", 2), ("flax", 1)])
def test_a_tensor_that_grows_saturates_for_so_many_steps(system, steps):
    """Keras's scale looks at the history as it was before the step, so it is a step later."""
    rule = preset(system)
    state, saturated = rule.initial_state(), []
    for amax in [100.0, 100.0, 100.0, 1000.0, 1000.0, 1000.0, 1000.0]:
        lost, _ = losses_of_cast(tf.constant([amax * 1.01]), state.scale, rule.dtype)
        saturated.append(int(lost))
        state = rule.advance(state, amax)
    assert sum(saturated[3:]) == steps


def test_an_unknown_name_is_refused():
    """It would be another rule's scales."""
    with pytest.raises(ValueError, match=r"^`name`"):
        preset("keras")
