"""What saturates and what becomes 0 in a cast to float8: counted over all shares of a step."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from plans import plan_of

import scaling
from scaling.float8 import DelayedScaling, losses_of_cast
from scaling.float8.cast import FORMATS as FLOAT8
from trainer import Updates, convert_to_float8
from trainer.step import TrainState, attempt_step
from trainer.step.float8 import FORMATS

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)

RNG = np.random.default_rng(5)
# Of many magnitudes, so that some numbers saturate at a scale of 2^-9, and others become 0.
SCALES = {"inputs": 2.0**-9, "kernel": 2.0**-9, "outputs_grad": 2.0**-19}
ROWS = (RNG.choice([-1.0, 1.0], (8, 16)) * 2.0 ** RNG.integers(-22, 2, (8, 16))).astype("float32")
SHORT = DelayedScaling(history_length=4)
FIELDS = "float8_amax", "float8_scale", "float8_saturated", "float8_flushed"


def stack(activation=None, *, by_keras=False):
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


def steps(model, batches, loss=squared, strategy=None, **settings):
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
    model = stack(lambda x: 3.0 * x)
    kernel = model.layers[0].kernel.numpy()
    second = model.layers[1].kernel.numpy()
    [report], _, plan = steps(model, [ROWS], record_gradients=True)
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

    between = 3.0 * (cast(ROWS, "inputs") @ cast(kernel, "kernel"))
    upstream = 2.0 * (cast(between, "inputs") @ cast(second, "kernel")) / len(ROWS)
    back = 3.0 * cast(upstream, "outputs_grad") @ cast(second, "kernel").T
    assert found["stack/one/inputs"] == lost(ROWS, "inputs")
    assert found["stack/one/kernel"] == lost(kernel, "kernel")
    assert found["stack/two/inputs"] == lost(between, "inputs")
    assert found["stack/two/outputs_grad"] == lost(upstream, "outputs_grad")
    assert found["stack/one/outputs_grad"] == lost(back, "outputs_grad")
    assert min(found["stack/one/inputs"]) > 0
    assert all(saturated > 0 for saturated, _ in found.values())
    amax = dict(zip(names, report.float8_amax.numpy(), strict=True))
    assert amax["stack/one/inputs"] == np.abs(ROWS).max()
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
        model = stack("relu", by_keras=by_keras)
        reports, values, _ = steps(
            model, [ROWS, 3 * ROWS, ROWS], record_gradients=record, jit_compile=jit_compile
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
    batches = [ROWS[:3]]  # two replicas with two microbatches each: one share is empty
    whole, _, _ = steps(
        stack(), batches, optimizer=keras.optimizers.SGD(0.0), record_gradients=True
    )
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model, optimizer = stack(), keras.optimizers.SGD(0.0)
    divided, _, _ = steps(
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


@pytest.mark.thorough
def test_the_scale_is_the_one_that_the_step_used():
    """A scale that a step moves is the next step's."""
    model = stack()
    reports, _, plan = steps(model, [ROWS, ROWS])
    assert float(reports[0].float8_scale[0]) == 2.0**-9
    [own] = [each for each in plan.float8 if each.name == "stack/one/inputs"]
    moved = own.rule.advance(own.rule.initial_state(), np.abs(ROWS).max())
    assert float(reports[1].float8_scale[0]) == float(moved.scale)
    assert reports[0].float8_saturated.shape == [0]


@pytest.mark.thorough
def test_a_skipped_step_reports_what_it_met():
    """An inf is reported as the largest magnitude of a step that was not applied."""
    rows = ROWS.copy()
    rows[-1, 0] = np.inf
    [report], _, _ = steps(stack(), [rows], record_gradients=True)
    assert not bool(report.grads_finite)
    assert float(report.float8_amax[0]) == np.inf


class Player(keras.Model):
    """Two parts with a float8 layer each; the second part reads what the first puts out."""

    def __init__(self):
        """Builds and converts the parts."""
        super().__init__()
        self.maker, self.critic = stack(), stack()
        self.maker(ROWS), self.critic(ROWS)
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

    before = model.maker(ROWS).numpy()
    optimizers = {name: keras.optimizers.SGD(0.0) for name in ("maker", "critic")}
    [report], _, plan = steps(
        model,
        [ROWS],
        loss,
        optimizer=optimizers,
        updates=Updates(alternate_optimizers=alternate),
        record_gradients=True,
    )
    # In turns, the second optimizer finds the scales that the first has moved.
    made = model.maker(ROWS).numpy() if alternate else before
    found = {each.name: at for at, each in enumerate(plan.float8)}
    for again, batch, factor in [("", ROWS, 1.0), (" (2)", made, 4.0)]:
        loss_alone = functools.partial(scaled_square, factor)
        [alone], _, its = steps(stack(), [batch], loss_alone, record_gradients=True)
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

    class Recomputed(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(16, name="inner")

        def build(self, shape):
            self.inner.build(shape)
            self.inner.quantize("float8")

        def call(self, inputs, training=False):
            return tf.recompute_grad(functools.partial(self.inner, training=training))(inputs)

    found = []
    for record in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([16]), Recomputed(), keras.layers.Dense(1)])
        [report], values, _ = steps(model, [ROWS], record_gradients=record)
        found.append(values)
    assert bool(report.grads_finite)
    assert np.isnan(report.float8_saturated).all()
    assert float(report.float8_amax[0]) == np.abs(ROWS).max()
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_model_without_float8_has_empty_fields():
    """A report of another model has no room for them."""
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(1)])
    [report], _, plan = steps(model, [ROWS], record_gradients=True, rule=scaling.NoLossScale())
    assert plan.float8 == ()
    assert [getattr(report, name).shape for name in FIELDS] == [(0,)] * 4
