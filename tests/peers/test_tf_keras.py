"""The cases of tf_keras's mixed-precision, optimizer and custom-loop tests."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, attempt
from peer_models import Stepper

import scaling
from scaling import DynamicLossScale, FixedLossScale, LossScaler
from trainer import Skips, Trainer

pytestmark = [pytest.mark.slow, pytest.mark.replicas(2, 3)]

# tf_keras's scale follows every non-finite gradient, whatever its cause.
LIKE_TF_KERAS = {"skips": Skips(attribute_causes=False)}


@pytest.fixture(params=[1, 2])
def replicas(request):
    """The numbers of replicas of tf_keras's cases; --full also runs 1."""
    return request.param


@pytest.fixture
def strategy(replicas, mirrored):
    """The strategies of tf_keras's cases."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


def sgd(rate=1.0, **arguments):
    """A function that returns a new SGD."""
    return lambda: keras.optimizers.SGD(rate, **arguments)


def growing_rule(interval=1):
    """The rule of most cases: starts at 2."""
    return scaling.preset("tf_keras", initial_scale=2.0, growth_interval=interval)


def test_fixed_loss_scale(strategy):
    """5 - 2 * 1 = 3: a fixed scale of 8 leaves no trace in the update (testFixedLossScale...)."""
    stepper = Stepper([5.0], optimizer=sgd(2.0), strategy=strategy, rule=FixedLossScale(8.0))
    stepper.step([1.0])

    assert stepper.weight == [3.0]
    assert stepper.loss_scale == 8.0


def test_a_fixed_scale_has_no_counter():
    """The state of a fixed scale is the scale alone (testDynamicAttrsWithFixedLossScale)."""
    assert FixedLossScale(2.0).initial_state()._fields == ("loss_scale",)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scaled_loss(dtype):
    """A loss of 5 at a scale of 2 is 10 (testGetScaledLoss)."""
    scaled, _ = LossScaler(FixedLossScale(2.0)).scale(tf.constant(5.0, dtype))

    assert float(scaled) == 10.0


def test_unscaled_gradients():
    """None stays None, float16 becomes float32, and sparse gradients stay sparse
    (testGetUnscaledGradients, testGetUnscaledSparseGradients).
    """
    sparse = tf.IndexedSlices(
        tf.constant([[4.0, 2.0], [8.0, 5.0]]), tf.constant([1, 3]), tf.constant([5, 2])
    )
    given = [tf.constant(3.0), None, tf.constant(-4.0, tf.float16), sparse]
    first, nothing, half, slices = scaling.unscale_gradients(
        given, FixedLossScale(2.0).initial_state()
    )

    assert (float(first), nothing, float(half), half.dtype) == (1.5, None, -2.0, tf.float32)
    assert isinstance(slices, tf.IndexedSlices)
    assert slices.values.numpy().tolist() == [[2.0, 1.0], [4.0, 2.5]]


def test_dynamic_loss_scale(strategy):
    """5, 3, 1: the update does not depend on the scale, which doubles after every finite step; a NaN
    moves no weight and halves it (testDynamicLossScale, testDynamicUpdate).
    """
    stepper = Stepper(
        [5.0], optimizer=sgd(2.0), strategy=strategy, rule=growing_rule(), **LIKE_TF_KERAS
    )
    seen = []
    for gradient in (1.0, 1.0, np.nan):
        stepper.step([gradient])
        seen.append((stepper.weight.item(), stepper.loss_scale))

    assert seen == [(3.0, 4.0), (1.0, 8.0), (1.0, 4.0)]


def test_default_values():
    """2^15, and growth after 2000 steps (testDynamicLossScaleDefaultValues)."""
    rule = scaling.preset("tf_keras")

    assert (rule.initial_scale, rule.growth_interval) == (2.0**15, 2000)


@pytest.mark.parametrize(
    "bound",
    [
        "global_clipnorm",
        pytest.param("clipnorm", marks=pytest.mark.slow),
        pytest.param("clipvalue", marks=pytest.mark.slow),
    ],
)
def test_clipping(strategy, bound):
    """A gradient of 4 is clipped to 2, on any number of replicas; the scale grows as usual. An
    infinite one is skipped, not clipped (testClipping).
    """
    stepper = Stepper(
        [5.0],
        optimizer=sgd(2.0, **{bound: 2.0}),
        strategy=strategy,
        rule=growing_rule(),
        **LIKE_TF_KERAS,
    )
    stepper.step([4.0])

    assert (stepper.weight, stepper.loss_scale) == ([1.0], 4.0)

    stepper.step([np.inf])

    assert (stepper.weight, stepper.loss_scale) == ([1.0], 2.0)


def test_a_bound_cannot_change_after_the_plan():
    """tf_keras's case also sets a new bound between steps. A plan's constants are constants: a new
    plan has the new bound.
    """
    stepper = Stepper([5.0], optimizer=sgd(2.0, clipvalue=2.0), rule=growing_rule())
    stepper.step([4.0])
    again = Stepper(stepper.weight, optimizer=sgd(2.0, clipvalue=3.0), rule=growing_rule())
    again.step([4.0])

    assert again.weight == [-5.0]


def test_a_loss_in_float16():
    """A float16 loss is scaled in float32: 5 - 2 * 1 = 3 (testDynamicLossScaleWithFloat16Loss)."""
    weight, scaler = tf.Variable([5.0]), LossScaler(growing_rule())
    with tf.GradientTape() as tape:
        scaled, token = scaler.scale(tf.cast(weight, tf.float16))
    [gradient] = scaler.unscale([tape.gradient(scaled, weight)], token)
    weight.assign_sub(2.0 * gradient)

    assert weight.numpy() == [3.0]


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_nan_on_one_replica_only(mirrored, bad):
    """A NaN on one replica stops the update on both, and halves the scale once; tf_keras's own case
    needs GPUs (testNanOnOneReplicaOnly, testCustomAggregater).
    """
    stepper = Stepper(
        [1.0, 2.0],
        optimizer=sgd(),
        strategy=mirrored(2),
        rule=growing_rule(interval=2),
        **LIKE_TF_KERAS,
    )
    factors = np.where(np.arange(2) == bad, np.nan, 1.0)
    report = stepper.step([2.0, 2.0], backward=factors)

    assert not report.grads_finite
    assert stepper.weight.tolist() == [1.0, 2.0]
    assert stepper.loss_scale == 1.0


def test_slots(strategy):
    """Momentum 1: the weights fall by 1, then by 2, while the scale doubles twice
    (testDynamicLossScaleWithSlots).
    """
    stepper = Stepper(
        [1.0, 2.0], optimizer=sgd(momentum=1.0), strategy=strategy, rule=growing_rule()
    )
    seen = []
    for _ in range(2):
        stepper.step([1.0, 1.0])
        seen.append((stepper.weight.tolist(), stepper.loss_scale))

    assert seen == [([0.0, 1.0], 4.0), ([-2.0, -1.0], 8.0)]


def test_iterations(strategy):
    """Tf_keras counts skipped steps in `iterations`, too. Here `iterations` counts updates, and the
    run's own count has both (testIterations, testIterationsIncremented).
    """
    stepper = Stepper([5.0], optimizer=sgd(), strategy=strategy, rule=growing_rule())
    stepper.step([2.0])
    stepper.step([2.0], backward=np.nan)

    assert stepper.weight == [3.0]
    assert int(stepper.optimizer.iterations.numpy()) == 1
    assert int(stepper.run.step) == 2


def test_hyperparameters_stay_the_optimizers():
    """The optimizer is not wrapped, so its own attributes are the ones in use: a learning rate that
    is assigned between steps counts (testHyperParametersExposed and others).
    """
    stepper = Stepper([5.0], optimizer=sgd(1.0), rule=growing_rule())
    stepper.step([1.0])
    stepper.optimizer.learning_rate = 2.0
    stepper.step([1.0])

    assert stepper.weight == [2.0]


def test_checkpoint(tmp_path):
    """Weight, momentum, scale, counter and iterations come back from a checkpoint (testCheckpoint)."""
    stepper = Stepper([2.0], optimizer=sgd(momentum=1.0), rule=growing_rule(interval=2))
    stepper.step([1.0])
    before = values(stepper)
    checkpoint = tf.train.Checkpoint(
        model=stepper.model, optimizer=stepper.optimizer, run=stepper.run
    )
    path = checkpoint.save(tmp_path / "ckpt")
    for _ in range(2):
        stepper.step([1.0])

    assert values(stepper) != before

    checkpoint.restore(path).assert_consumed()

    assert values(stepper) == before
    assert stepper.weight == [1.0]


def values(stepper):
    """Weights, slots, iterations and the state of the scale."""
    variables = [*stepper.model.variables, *stepper.optimizer.variables]
    return [v.numpy().tolist() for v in variables], stepper.run.loss_scaler.state_dict()


def test_a_rule_is_its_own_config():
    """A rule is a value: equal to another with the same fields, and made again from its text; one with
    a wrong factor is refused (testGetConfig..., testSerialization..., test_from_config_...).
    """
    rule = scaling.parse_rule("tf_keras:initial_scale=8:growth_interval=3")

    assert rule == scaling.preset("tf_keras", initial_scale=8.0, growth_interval=3)
    with pytest.raises(ValueError, match="`growth_factor` must be"):
        scaling.preset("tf_keras", growth_factor=0.5)


def test_missing_scaling_is_an_error():
    """Tf_keras warns if the loss was not scaled, or the gradients were not unscaled. Here the update
    raises; in the right order nothing is said (testScalingWarning, testScalingNoWarning).
    """
    scaler = LossScaler(DynamicLossScale())
    with pytest.raises(RuntimeError, match="scale"):
        scaler.update(tf.constant(value=True))
    _, token = scaler.scale(1.0)
    with pytest.raises(RuntimeError, match="unscale"):
        scaler.update(tf.constant(value=True))
    scaler.unscale([tf.constant(1.0)], token)
    scaler.update(tf.constant(value=True))


def test_wrapped_optimizers_are_refused():
    """An optimizer that scales by itself would scale twice (testErrorWhenNesting and others)."""
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match=r"inner_optimizer"):
        Stepper([1.0], optimizer=wrapped)


def test_a_loss_scale_that_is_no_number():
    """The argument is named in the error (testDynamicMustBeBool, testInvalidArgs...)."""
    with pytest.raises((TypeError, ValueError), match="`loss_scale` must"):
        Linear(loss_scale=[])


def test_a_wrong_optimizer_is_refused():
    """An object that is no Keras 3 optimizer is refused (testErrorWhenWrappingNonOptimizer,
    test_pass_invalid_optimizer_with_loss_scaling).
    """
    with pytest.raises(TypeError, match="`optimizer` must be"):
        Linear(optimizer=1)


class HalfProduct(Linear):
    """One weight in float16, as tf_keras's MultiplyLayer. The gradient is 1."""

    def compute_loss(self, batch, training):
        """The outputs. Their dtype is asserted."""
        outputs = self.model(batch["x"], training=training)
        assert outputs.dtype == self.precision.compute_dtype
        return tf.cast(outputs, tf.float32)[:, 0] * batch["slope"]


