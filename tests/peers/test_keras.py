"""The cases of Keras 3.15's tests of loss scaling, optimizers, distribution, training, remat and
float8.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, attempt, copies
from peer_models import Stepper

import scaling
from scaling import DynamicLossScale
from trainer import Trainer, Updates

pytestmark = [pytest.mark.thorough, pytest.mark.replicas(2, 3)]

START = [1.0, 2.0, 3.0, 4.0]
GRADIENT = [1.0, 6.0, 7.0, 2.0]
TABLE = [[1.0, 2.0], [3.0, 4.0]]
ONES = [[1.0, 1.0], [1.0, 1.0]]
TWOS = [[2.0, 2.0], [2.0, 2.0]]


@pytest.fixture(params=[2, 1])
def replicas(request):
    """The numbers of replicas of the distribution cases; --full also runs 1."""
    return request.param


@pytest.fixture
def strategy(replicas, mirrored):
    """The strategy of the distribution cases."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


def sgd(rate=1.0, **arguments):
    """A function that returns a new SGD."""
    return lambda: keras.optimizers.SGD(rate, **arguments)


# loss_scale_optimizer_test.py


def test_finite_step():
    """The update does not depend on the scale (test_finite_step)."""
    stepper = Stepper(START, optimizer=sgd(0.5), rule=scaling.preset("keras3"))
    stepper.step(GRADIENT)

    assert stepper.weight.tolist() == [0.5, -1.0, -0.5, 3.0]


def test_inner_loss_scale_is_refused():
    """An optimizer's own `loss_scale_factor`, which Keras ignores here, is refused
    (test_finite_step_with_inner_loss_scale).
    """
    with pytest.raises(ValueError, match="loss_scale_factor"):
        Stepper(START, optimizer=sgd(0.5, loss_scale_factor=100))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinite_step(bad):
    """A step of infinite gradients moves nothing (test_infinite_step)."""
    stepper = Stepper(START, optimizer=sgd(0.5), rule=scaling.preset("keras3"))
    stepper.step(GRADIENT, backward=bad)

    assert stepper.weight.tolist() == START


def test_downscaling():
    """Four overflows divide the scale by 16. Keras starts at 400, which is no power of two
    (test_downscaling).
    """
    stepper = Stepper(START, optimizer=sgd(0.5), rule=scaling.preset("keras3", initial_scale=512.0))
    for _ in range(4):
        stepper.step(GRADIENT, backward=np.inf)

    assert float(scaling.scale_loss(1.0, stepper.run.loss_scaler.state)) == 32.0


def test_upscaling_and_iterations():
    """With an interval of 2, eight finite steps take a scale of 2 to 32; every one of them counts
    (test_upscaling, test_iterations_update).
    """
    rule = scaling.preset("keras3", initial_scale=2.0, growth_interval=2)
    stepper = Stepper(START, optimizer=sgd(0.5), rule=rule)
    for count in range(8):
        assert int(stepper.optimizer.iterations.numpy()) == count
        stepper.step(GRADIENT)

    assert stepper.loss_scale == 32.0


def test_a_rule_is_a_value():
    """A rule is equal to one with the same fields, is made again from its fields, and has no others
    (test_config, test_serialization, test_init_unsupported_arg).
    """
    rule = scaling.preset("keras3", initial_scale=4.0, growth_interval=2)

    assert rule == scaling.preset("keras3", growth_interval=2, initial_scale=4.0)
    with pytest.raises(TypeError, match="foo"):
        scaling.preset("keras3", foo=True)


# optimizer_test.py


def test_two_bounds_are_refused():
    """At most one bound may be set (test_clip_args)."""
    with pytest.raises(ValueError, match=r"`clipnorm`|`clipvalue`"):
        Linear(updates=Updates(clipnorm=0.1, clipvalue=0.1))


