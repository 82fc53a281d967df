"""Layers in float8: what is converted, and scales that are those of one device with the batch."""

import functools

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import imitate_servers
from plans import plan_of

import scaling
from scaling.float8 import DelayedScaling, losses_of_cast
from scaling.float8.cast import FORMATS as FLOAT8
from trainer import Monitoring, Skips, Trainer, Updates, convert_to_float8
from trainer.evaluation.ema_weights import evaluated_weights
from trainer.step import TrainState, attempt_step
from trainer.step.float8 import (
    FORMATS,
    float8_tensors,
    with_own_scales,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)

RNG = np.random.default_rng(3)
ROWS = RNG.integers(-8, 9, size=(8, 16)).astype(np.float32) / 4.0
SHORT = DelayedScaling(history_length=4)


def stack(*, rule=SHORT):
    """Four dense layers in float8, between which all is in float32."""
    model = keras.Sequential(
        [
            keras.Input([16]),
            *(keras.layers.Dense(16, use_bias=False, name=f"dense_{at}") for at in range(4)),
        ],
        name="stack",
    )
    assert len(convert_to_float8(model, lambda _: True, rule)) == 4
    return model


def squared_error(model):
    """The squared distance of the model's outputs from 1."""
    return lambda batch, training: tf.reduce_sum((model(batch, training=training) - 1.0) ** 2, 1)


def trained(strategy, weights=None, steps=4, rows=ROWS, scale=1.0, **settings):
    """Variables of `stack` after steps, on every replica, with the last step's report."""
    with strategy.scope():
        model = stack()
        if weights is not None:
            model.set_weights(weights)
        optimizer = keras.optimizers.SGD(2.0**-10)
        rule = scaling.FixedLossScale(scale)
        plan = plan_of(
            model,
            squared_error(model),
            strategy=strategy,
            optimizer=optimizer,
            rule=rule,
            **settings,
        )
        run = TrainState(plan.rule)
    step = tf.function(lambda batch: attempt_step(batch, plan, run), autograph=False)
    for _ in range(steps):
        report = step(tf.constant(rows))
    values = strategy.experimental_local_results
    return model, [[one.numpy() for one in values(v.value)] for v in model.variables], report


def exact_weights():
    """Kernels of few bits, so that float32 sums of their products are exact in any order."""
    weights = stack().get_weights()
    return [np.round(w * 16) / 16 if w.ndim == 2 else w for w in weights]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "parts"),
    [
        (2, 2),
        *(
            pytest.param(replicas, parts, marks=pytest.mark.slow)
            for replicas, parts in [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2)]
        ),
    ],
)
def test_scales_and_histories_are_those_of_one_device(mirrored, replicas, parts):
    """L20: on any replicas and microbatches, the same bits as one device with the whole batch.

    Scales are powers of two, so float32 adds the products of float8 numbers without rounding, in any
    order.
    """
    weights = exact_weights()
    model, whole, _ = trained(tf.distribute.get_strategy(), weights)
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    _, divided, _ = trained(strategy, weights, num_microbatches=parts)
    for variable, [expected], copies in zip(model.variables, whole, divided, strict=True):
        for copy in copies:
            np.testing.assert_array_equal(copy, expected, err_msg=variable.path)
        if variable.path.endswith("_scale"):
            assert expected != 1
        if variable.path.endswith("_history"):
            assert np.all(expected > 0)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_scales_follow_the_rule(mirrored, replicas):
    """A scale comes from the newest largest magnitudes, by the rule's own function, in a step."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    model, values, _ = trained(strategy, exact_weights(), steps=3)
    found = {v.path: copies[0] for v, copies in zip(model.variables, values, strict=True)}
    for each in float8_tensors(model):
        layer, tensor = each.name.rsplit("/", 1)
        history = found[f"{layer}/{tensor}_amax_history"]
        state = each.rule.initial_state()
        for amax in in_order(history, 3):
            state = each.rule.advance(state, amax)
        assert float(state.scale) == found[f"{layer}/{tensor}_scale"]
        np.testing.assert_array_equal(state.history, history)
    assert found["stack/dense_0/inputs_scale"] == 2.0 ** np.ceil(np.log2(np.abs(ROWS).max() / 448))


def in_order(history, steps):
    """What entered a history, the oldest first. The newest stands first, the others behind it."""
    newest, *others = history
    return [*others[len(others) - steps + 1 :], newest]


@pytest.mark.parametrize(
    ("replicas", "jit_compile"),
    [
        pytest.param(3, True, marks=pytest.mark.thorough),
        *(
            pytest.param(*setting, marks=pytest.mark.slow)
            for setting in [(1, False), (1, True), (1, "step"), (2, False)]
        ),
    ],
)
def test_a_skip_moves_no_bit(mirrored, replicas, jit_compile):
    """L6, L20: an inf in the last example leaves float8 scales and histories as they were."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    weights = exact_weights()
    rows = ROWS.copy()
    rows[-1, 0] = np.inf
    model, values, report = trained(strategy, weights, steps=1, rows=rows, jit_compile=jit_compile)
    assert not bool(report.grads_finite)
    for variable, before, copies in zip(model.variables, weights, values, strict=True):
        for copy in copies:
            np.testing.assert_array_equal(copy, before, err_msg=variable.path)


