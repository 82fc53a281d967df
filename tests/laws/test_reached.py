"""L19 and L20: what a plain loop trains is trained, and values that replace variables are no
gradients.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from catalogue.features import CustomGradient, Recomputed, Remat
from catalogue.layers import saved_model
from plans import plan_of

import scaling
from trainer.step import TrainState, Updates, attempt_step

pytestmark = pytest.mark.sampled

SETTINGS = [(1, 1, False), (1, 2, True), (3, 1, False), (3, 2, False)]
SLOW_SETTINGS = [
    pytest.param(*setting, marks=pytest.mark.slow)
    for setting in itertools.product((1, 3), (1, 2), (False, True, "elementwise"))
    if setting not in SETTINGS
]
RNG = np.random.default_rng(0)
BATCH = tf.constant(RNG.normal(size=(7, 3)).astype(np.float32))


def stacked(*layers):
    """The layers between three inputs and a dense layer with one output."""
    return keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])


def tanh():
    """A dense layer with four outputs."""
    return keras.layers.Dense(4, activation="tanh")


MODELS = {
    "recompute_grad": lambda: stacked(Recomputed(tanh())),
    "custom_gradient": lambda: stacked(CustomGradient(tanh())),
    "remat": lambda: stacked(Remat(tanh())),
    "spectral": lambda: stacked(keras.layers.SpectralNormalization(keras.layers.Dense(4))),
}


def squared_error(model):
    """The squared distance of the model's outputs from 1."""
    return lambda batch, training: tf.reduce_sum((model(batch, training=training) - 1.0) ** 2, 1)


def slope_penalty(model):
    """A loss whose gradients with respect to the weights are part of it, as in MAML."""

    def compute_loss(batch, training):
        with tf.GradientTape() as tape:
            losses = squared_error(model)(batch, training)
        inner = tape.gradient(losses, [v.value for v in model.trainable_variables])
        return losses + 0.1 * tf.add_n([tf.reduce_sum(gradient**2) for gradient in inner])

    return compute_loss


def after_steps(model, strategy, loss_of, steps=2, **settings):
    """A model's variables after steps on `BATCH`, on every replica."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        plan = plan_of(model, loss_of(model), strategy=strategy, optimizer=optimizer, **settings)
        run = TrainState(plan.rule, 7)
    step = tf.function(lambda: attempt_step(BATCH, plan, run), autograph=False)
    reports = [step() for _ in range(steps)]
    assert all(bool(report.grads_finite) for report in reports)
    return [
        [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
        for variable in model.variables
    ]


def plain_steps(model, loss_of, steps=2):
    """A model's variables after steps of a loop that knows nothing of this project."""
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(model)(BATCH, True))
        variables = [variable.value for variable in model.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
    return [variable.numpy() for variable in model.variables]


def copy_under(strategy, make, weights):
    """A new model with the given weights."""
    with strategy.scope():
        model = make()
        model.set_weights(weights)
    return model


def strategy_of(mirrored, replicas):
    """The default strategy for one replica."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


def check_as_plain(make, loss_of, strategy, num_microbatches, jit_compile):
    """Compares two steps with two of a plain loop, on copies of a model."""
    model = make()
    weights = model.get_weights()
    expected = plain_steps(model, loss_of)
    ours = copy_under(strategy, make, weights)
    found = after_steps(
        ours, strategy, loss_of, num_microbatches=num_microbatches, jit_compile=jit_compile
    )
    moved = 0
    for before, plain, copies in zip(weights, expected, found, strict=True):
        moved += np.any(before != plain)
        for copy in copies:
            np.testing.assert_allclose(copy, plain, rtol=2e-5, atol=2e-6)
    assert moved >= len(model.trainable_variables)


@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "parts", "jit_compile"), [*SETTINGS, *SLOW_SETTINGS])
@pytest.mark.parametrize("name", MODELS)
def test_layers_with_gradients_of_their_own_are_trained(
    mirrored, name, replicas, parts, jit_compile
):
    """L19: rematerialized layers, and layers under custom gradients, train as in a plain loop."""
    strategy = strategy_of(mirrored, replicas)
    check_as_plain(MODELS[name], squared_error, strategy, parts, jit_compile)


@pytest.mark.parametrize(("replicas", "parts", "jit_compile"), [*SETTINGS[:2], *SLOW_SETTINGS])
def test_a_loss_may_use_gradients_of_the_weights(mirrored, replicas, parts, jit_compile):
    """L19: `tape.gradient(loss, model.trainable_variables)` works inside `compute_loss`."""
    if replicas * parts > 1:
        pytest.skip("this loss couples the examples of a batch")
    strategy = strategy_of(mirrored, replicas)
    check_as_plain(
        lambda: stacked(tanh()),
        slope_penalty,
        strategy,
        parts,
        jit_compile,
    )


class RandomBlock(keras.layers.Layer):
    """Dense, BatchNorm and Dropout, which may be computed again in the backward pass."""

    def __init__(self, *, remat, calls=1):
        """Creates the inner layers."""
        super().__init__()
        self.remat, self.calls = remat, calls
        self.dense = keras.layers.Dense(4, activation="tanh")
        self.norm = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def build(self, shape):
        """Creates the weights."""
        self.dense.build(shape)
        self.norm.build((None, 4))

    def inner(self, inputs):
        """The block's outputs."""
        outputs = self.norm(self.dense(inputs), training=True)
        for _ in range(self.calls):
            outputs = self.dropout(outputs, training=True)
        return outputs

    def call(self, inputs):
        """The block's outputs, rematerialized or not."""
        return keras.remat(self.inner)(inputs) if self.remat else self.inner(inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "parts", "jit_compile"), [*SETTINGS, *SLOW_SETTINGS])