@pytest.mark.parametrize(
    ("bound", "gradient", "expected"),
    [
        pytest.param("clipnorm", [100.0, 100.0], [2**-0.5, 2**-0.5], marks=pytest.mark.slow),
        pytest.param("clipvalue", [100.0, 100.0], [1.0, 1.0], marks=pytest.mark.slow),
        ("global_clipnorm", [50.0, 100.0], [5**-0.5, 2 * 5**-0.5]),
    ],
)
def test_clipping(strategy, bound, gradient, expected):
    """A bound of 1 on norm, value and global norm, also on replicas (test_clip_norm, test_clip_value,
    test_global_clip_norm, and those of optimizer_distribute_test.py).
    """
    stepper = Stepper([0.0, 0.0], optimizer=sgd(1.0, **{bound: 1.0}), strategy=strategy)
    stepper.step(gradient)

    np.testing.assert_allclose(-stepper.weight, expected, rtol=1e-6)


def test_moving_average(strategy):
    """The average starts at the weights after the first update, follows with momentum 0.9, and
    overwrites the weights at the third (test_ema in both files).
    """
    ema = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    stepper = Stepper([[3.0, 4.0], [5.0, 6.0]], optimizer=sgd(**ema), strategy=strategy)
    seen = []
    for _ in range(3):
        stepper.step(ONES)
        [average] = [v for v in stepper.optimizer.variables if "average" in v.path]
        seen.append((stepper.weight[0, 0], copies(average)[-1][0, 0]))

    np.testing.assert_allclose(seen, [(2.0, 2.0), (1.0, 1.9), (1.71, 1.71)], rtol=1e-6)


def test_constraints_are_applied():
    """A constraint holds even if the gradient is 0 (test_constraints_are_applied in both files)."""
    stepper = Stepper(
        [[-0.5, 0.5], [-1.0, 0.25]], optimizer=sgd(1e-4), constraint=keras.constraints.NonNeg()
    )
    stepper.step(np.zeros([2, 2]))

    assert stepper.weight.tolist() == [[0.0, 0.5], [0.0, 0.25]]


def test_optimizers_by_name():
    """A name is an optimizer; a wrong one is refused (test_get_method)."""
    assert isinstance(Trainer(optimizer="adamw").build_optimizer(), keras.optimizers.AdamW)
    with pytest.raises(ValueError, match="typo"):
        Trainer(optimizer="typo").build_optimizer()


def test_static_loss_scaling():
    """A fixed scale of 1024 takes the weights from their values to 0 (test_static_loss_scaling)."""
    stepper = Stepper(TABLE, optimizer=sgd(), rule=scaling.FixedLossScale(1024.0))
    stepper.step(TABLE)

    assert float(scaling.scale_loss(1.0, stepper.run.loss_scaler.state)) == 1024.0
    assert not stepper.weight.any()


class Batches(Stepper):
    """Takes steps with several examples, which are cut into microbatches."""

    def batch(self, *examples):
        """Attempts one step; each example is a list of gradients, one for each weight."""
        columns = [tf.constant(np.float32(each)) for each in zip(*examples, strict=True)]
        return self._step((tuple(columns), tf.ones([len(examples)])))


def test_gradient_accumulation():
    """Three microbatches of gradient 1 are one update of 1 and one iteration. In Keras every
    microbatch is a call, and the update comes with the last (test_gradient_accumulation in both
    files).
    """
    stepper = Batches(TABLE, optimizer=sgd(), num_microbatches=3)
    stepper.batch([ONES], [ONES], [ONES])

    assert stepper.weight.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert int(stepper.optimizer.iterations.numpy()) == 1


def test_overwrite_with_gradient(strategy):
    """A marked variable takes the value of its gradient, while another one learns: no scale divides it
    and no replica adds to it (test_finite_step_with_overwrite, test_overwrite_with_gradient).
    """
    rule = scaling.FixedLossScale(1024.0)
    stepper = Stepper(TABLE, TABLE, optimizer=sgd(), strategy=strategy, rule=rule, overwritten=[0])
    stepper.step(ONES, ONES)

    assert stepper.weights[0].tolist() == ONES
    assert stepper.weights[1].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_overwrite_with_microbatches():
    """Over two microbatches the marked variable takes the larger value, and the other one moves by the
    mean, 1.5 (test_overwrite_with_gradient_with_gradient_accumulation).
    """
    stepper = Batches(TABLE, TABLE, optimizer=sgd(), num_microbatches=2, overwritten=[0])
    stepper.batch([ONES, ONES], [TWOS, TWOS])

    assert stepper.weights[0].tolist() == TWOS
    assert stepper.weights[1].tolist() == [[-0.5, 0.5], [1.5, 2.5]]