@pytest.mark.slow
def test_a_loss_scale_multiplies_the_scales_of_gradients_alone():
    """L20: gradients are scaled when they are cast, so their scales hold the loss scale; no others."""
    weights = exact_weights()
    model, plain, _ = trained(tf.distribute.get_strategy(), weights, steps=3)
    _, scaled, _ = trained(tf.distribute.get_strategy(), weights, steps=3, scale=2.0**10)
    for variable, [expected], [found] in zip(model.variables, plain, scaled, strict=True):
        of_gradients = "outputs_grad" in variable.path
        np.testing.assert_array_equal(found, expected * (2.0**10 if of_gradients else 1.0))


def test_other_tensors_are_moved_by_keras():
    """Layers that the user has quantized with Keras keep Keras's rule."""
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(16)])
    model.layers[0].quantize("float8")
    found = float8_tensors(model)
    assert [(each.rule, each.form) for each in found] == [(None, form) for form in FORMATS.values()]
    written, before = {"2": tf.constant([3.0])}, {}
    assert with_own_scales(written, before, found) == written


@pytest.mark.slow
@pytest.mark.parametrize("frequency", [None, 2])
def test_scales_have_no_moving_average(frequency):
    """Weights are evaluated at their averages, scales as they are; Keras alone fails at the scales."""
    optimizer = keras.optimizers.SGD(0.01, ema_overwrite_frequency=frequency, use_ema=True)
    trainer = Trainer(
        model=stack,
        optimizer=lambda: optimizer,
        loss_fn="mse",
        precision="mixed_float8",
        seed=1,
        verbose=False,
        jit_compile=False,
    )
    trainer.train((ROWS, ROWS), steps=4, global_batch=8)
    layer = trainer.model.layers[0]
    kernel, scale = layer.kernel.numpy(), float(layer.kernel_scale)
    average = optimizer.variables[2].numpy()
    assert optimizer.variables[2].shape == kernel.shape
    with evaluated_weights(access.plan(trainer), averaged=True):
        np.testing.assert_array_equal(layer.kernel.numpy(), average)
        assert float(layer.kernel_scale) == scale < 1.0
    np.testing.assert_array_equal(layer.kernel.numpy(), kernel)
    assert np.array_equal(kernel, average) == (frequency == 2)


def test_float8_layers_are_refused_on_parameter_servers(monkeypatch):
    """Its workers take no steps together, so that there is no maximum over them; frozen ones may be."""
    imitate_servers(monkeypatch)
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(16), keras.layers.Dense(1)])
    model.layers[0].quantize("float8")
    with pytest.raises(ValueError, match="`model` must"):
        plan_of(model)
    model.layers[0].trainable = False
    assert plan_of(model).float8 == ()