def ones(slope=1.0):
    """Four examples."""
    return {"x": np.ones([4, 1], np.float32), "slope": np.full(4, slope, np.float32)}


@pytest.mark.parametrize(
    "precision", ["mixed_float16", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_model_with_fixed_loss_scale(strategy, precision):
    """The weight starts at 1 and loses 1 (test_fixed_loss_scaling, test_model)."""
    trainer = HalfProduct(strategy=strategy, precision=precision, loss_scale=8.0)
    list(attempt(trainer, [ones()]))

    assert trainer.weight == 0.0
    assert trainer.model.layers[0].kernel.dtype == "float32"


def test_model_with_dynamic_loss_scale(strategy):
    """0, -1, -2, then an overflow that moves nothing, then -3. The scale doubles after two finite
    steps and is halved by the overflow (test_dynamic_loss_scaling).
    """
    trainer = HalfProduct(
        strategy=strategy, precision="mixed_float16", loss_scale=growing_rule(interval=2)
    )
    seen = []
    for slope in (1.0, 1.0, 1.0, 1e6, 1.0):
        list(attempt(trainer, [ones(slope)]))
        seen.append((trainer.weight, trainer.loss_scale))

    assert seen == [(0.0, 2.0), (-1.0, 4.0), (-2.0, 4.0), (-2.0, 2.0), (-3.0, 2.0)]


@pytest.mark.parametrize(
    ("precision", "scaled"),
    [("mixed_float16", True), ("mixed_bfloat16", False), ("float32", False)],
)
def test_float16_is_scaled_by_default(precision, scaled):
    """Float16 gets a dynamic scale, the others none (test_compile_wraps_with_loss_scale_optimizer)."""
    trainer = Linear(precision=precision)

    assert isinstance(trainer.rule, DynamicLossScale) is scaled


class HalfPenalty(Linear):
    """A float16 model with a loss of its own."""

    def build_model(self):
        """One layer that adds its output to the losses."""
        inputs = keras.Input([1])
        outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
        return keras.Model(inputs, keras.layers.ActivityRegularization(l2=1.0)(outputs))


def test_losses_of_a_half_precision_model_are_float32():
    """The square of 300 does not fit float16; the loss is 90000 (test_functional_model_loss_dtype)."""
    trainer = HalfPenalty(precision="mixed_float16", loss_scale=None, optimizer=sgd(0.0))
    [report] = attempt(
        trainer, [{"x": np.full([1, 1], 300.0, np.float32), "slope": np.ones(1, np.float32)}]
    )

    assert report.regularization_loss == 90000.0


def test_weights_and_slots_of_a_half_precision_model_are_saved(tmp_path, strategy):
    """Weights, momentum and scale come back on every replica (test_save_weights_..., test_save_slot_...,
    test_save_model_with_dynamic_loss_scaling).
    """
    make = {
        "strategy": strategy,
        "precision": "mixed_float16",
        "loss_scale": growing_rule(),
        "optimizer": sgd(momentum=1.0),
        "model": lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        "loss_fn": lambda y, outputs: outputs[:, 0] - y,
        "model_dir": tmp_path,
        "verbose": False,
        "jit_compile": False,
    }
    data = np.ones([4, 1], np.float32), np.zeros(4, np.float32)
    first = Trainer(**make)
    first.train(data, steps=2, global_batch=4)
    second = Trainer(**make)
    second.train(data, steps=2, global_batch=4)

    saved, loaded = all_copies(first), all_copies(second)
    assert [np.array(v).tolist() for v in saved.values()] == [
        np.array(v).tolist() for v in loaded.values()
    ]
    assert (first.loss_scale, second.loss_scale) == (8.0, 8.0)
    assert second.totals.attempted == 2


def test_gradients_are_summed_once(mirrored):
    """Gradients of 1 and 2 on two replicas at a rate of 0.1: each weight moves by the mean, as the loss
    is one over the global batch. tf_keras moves by the sum, or, without aggregation, each replica by
    its own gradient, which leaves replicas that differ (test_custom_aggregation).
    """
    stepper = Stepper([0.0, 0.0], optimizer=sgd(0.1), strategy=mirrored(2))
    stepper.step([1.0, 1.0], backward=[1.0, 2.0])

    np.testing.assert_allclose(stepper.weight, [-0.15, -0.15], rtol=1e-6)


def test_one_device():
    """On one device the weight moves by its gradient (test_custom_aggregation_one_device)."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    stepper = Stepper([0.0, 0.0], optimizer=sgd(0.1), strategy=strategy)
    stepper.step([1.0, 1.0])

    np.testing.assert_allclose(stepper.weight, [-0.1, -0.1], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*CentralStorage")
def test_central_storage():
    """Tf_keras refuses central storage under loss scaling. Here two replicas that share one copy of
    each variable take the same steps as one device (testUnsupportedStrategy,
    test_custom_aggregation_central_storage).
    """
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    stepper = Stepper(
        [2.0],
        optimizer=sgd(momentum=1.0),
        strategy=central,
        rule=growing_rule(interval=2),
        **LIKE_TF_KERAS,
    )
    seen = []
    for factors in ([1.0, 1.0], [0.5, 1.5], [1.0, np.nan]):
        stepper.step([1.0], backward=factors)
        seen.append((stepper.weight.item(), stepper.loss_scale))

    assert seen == [(1.0, 2.0), (-1.0, 4.0), (-1.0, 2.0)]