@pytest.mark.parametrize("name", ["sgd", "adafactor", "adamw"])
def test_accumulation_with_weight_decay(name):
    """Three microbatches are one step with the mean gradient, with weight decay, for eight steps
    (test_gradient_accumulation_with_weight_decay).
    """
    config = {"class_name": name, "config": {"weight_decay": 0.05}}
    make = lambda: keras.optimizers.get(config)  # noqa: E731
    whole = Stepper([[0.9], [0.5]], optimizer=make)
    parts = Batches([[0.9], [0.5]], optimizer=make, num_microbatches=3)
    random = np.random.default_rng(0)
    for _ in range(8):
        gradients = random.random([3, 2, 1])
        whole.step(gradients.mean(axis=0))
        parts.batch(*([each] for each in gradients))

    np.testing.assert_allclose(parts.weight, whole.weight, rtol=1e-5)


def test_callable_learning_rate():
    """A learning rate may be a function (test_callable_learning_rate)."""
    stepper = Stepper(TABLE, optimizer=sgd(lambda: 0.1))
    stepper.step(ONES)

    np.testing.assert_allclose(stepper.weight, [[0.9, 1.9], [2.9, 3.9]], rtol=1e-6)
    assert int(stepper.optimizer.iterations.numpy()) == 1


# optimizer_distribute_test.py and distribute_test.py


def test_single_step(strategy):
    """The mean over the global batch: two replicas with the same gradient move the weights as one.
    Keras adds them up, and so moves twice as far (test_single_step).
    """
    stepper = Stepper(START, optimizer=sgd(0.5, momentum=0.06), strategy=strategy)
    stepper.step(GRADIENT)

    assert stepper.weight.tolist() == [0.5, -1.0, -0.5, 3.0]


def test_weight_decay(strategy):
    """A gradient of 0 and a decay of 0.004: three updates leave 0.996 ** 3; what is excluded by name or
    variable stays (test_weight_decay).
    """

    def make():
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.004)
        optimizer.exclude_from_weight_decay(var_names=["given_1"])
        return optimizer

    stepper = Stepper(2.0, 3.0, optimizer=make, strategy=strategy)
    for _ in range(3):
        stepper.step(0.0, 0.0)

    np.testing.assert_allclose(stepper.weights, [1.9760959, 3.0], rtol=1e-6)


def test_golden(strategy):
    """Keras's golden values of Nesterov SGD. Their gradients are the sum over two replicas, hence the
    factor 2 (test_correctness_with_golden).
    """
    stepper = Stepper(np.ones(10), optimizer=sgd(0.01, nesterov=True), strategy=strategy)
    stepper.step(2 * np.arange(0.1, 1.1, 0.1))
    golden = 1.0 - 0.002 * np.arange(1, 11)
    for row in range(5):
        np.testing.assert_allclose(stepper.weight, golden - 0.0002 * row, rtol=0, atol=5e-7)
        stepper.step(np.full(10, 0.02))


def regularized():
    """One weight of 1 with L1 and L2."""
    layer = keras.layers.Dense(
        1,
        use_bias=False,
        kernel_initializer="ones",
        kernel_regularizer=keras.regularizers.L1L2(l1=0.01, l2=0.01),
    )
    return keras.Sequential([keras.Input([1]), layer])