def test_adapters_are_refused_or_leave_a_layer_in_bfloat16():
    """Keras's float8 products have no place for LoRA: a layer has the one or the other."""
    model = stack()
    model.layers[1].enable_lora(2)
    with pytest.raises(ValueError, match="`model`"):
        plan_of(model)
    layers = [keras.layers.Dense(16, name="adapted"), keras.layers.Dense(16, name="plain")]
    model = keras.Sequential([keras.Input([16]), *layers])
    layers[0].enable_lora(2)
    assert len(convert_to_float8(model, lambda _: True)) == 1
    assert plan_of(model).float8


def scanned(layer):
    """Calls a layer in the loop of a scan."""
    return lambda x: tf.scan(lambda _, row: layer(row[None])[0], x)


@pytest.mark.parametrize("kind", ["twice", "in a scan"])
@pytest.mark.parametrize("converted", [True, False])
def test_a_layer_that_is_called_twice_is_refused(kind, converted):
    """A tape adds what two calls find: the sum of two scales is no scale. In Keras alone, it is used."""
    layer = keras.layers.Dense(16, name="shared")
    model = keras.Sequential([keras.Input([16]), layer], name="twin")
    if converted:
        convert_to_float8(model, lambda _: True)
    else:
        layer.quantize("float8")

    def losses(batch, training):
        if kind == "twice":
            return tf.reduce_sum(model(batch, training=training) - model(2.0 * batch), axis=1)
        return tf.reduce_sum(scanned(layer)(batch), axis=1)

    plan = plan_of(model, losses)
    run = TrainState(plan.rule)
    step = tf.function(lambda batch: attempt_step(batch, plan, run), autograph=False)
    with pytest.raises(ValueError, match="`model`"):
        step(tf.constant(ROWS))


class Recomputed(keras.layers.Layer):
    """A float8 layer whose activations are computed again in the backward pass."""

    def __init__(self):
        """Creates and converts the inner layer."""
        super().__init__()
        self.inner = keras.layers.Dense(16)

    def build(self, shape):
        """Creates the inner layer's variables."""
        self.inner.build(shape)
        self.inner.quantize("float8")

    def call(self, inputs, training=False):
        """The inner layer's outputs."""
        # Keras knows nothing of the training when the layer runs again.
        return tf.recompute_grad(functools.partial(self.inner, training=training))(inputs)


@pytest.mark.slow
def test_a_retried_step_is_as_if_begun_at_its_last_scale():
    """L20: attempts that overflow leave no trace in float8 scales and histories."""
    rows = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")

    def layers():
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(16, activation="relu") for _ in range(3)]
        return keras.Sequential([keras.Input([16]), *hidden, keras.layers.Dense(1)])

    def after_a_step(initial_scale):
        trainer = Trainer(
            model=layers,
            optimizer=lambda: keras.optimizers.SGD(1e-20),
            loss_fn=lambda y, outputs: tf.reduce_mean((outputs - y) ** 2, axis=-1) * 1e16,
            precision="mixed_float8",
            loss_scale=scaling.DynamicLossScale(initial_scale, max_scale=2.0**100),
            skips=Skips(on_overflow="retry"),
            seed=0,
            verbose=False,
            jit_compile=False,
            monitoring=Monitoring(check_gradients=False),
        )
        totals = trainer.train((rows, rows[:, :1]), steps=1, global_batch=32).totals
        return trainer.loss_scale, totals, [value.numpy() for value in trainer.model.variables]

    scale, totals, retried = after_a_step(2.0**90)
    assert (totals.applied, totals.retries > 3) == (1, True)
    _, again, at_once = after_a_step(scale)
    assert (again.applied, again.retries) == (1, 0)
    for one, other in zip(retried, at_once, strict=True):
        np.testing.assert_array_equal(one, other)


MANY = np.random.default_rng(5)
# Of many magnitudes, so that some numbers saturate at a scale of 2^-9, and others become 0.
SCALES = {"inputs": 2.0**-9, "kernel": 2.0**-9, "outputs_grad": 2.0**-19}
SPREAD = (MANY.choice([-1.0, 1.0], (8, 16)) * 2.0 ** MANY.integers(-22, 2, (8, 16))).astype(
    "float32"
)
FIELDS = "float8_amax", "float8_scale", "float8_saturated", "float8_flushed"