def test_rematerialized_dropout_has_one_mask(mirrored, replicas, parts, jit_compile):
    """L19: computed again, Dropout has the mask of the forward pass, and statistics move once: every bit
    is that of the same model without rematerialization.
    """
    strategy = strategy_of(mirrored, replicas)
    weights = stacked(RandomBlock(remat=False)).get_weights()
    kept, recomputed = (
        after_steps(
            copy_under(strategy, functools.partial(stacked_block, remat=remat), weights),
            strategy,
            squared_error,
            num_microbatches=parts,
            jit_compile=jit_compile,
        )
        for remat in (False, True)
    )
    for expected, found in zip(kept, recomputed, strict=True):
        np.testing.assert_array_equal(found, expected)


def stacked_block(**settings):
    """A `RandomBlock` and a dense layer."""
    return stacked(RandomBlock(**settings))


def test_a_rematerialized_generator_is_drawn_from_once():
    """L19: a generator that would draw other numbers in the backward pass is refused by name."""
    model = stacked_block(remat=True, calls=2)
    with pytest.raises(ValueError, match="`model`"):
        after_steps(model, tf.distribute.get_strategy(), squared_error)


def test_an_imported_layer_is_trained():
    """L19: the variables of a SavedModel, in a `TFSMLayer`, get their gradients."""
    model = stacked(saved_model())
    weights = model.get_weights()
    expected = plain_steps(model, squared_error)
    model.set_weights(weights)
    found = after_steps(model, tf.distribute.get_strategy(), squared_error)

    assert len(model.trainable_variables) == 3
    for before, plain, [ours] in zip(weights, expected, found, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=2e-6)
        assert np.any(before != ours)


def float8():
    """Two dense layers that Keras has quantized to float8."""
    model = keras.Sequential([keras.Input([3]), *(keras.layers.Dense(16) for _ in range(2))])
    for layer in model.layers:
        layer.quantize("float8")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "parts", "jit_compile"), [*SETTINGS[1:], *SLOW_SETTINGS])