def test_regularizers_on_replicas(strategy):
    """Losses and weights are those of `fit` on one device (test_correctness_with_fit_and_regularizer)."""
    x, y = np.ones([12, 1], np.float32), np.zeros([12, 1], np.float32)
    expected = regularized()
    expected.compile(loss="mse", optimizer="sgd")
    history = expected.fit(x, y, batch_size=12, epochs=1, verbose=0).history
    trainer = Trainer(
        model=regularized, optimizer="sgd", loss_fn="mse", strategy=strategy, verbose=False
    )
    [report] = attempt(trainer, [(x, y)])

    assert history["loss"] == pytest.approx([1.02])
    assert report.loss + report.regularization_loss == pytest.approx(1.02)
    for copy in copies(trainer.model.layers[0].kernel):
        np.testing.assert_allclose(copy, expected.layers[0].kernel.numpy(), rtol=1e-6)


# trainer_test.py


def dense(units=3, policy=None):
    """Keras's ExampleModel: a dense layer of ones without a bias."""
    layer = keras.layers.Dense(units, use_bias=False, kernel_initializer="ones", dtype=policy)
    return keras.Sequential([keras.Input([4]), layer])


def mean_squared(**arguments):
    """A trainer with SGD and the mean squared error."""
    settings = {
        "model": dense,
        "optimizer": "sgd",
        "loss_fn": "mse",
        "metrics": lambda: {"mse": keras.metrics.MeanSquaredError()},
        "verbose": False,
        "jit_compile": False,
    }
    return Trainer(**settings | arguments)


FIT = np.ones([100, 4], np.float32), np.zeros([100, 3], np.float32)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps_per_loop", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_fit_flow(jit_compile, steps_per_loop):
    """Epochs of five steps: the squared errors fall to about 14.5, 11.5 and 8.5, whatever the number of
    steps in a loop (test_fit_flow, test_steps_per_execution_...).
    """
    trainer = mean_squared(jit_compile=jit_compile, steps_per_loop=steps_per_loop)
    kernel, errors = [4.0], []
    for epoch in range(3):
        trainer.train(FIT, epochs=epoch + 1, global_batch=20)
        kernel.append(float(trainer.model.layers[0].kernel.numpy().sum(axis=0)[0]))
        expected = [kernel[-2] * (1 - 0.01 * 2 * 4 / 3) ** step for step in range(6)]
        errors.append(np.mean(np.square(expected[:5])))
        assert kernel[-1] == pytest.approx(expected[-1], rel=1e-5)

    assert trainer.totals.attempted == 15
    np.testing.assert_allclose(errors, [14.5, 11.5, 8.5], atol=1.0)


def test_evaluate_flow():
    """Loss and metric are 16, with a last batch of 4 (test_evaluate_flow)."""
    assert mean_squared().evaluate(FIT, global_batch=16) == {"loss": 16.0, "mse": 16.0}


def test_predict_flow():
    """Every output is 4, in order, with a last batch of 4 (test_predict_flow,
    test_predict_preserve_order, test_predict_generator).
    """
    x = FIT[0] * np.arange(100, dtype=np.float32)[:, None]
    predicted = mean_squared().predict(x, global_batch=16)

    np.testing.assert_array_equal(predicted, 4.0 * np.arange(100)[:, None] * np.ones([1, 3]))


def test_on_batch_methods():
    """Two steps on one batch, an evaluation and a prediction give the numbers of Keras's methods for
    single batches (test_on_batch_methods, test_on_batch_methods_without_training).
    """
    trainer = mean_squared()
    untrained = mean_squared().predict(FIT[0], global_batch=100)
    losses = [trainer.train_on_batch(FIT)["loss"] for _ in range(2)]
    evaluated = trainer.evaluate(FIT, global_batch=100)["loss"]
    predicted = trainer.predict(FIT[0], global_batch=100)

    np.testing.assert_array_equal(untrained[0], [4.0, 4.0, 4.0])
    np.testing.assert_allclose([*losses, evaluated], [16.0, 15.158, 14.360], rtol=1e-4)
    np.testing.assert_allclose(predicted[0], [3.789511] * 3, rtol=1e-6)