def pair(activation=None, *, by_keras=False):
    """Two dense layers in float8, with biases."""
    layers = [
        keras.layers.Dense(16, activation=activation, name="one"),
        keras.layers.Dense(16, name="two"),
    ]
    model = keras.Sequential([keras.Input([16]), *layers], name="stack")
    if by_keras:
        for layer in layers:
            layer.quantize("float8")
    else:
        convert_to_float8(model, lambda _: True, SHORT)
    kernels = np.random.default_rng(6).integers(-8, 9, (2, 16, 16)) / 8.0
    for layer, kernel in zip(layers, kernels, strict=True):
        layer.kernel.assign(kernel)
        for name, scale in SCALES.items():
            getattr(layer, f"{name}_scale").assign(scale)
    return model


def squared(model):
    """The mean square of the outputs."""
    return lambda batch, training: tf.reduce_sum(model(batch, training=training) ** 2, 1)


def reports_of(model, batches, loss=squared, strategy=None, **settings):
    """The reports of steps on batches, with the model's variables afterwards."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        plan = plan_of(
            model,
            loss(model),
            strategy=strategy,
            **{"optimizer": keras.optimizers.SGD(2.0**-10)} | settings,
        )
        run = TrainState(plan.rule)
    step = tf.function(lambda batch: attempt_step(batch, plan, run), autograph=False)
    reports = [step(tf.constant(batch)) for batch in batches]
    return reports, [variable.numpy() for variable in model.variables], plan


@pytest.mark.slow
def test_shares_are_those_of_the_tensors():
    """Each share is of the tensor that the product takes: inputs, kernel, and gradients before the
    bias, which the activation has scaled.
    """
    model = pair(lambda x: 3.0 * x)
    kernel = model.layers[0].kernel.numpy()
    second = model.layers[1].kernel.numpy()
    [report], _, plan = reports_of(model, [SPREAD], record_gradients=True)
    names = [each.name for each in plan.float8]
    found = {
        name: [float(report.float8_saturated[at]), float(report.float8_flushed[at])]
        for at, name in enumerate(names)
    }
    assert names[:3] == ["stack/one/inputs", "stack/one/kernel", "stack/one/outputs_grad"]

    def lost(tensor, name):
        cast = losses_of_cast(tf.constant(tensor), SCALES[name], FORMATS[name])
        return [int(count) / tensor.size for count in cast]

    def cast(x, name):
        form, scale = FLOAT8[FORMATS[name]], SCALES[name]
        clipped = np.clip(x / scale, -form.largest, form.largest)
        return clipped.astype(form.dtype.as_numpy_dtype).astype("float32") * scale

    between = 3.0 * (cast(SPREAD, "inputs") @ cast(kernel, "kernel"))
    upstream = 2.0 * (cast(between, "inputs") @ cast(second, "kernel")) / len(SPREAD)
    back = 3.0 * cast(upstream, "outputs_grad") @ cast(second, "kernel").T
    assert found["stack/one/inputs"] == lost(SPREAD, "inputs")
    assert found["stack/one/kernel"] == lost(kernel, "kernel")
    assert found["stack/two/inputs"] == lost(between, "inputs")
    assert found["stack/two/outputs_grad"] == lost(upstream, "outputs_grad")
    assert found["stack/one/outputs_grad"] == lost(back, "outputs_grad")
    assert min(found["stack/one/inputs"]) > 0
    assert all(saturated > 0 for saturated, _ in found.values())
    amax = dict(zip(names, report.float8_amax.numpy(), strict=True))
    assert amax["stack/one/inputs"] == np.abs(SPREAD).max()
    assert amax["stack/two/outputs_grad"] == np.abs(upstream).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_keras", "jit_compile"),
    [
        (False, False),
        *(
            pytest.param(*setting, marks=pytest.mark.slow)
            for setting in [(True, False), (False, True)]
        ),
    ],
)
def test_counting_changes_no_bit(by_keras, jit_compile):
    """Weights, scales and histories have the same bits with and without; amax and scale too."""
    found = []
    for record in (False, True):
        model = pair("relu", by_keras=by_keras)
        reports, values, _ = reports_of(
            model, [SPREAD, 3 * SPREAD, SPREAD], record_gradients=record, jit_compile=jit_compile
        )
        assert vars(model.layers[0])["activation"] is keras.activations.relu
        found.append((values, [[one.float8_amax, one.float8_scale] for one in reports]))
    (plain, facts), (counted, same_facts) = found
    for before, after in zip(plain, counted, strict=True):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(facts, same_facts)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "parts"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_shares_are_those_of_the_whole_batch(mirrored, replicas, parts):
    """L20: on any replicas and microbatches, also empty ones, amax and shares are those of one device."""
    batches = [SPREAD[:3]]  # two replicas with two microbatches each: one share is empty
    whole, _, _ = reports_of(
        pair(), batches, optimizer=keras.optimizers.SGD(0.0), record_gradients=True
    )
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model, optimizer = pair(), keras.optimizers.SGD(0.0)
    divided, _, _ = reports_of(
        model,
        batches,
        strategy=strategy,
        num_microbatches=parts,
        optimizer=optimizer,
        record_gradients=True,
    )
    for one, other in zip(whole, divided, strict=True):
        for name in FIELDS:
            np.testing.assert_allclose(
                getattr(other, name), getattr(one, name), rtol=1e-6, err_msg=name
            )
        assert np.all(one.float8_amax > 0)


class Player(keras.Model):
    """Two parts with a float8 layer each; the second part reads what the first puts out."""

    def __init__(self):
        """Builds and converts the parts."""
        super().__init__()
        self.maker, self.critic = pair(), pair()
        self.maker(SPREAD), self.critic(SPREAD)
        self.built = True

    def call(self, inputs, training=False):
        """The outputs of both."""
        made = self.maker(inputs, training=training)
        return made, self.critic(made, training=training)


@pytest.mark.slow
@pytest.mark.parametrize("alternate", [False, True])
def test_each_optimizer_counts_its_own_tensors(alternate):
    """A loss that goes back through another optimizer's layers counts nothing there."""
    model = Player()

    def loss(model):
        def compute_loss(batch, training):
            made, judged = model(batch, training=training)
            return {
                "maker": tf.reduce_sum(made**2, 1) + 0.0 * tf.reduce_sum(judged, 1),
                "critic": 4.0 * tf.reduce_sum(judged**2, 1),
            }

        return compute_loss

    before = model.maker(SPREAD).numpy()
    optimizers = {name: keras.optimizers.SGD(0.0) for name in ("maker", "critic")}
    [report], _, plan = reports_of(
        model,
        [SPREAD],
        loss,
        optimizer=optimizers,
        updates=Updates(alternate_optimizers=alternate),
        record_gradients=True,
    )
    # In turns, the second optimizer finds the scales that the first has moved.
    made = model.maker(SPREAD).numpy() if alternate else before
    found = {each.name: at for at, each in enumerate(plan.float8)}
    for again, batch, factor in [("", SPREAD, 1.0), (" (2)", made, 4.0)]:
        loss_alone = functools.partial(scaled_square, factor)
        [alone], _, its = reports_of(pair(), [batch], loss_alone, record_gradients=True)
        for at, each in enumerate(its.float8):
            layer, tensor = each.name.rsplit("/", 1)
            place = found[f"{layer}{again}/{tensor}"]
            for name in FIELDS:
                assert getattr(report, name)[place] == getattr(alone, name)[at], (each.name, name)


def scaled_square(factor, model):
    """The square of the outputs, times a factor."""
    return lambda batch, training: factor * squared(model)(batch, training)


@pytest.mark.slow
def test_what_cannot_be_counted_is_nan():
    """A probe does not enter a layer that is computed again in the backward pass."""
    found = []
    for record in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([16]), Recomputed(), keras.layers.Dense(1)])
        [report], values, _ = reports_of(model, [SPREAD], record_gradients=record)
        found.append(values)
    assert bool(report.grads_finite)
    assert np.isnan(report.float8_saturated).all()
    assert float(report.float8_amax[0]) == np.abs(SPREAD).max()
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(before, after)