def test_replacing_values_are_combined_by_their_maximum(mirrored, replicas, parts, jit_compile):
    """L20: float8 scales and histories are those of the whole batch, the same on every replica."""
    model = float8()
    weights = model.get_weights()
    whole = after_steps(model, tf.distribute.get_strategy(), squared_error)
    strategy = strategy_of(mirrored, replicas)
    divided = after_steps(
        copy_under(strategy, float8, weights),
        strategy,
        squared_error,
        num_microbatches=parts,
        jit_compile=jit_compile,
    )
    for variable, before, [expected], copies in zip(
        model.variables, weights, whole, divided, strict=True
    ):
        # Nearly equal gradients may be rounded to neighbors in float8's e5m2, a quarter apart.
        # Then the maxima of the next step differ a little; a sum would be two or three times as large.
        moved = 0.25 * np.abs(expected - before).max()
        rtol, atol = (0.03, 1e-3) if variable.overwrite_with_gradient else (1e-3, moved)
        for copy in copies:
            np.testing.assert_allclose(copy, expected, rtol=rtol, atol=atol)
            assert copy.tobytes() == copies[0].tobytes()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {"rule": scaling.FixedLossScale(2.0**10)},
        {"updates": Updates(global_clipnorm=1e-3)},
        {"updates": Updates(clipvalue=1e-3)},
    ],
    ids=["loss_scale", "global_clipnorm", "clipvalue"],
)
def test_replacing_values_are_not_scaled_or_clipped(settings):
    """L20: a loss scale and clipping change gradients, and not the scales of inputs and kernels."""
    strategy = tf.distribute.get_strategy()
    model = float8()
    weights = model.get_weights()
    [plain, other] = [
        after_steps(copy_under(strategy, float8, weights), strategy, squared_error, 1, **each)
        for each in ({}, settings)
    ]
    compared = 0
    for variable, expected, found in zip(model.variables, plain, other, strict=True):
        if variable.overwrite_with_gradient and "grad" not in variable.name:
            compared += 1
            np.testing.assert_array_equal(found, expected)
    assert compared == 8


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_skip_moves_no_replacing_value(mirrored, replicas):
    """L6, L20: an inf in the last example leaves float8 scales and histories as they were."""
    strategy = strategy_of(mirrored, replicas)
    with strategy.scope():
        model = float8()
    plan = plan_of(model, squared_error(model), strategy=strategy)
    with strategy.scope():
        run = TrainState(plan.rule)
    before = [variable.numpy().tobytes() for variable in model.variables]
    batch = tf.constant([[1.0, 2.0, 3.0]] * 6 + [[np.inf, 1.0, 1.0]])
    report = tf.function(lambda: attempt_step(batch, plan, run), autograph=False)()

    assert not bool(report.grads_finite)
    assert [variable.numpy().tobytes() for variable in model.variables] == before


@pytest.mark.thorough
def test_scaled_gradients_that_overflow_lower_the_scale_of_float8():
    """L20: float8 remembers the largest scaled gradient, which overflows in float16. That is no fault of
    the forward pass, so the scale backs off until the step is applied.
    """
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = float8()
    finally:
        keras.config.set_dtype_policy("float32")
    rule = scaling.DynamicLossScale(2.0**22, backoff_factor=2.0**-4)

    def losses(batch, training):
        outputs = tf.cast(model(batch, training=training), tf.float32)
        return tf.reduce_sum((outputs - 1.0) ** 2, 1)

    plan = plan_of(model, losses, rule=rule)
    run = TrainState(plan.rule)
    step = tf.function(lambda: attempt_step(tf.ones([6, 3]), plan, run), autograph=False)
    reports = [step() for _ in range(4)]

    assert not bool(reports[0].grads_finite)
    assert int(reports[0].cause) == scaling.Cause.BACKWARD
    assert bool(reports[-1].grads_finite)
    assert float(reports[-1].loss_scale) < 2.0**22