def two_towers():
    """Two dense layers of ones, from a dict to a dict."""
    inputs = {name: keras.Input([4], name=name) for name in ("x_one", "x_two")}
    towers = [keras.layers.Dense(3, use_bias=False, kernel_initializer="ones") for _ in inputs]
    outputs = {
        name: tower(each)
        for name, tower, each in zip(("y_one", "y_two"), towers, inputs.values(), strict=True)
    }
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize(
    ("precision", "scaled"),
    [("mixed_float16", True), ("mixed_bfloat16", False), ("float32", False)],
)
def test_float16_is_scaled_by_default(precision, scaled):
    """Float16 is scaled unless that is turned off; bfloat16 is not (test_adds_loss_scaling_optimizer)."""
    rule = mean_squared(precision=precision).rule

    assert isinstance(rule, DynamicLossScale) is scaled
    assert mean_squared(precision=precision, loss_scale=None).rule == scaling.NoLossScale()


def deep():
    """Fifteen sigmoids, whose gradient in float16 is 0 without scaling."""
    layers = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", activation="sigmoid")
        for _ in range(15)
    ]
    return keras.Sequential([keras.Input([1]), *layers])


@pytest.mark.thorough
@pytest.mark.parametrize("scaled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_loss_scaling_prevents_underflow(scaled):
    """The first of fifteen layers moves only under a loss scale (test_loss_scaling_prevents_underflow)."""
    trainer = mean_squared(
        model=deep,
        optimizer=sgd(1e9),
        metrics=None,
        precision="mixed_float16",
        loss_scale="auto" if scaled else None,
    )
    one = np.ones([1, 1], np.float32)
    trainer.train((one, one), steps=1, global_batch=1)

    assert (trainer.model.layers[0].kernel.numpy() != 1.0).all() == scaled


class Training(keras.layers.Layer):
    """Returns its inputs in training and 0 otherwise."""

    def call(self, x, training=False):
        """Keras's TrainingTestingLayer, with a weight that does not count."""
        return x if training else 0.0 * x


def test_training_argument():
    """The training loss is 1, the evaluation's 0, and predictions are 0 (test_training_arg)."""
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"), Training()]
    model = keras.Sequential([keras.Input([1]), *layers])
    x, y = np.ones([128, 1], np.float32), np.zeros([128, 1], np.float32)
    seen = []

    class Watching(Trainer):
        def compute_loss(self, batch, training):
            losses = super().compute_loss(batch, training)
            seen.append(training)
            return losses

    trainer = Watching(
        model=model, optimizer=sgd(0.0), loss_fn="mse", verbose=False, jit_compile=False
    )
    [report] = attempt(trainer, [(x, y)])

    assert report.loss == 1.0
    assert trainer.evaluate((x, y), global_batch=32)["loss"] == 0.0
    assert not trainer.predict(x, global_batch=32).any()
    assert set(seen) == {True, False}


def test_sparse_inputs():
    """Sparse inputs train, evaluate and predict as dense ones do (test_fit_sparse,
    test_evaluate_sparse, test_predict_sparse).
    """
    dense_x = np.eye(20, 4, dtype=np.float32)
    sparse_x = tf.sparse.from_dense(dense_x)
    results = []
    for x in (dense_x, sparse_x):
        labeled = tf.data.Dataset.from_tensor_slices((x, FIT[1][:20])).batch(5)
        trainer = mean_squared()
        trainer.train(labeled, epochs=1)
        inputs = tf.data.Dataset.from_tensor_slices(x).batch(5)
        results.append((trainer.evaluate(labeled), trainer.predict(inputs)))

    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ragged_inputs(replicas, mirrored):
    """A ragged batch goes in and comes out ragged; each of its numbers is doubled
    (test_trainer_with_raggeds).
    """

    class Doubled(Trainer):
        def compute_loss(self, batch, training):
            found = self.model(batch.flat_values[:, None], training=training)
            loss = tf.cast(found[:, 0], tf.float32) ** 2
            return tf.math.segment_mean(loss, batch.value_rowids())

        def predict_batch(self, batch):
            found = self.model(batch.flat_values[:, None], training=False)
            return batch.with_flat_values(found[:, 0])

    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(2.0))
    trainer = Doubled(
        model=lambda: keras.Sequential([keras.Input([1]), layer]),
        optimizer=sgd(0.0),
        verbose=False,
        jit_compile=False,
        strategy=mirrored(replicas) if replicas > 1 else "default",
    )
    data = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    trainer.train(data, steps=1)

    assert trainer.predict(data.repeat(2)).to_list() == [[2.0], [4.0, 6.0]] * 2


class SumLoss(keras.layers.Layer):
    """Adds the sum of its inputs to the losses."""

    def call(self, x):
        """Returns its inputs."""
        self.add_loss(keras.ops.sum(x))
        return x


def test_internal_only_loss():
    """A model may learn from `add_loss` alone; its own loss is then 0 (test_internal_only_loss)."""
    layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input([2]), layer, SumLoss(), keras.layers.Dense(1)])
    trainer = Trainer(
        model=model,
        optimizer=sgd(0.125),
        loss_fn=lambda y, outputs: 0.0 * (outputs - y)[:, 0],
        verbose=False,
        jit_compile=False,
    )
    list(attempt(trainer, [(np.ones([4, 2], np.float32), np.zeros([4, 1], np.float32))]))

    # The sum over four examples of ones has the gradient 4.
    assert layer.kernel.numpy().tolist() == [[0.5, 0.5], [0.5, 0.5]]


class Weighted(Trainer):
    """A weighted sum of two outputs' squared errors, in one loss per example."""

    factors = (0.1, 0.2)

    def compute_loss(self, batch, training):
        """Keras's `loss_weights`, written out."""
        x, y = batch
        outputs = self.model({"x_one": x, "x_two": x}, training=training)
        errors = [tf.reduce_mean((each - y) ** 2, axis=1) for each in outputs.values()]
        return sum(factor * each for factor, each in zip(self.factors, errors, strict=True))


def test_loss_weights():
    """Two outputs weighted by 0.1 and 0.2: the mean losses of three epochs of two steps are Keras's
    (test_loss_weights; the weights stand in the loss, as there is no `compile`).
    """
    settings = {"optimizer": "sgd", "verbose": False, "jit_compile": False}
    trainer = Weighted(model=two_towers, **settings)
    batch = FIT[0][:20], FIT[1][:20]
    found = [report.loss for report in attempt(trainer, [batch] * 6)]

    np.testing.assert_allclose(
        np.reshape(found, [3, 2]).mean(axis=1), [4.778718, 4.694403, 4.611693], atol=1e-3
    )


def test_partial_loss():
    """A loss that reads one of two outputs leaves the other out (test_partial_loss_partial_label)."""
    one = Weighted(model=two_towers, optimizer="sgd", verbose=False)
    one.factors = (1.0, 0.0)
    both = Weighted(model=two_towers, optimizer="sgd", verbose=False)
    both.factors = (1.0, 1.0)
    losses = [each.evaluate(FIT, global_batch=20)["loss"] for each in (one, both)]

    assert losses == [16.0, 32.0]


def test_endless_evaluation_data_is_refused():
    """As in Keras, endless data is evaluated for a number of batches; without that number it is
    refused (test_validation_data_infinite_generator).
    """
    batches = tf.data.Dataset.from_tensor_slices(FIT).batch(20)
    trainer = mean_squared()
    with pytest.raises(ValueError, match="`data` must end"):
        trainer.evaluate(batches.repeat())

    assert trainer.evaluate(batches.repeat(), steps=2) == trainer.evaluate(batches.take(2))


def test_state_may_change_between_loops():
    """A hook changes the model's state between loops and the next loop sees it
    (test_callbacks_can_update_state_at_batch_boundary).
    """

    class Resetting(Trainer):
        def on_loop_end(self, step):
            self.model.layers[0].kernel.assign(tf.ones([4, 3]))

    trainer = Resetting(
        model=dense, optimizer="sgd", loss_fn="mse", verbose=False, jit_compile=False
    )
    trainer.steps_per_loop = 1
    trainer.train(FIT, steps=3, global_batch=20)

    np.testing.assert_array_equal(trainer.model.layers[0].kernel.numpy(), np.ones([4, 3]))
