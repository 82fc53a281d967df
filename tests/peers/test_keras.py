"""The cases of Keras 3.15's tests of loss scaling, optimizers, distribution, training, remat and
float8.
"""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, attempt, copies, needs_multi_optimizer
from peer_models import Stepper
from plans import NO_SCALE, plan_of

import scaling
from scaling import DynamicLossScale, LossScaler
from trainer import Trainer, Updates
from trainer.step import TrainState, attempt_step

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


def few(names, *always):
    """Parameters of which only some are in the default run."""
    return [n if n in always else pytest.param(n, marks=pytest.mark.slow) for n in names]


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


def test_iterations_counter():
    """Two updates are two iterations (test_iterations_counter)."""
    stepper = Stepper(TABLE, optimizer=lambda: keras.optimizers.Adam(1.0))
    for _ in range(2):
        stepper.step(ONES)

    assert int(stepper.optimizer.iterations.numpy()) == 2


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


def test_moving_average_in_a_run():
    """Weights of 1 and a target of 0: the average after two updates is 0.891. Keras's `fit` leaves the
    average in the weights; here the weights stay, and evaluation uses the average
    (test_ema_with_model_fit).
    """
    layer = keras.layers.Dense(2, kernel_initializer="ones", use_bias=False)
    trainer = Trainer(
        model=keras.Sequential([keras.Input([1]), layer]),
        optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
        loss_fn="mse",
        verbose=False,
        jit_compile=False,
    )
    data = np.ones([1, 1], np.float32), np.zeros([1, 2], np.float32)
    trainer.train(data, steps=2, global_batch=1)
    predicted = trainer.predict(data, global_batch=1)

    np.testing.assert_allclose(predicted, [[0.891, 0.891]], atol=1e-5)
    np.testing.assert_allclose(layer.kernel.numpy(), [[0.81, 0.81]], atol=1e-5)


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


ACCUMULATING = [
    "adam",
    "sgd",
    "adamw",
    "adagrad",
    "rmsprop",
    "adadelta",
    "adamax",
    "lion",
    "nadam",
    "ftrl",
    "adafactor",
]


@pytest.mark.parametrize("name", few(ACCUMULATING, "sgd", "adafactor"))
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


def test_checkpoint(tmp_path):
    """Weights come back from a `tf.train.Checkpoint` of model and optimizer (test_tf_checkpointing)."""
    stepper = Stepper(TABLE, optimizer=keras.optimizers.Adam)
    stepper.step(ONES)
    before = stepper.weight
    checkpoint = tf.train.Checkpoint(stepper.model, optimizer=stepper.optimizer)
    path = checkpoint.save(tmp_path / "ckpt")
    stepper.step(ONES)

    assert (stepper.weight != before).all()

    checkpoint.restore(path)
    assert (stepper.weight == before).all()


def test_callable_learning_rate():
    """A learning rate may be a function (test_callable_learning_rate)."""
    stepper = Stepper(TABLE, optimizer=sgd(lambda: 0.1))
    stepper.step(ONES)

    np.testing.assert_allclose(stepper.weight, [[0.9, 1.9], [2.9, 3.9]], rtol=1e-6)
    assert int(stepper.optimizer.iterations.numpy()) == 1


class HalfReached(Linear):
    """A model with two layers, of which the loss reads the first."""

    def build_model(self):
        """The outputs of both layers."""
        inputs = keras.Input([1])
        outputs = [
            keras.layers.Dense(1, use_bias=False, name=n)(inputs) for n in ("read", "unread")
        ]
        return keras.Model(inputs, outputs)

    def compute_loss(self, batch, training):
        """Reads the first output, or none."""
        outputs = self.model(batch["x"], training=training)[0]
        return outputs[:, 0] * batch["slope"] if self.reads else batch["slope"]


def test_variables_without_a_gradient():
    """A loss that reaches no variable is an error. One that reaches some moves these, and leaves the
    others alone (test_empty_gradients).
    """
    trainer = HalfReached(verbose=False)
    trainer.reads = True
    batch = {"x": np.ones([2, 1], np.float32), "slope": np.ones(2, np.float32)}
    model = trainer.model
    before = [variable.numpy() for variable in model.variables]
    list(attempt(trainer, [batch]))
    after = [variable.numpy() for variable in model.variables]

    assert [(a - b).tolist() for a, b in zip(after, before, strict=True)] == [[[-1.0]], [[0.0]]]
    blind = HalfReached(verbose=False)
    blind.reads = False
    with pytest.raises(ValueError, match="gradient"):
        list(attempt(blind, [batch]))


class Module(tf.Module):
    """One plain TensorFlow variable."""

    def __init__(self):
        """Creates the variable."""
        super().__init__()
        self.weight = tf.Variable(TABLE)


class OfModule(Trainer):
    """Trains a module with Adam; the gradient is 1."""

    def build_model(self):
        """The module."""
        return Module()

    def build_optimizer(self):
        """Adam with a rate of 1, whose first update is 1."""
        return keras.optimizers.Adam(1.0)

    def compute_loss(self, batch, training):
        """The sum of the weights for each example."""
        return batch * tf.reduce_sum(self.model.weight)


def test_tf_variables():
    """Plain `tf.Variable`s are trained, too (test_mixed_with_tf_variables)."""
    trainer = OfModule(verbose=False)
    list(attempt(trainer, [np.ones(2, np.float32)]))

    np.testing.assert_allclose(trainer.model.weight, np.subtract(TABLE, 1.0), rtol=1e-5, atol=1e-5)
    assert int(trainer.optimizer.iterations.numpy()) == 1


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


def test_evaluate_on_replicas(mirrored):
    """A hundred examples in batches of 16 on two replicas, the last batch of 4, have one mean
    (test_epoch_iterator).
    """
    random = np.random.default_rng(0)
    x, y = random.random([100, 4]).astype(np.float32), np.zeros([100, 3], np.float32)
    trainer = mean_squared(strategy=mirrored(2))

    expected = np.mean(x.sum(axis=1) ** 2)
    assert trainer.evaluate((x, y), global_batch=16)["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.thorough
def test_replicas_draw_their_own_numbers(mirrored):
    """Dropout drops other units on each replica; in Keras all replicas drop the same ones
    (test_seed_generator).
    """
    stacked = keras.Sequential

    def build():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return stacked([keras.Input([64]), keras.layers.Dropout(0.5, seed=1), layer])

    trainer = Trainer(
        model=build,
        optimizer=sgd(),
        loss_fn=lambda y, outputs: outputs[:, 0] * y,
        strategy=mirrored(2),
        verbose=False,
        jit_compile=False,
    )
    list(attempt(trainer, [(np.ones([2, 64], np.float32), np.float32([1.0, 3.0]))]))
    moved = 1.0 - trainer.model.trainable_variables[0].numpy()[:, 0]

    # The mean gradient of a unit is 1 + 3 where both keep it, 1 or 3 where one does, or 0.
    assert set(np.round(moved, 4)) == {0.0, 1.0, 3.0, 4.0}


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


@pytest.mark.parametrize("kind", few(["arrays", "tensors", "dataset", "function"], "dataset"))
def test_fit_with_data(kind):
    """Arrays, tensors, a dataset and a function are the same data (test_fit_with_data_adapter). Other
    loaders are wrapped in `tf.data.Dataset.from_generator` by their owner.
    """
    dataset = tf.data.Dataset.from_tensor_slices(FIT).batch(20)
    data = {
        "arrays": FIT,
        "tensors": tuple(map(tf.constant, FIT)),
        "dataset": dataset,
        "function": lambda context: dataset,  # noqa: ARG005
    }[kind]
    trainer = mean_squared()
    size = 20 if kind in {"arrays", "tensors"} else None
    trainer.train(data, steps=2, global_batch=size)
    expected = 4.0 * (1 - 0.01 * 2 * 4 / 3) ** 2

    np.testing.assert_allclose(
        trainer.model.layers[0].kernel.numpy().sum(axis=0), expected, rtol=1e-5
    )


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


def test_structures():
    """Dicts go in and come out (test_predict_flow_struct, test_nested_inputs,
    test_nested_input_predict).
    """
    x = {"x_one": FIT[0], "x_two": FIT[0]}
    found = mean_squared(model=two_towers, metrics=None).predict(x, global_batch=16)

    assert found.keys() == {"y_one", "y_two"}
    for value in found.values():
        np.testing.assert_array_equal(value, np.full([100, 3], 4.0))


@pytest.mark.parametrize("size", [80, 100])
def test_evaluate_with_different_batch_sizes(size):
    """The mean does not depend on the batch size, though the last batch is smaller
    (test_evaluate_with_different_batch_size_same_loss).
    """
    random = np.random.default_rng(0)
    x, y = random.random([100, 4]).astype(np.float32), np.ones([100, 3], np.float32)
    expected = np.mean((x.sum(axis=1) - 1) ** 2)

    assert mean_squared().evaluate((x, y), global_batch=size)["loss"] == pytest.approx(expected)


def test_fit_with_different_batch_sizes(tmp_path):
    """The logged loss of 80 + 20 examples is that of 100, if no weight moves
    (test_fit_with_different_batch_size_same_loss).
    """
    random = np.random.default_rng(0)
    x, y = random.random([100, 4]).astype(np.float32), np.ones([100, 3], np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    logged = []
    for size in (80, 100):
        trainer = mean_squared(optimizer=sgd(0.0), model_dir=tmp_path / str(size), metrics=None)
        trainer.train(dataset.batch(size), epochs=1)
        lines = (tmp_path / str(size) / "metrics.jsonl").read_text().splitlines()
        logged += [each["loss"] for each in map(json.loads, lines) if each["split"] == "train"]

    assert logged == pytest.approx([np.mean((x.sum(axis=1) - 1) ** 2)] * 2, rel=1e-5)


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


@pytest.mark.parametrize("name", ["train_step", "test_step", "compute_loss"])
def test_own_methods_are_refused(name):
    """With `loss_fn`, a model's own `train_step`, `test_step` or `compute_loss` would be passed over
    (test_fit_with_custom_train_step,
    test_evaluate_with_custom_test_step, test_metric_update_in_compute_loss,
    test_fwd_pass_loss_presence_in_compute_loss, test_evaluate_with_custom_compute_loss,
    test_compute_loss_no_training_backwards_compatibility).
    """

    def method(*args, **kwargs):
        return getattr(keras.Model, name)(*args, **kwargs)

    own = type("Own", (keras.Model,), {name: method})
    inputs = keras.Input([4])
    trainer = mean_squared(model=own(inputs, keras.layers.Dense(3)(inputs)))
    if name != "test_step":
        with pytest.raises(ValueError, match=f"`model`.* {name} "):
            trainer.train(FIT, steps=1, global_batch=20)
    if name != "train_step":
        with pytest.raises(ValueError, match=f"`model`.* {name} "):
            trainer.evaluate(FIT, global_batch=20)


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


def test_dropout_while_predicting():
    """Dropout inside of a layer's call draws other masks in every batch and call of `predict`; an
    ordinary one does nothing, even where the model was built with training=True
    (test_rng_updated_during_predict, test_predict_dropout).
    """

    class Always(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x):
            return keras.random.dropout(x, rate=0.5, seed=self.seeds)

    inputs, x = keras.Input([20]), np.ones([4, 20], np.float32)
    trainer = mean_squared(model=keras.Model(inputs, Always()(inputs)), metrics=None)
    first, second = (trainer.predict(x, global_batch=2) for _ in range(2))
    assert len({row.tobytes() for draw in (first, second) for row in draw}) == 8

    ordinary = keras.Model(inputs, keras.layers.Dropout(0.5)(inputs, training=True))
    np.testing.assert_array_equal(ordinary.predict(x, verbose=0), x)
    trainer = mean_squared(model=ordinary, metrics=None)
    np.testing.assert_array_equal(trainer.predict(x, global_batch=2), x)


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


def test_stop():
    """A run that is asked to stop ends after the step that is running (test_stop_loop)."""

    class Stopping(Trainer):
        def on_loop_end(self, step):
            if step == 4:
                self.stop()

    settings = {"verbose": False, "jit_compile": False, "steps_per_loop": 2}
    trainer = Stopping(model=dense, optimizer="sgd", loss_fn="mse", **settings)

    assert trainer.train(FIT, steps=50, global_batch=20).step == 4


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


def test_one_trace():
    """A hundred steps trace the loss at most three times, one of them for the check before the first
    step, and a hundred more not at all (test_retracing).
    """
    traces = []

    class Counting(Trainer):
        def compute_loss(self, batch, training):
            traces.append(training)
            return super().compute_loss(batch, training)

    trainer = Counting(
        model=dense,
        optimizer="adam",
        loss_fn="mse",
        verbose=False,
        steps_per_loop=20,
        jit_compile=False,
    )
    trainer.train(FIT, steps=100, global_batch=1)
    before = len(traces)
    trainer.train(FIT, steps=200, global_batch=1)

    assert len(traces) == before <= 3


# multi_optimizer_test.py


def mapped(default, first, second, **arguments):
    """An optimizer for each of two kernels or weights, and one for the rest."""
    kinds = {".*dense_1/kernel|.*given_0": first, ".*dense_2/kernel|.*given_1": second}
    chosen = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(default), {key: keras.optimizers.SGD(v) for key, v in kinds.items()}
    )
    return keras.optimizers.MultiOptimizer(chosen, **arguments)


@needs_multi_optimizer
def test_several_optimizers(strategy):
    """Rates of 0.1 and 1, and 0 for the rest, each counted once, also on replicas and under a loss scale
    (test_stateful_apply).
    """
    stepper = Stepper(
        *([value, value] for value in (2.0, 3.0, 4.0)),
        optimizer=lambda: mapped(0.0, 0.1, 1.0),
        strategy=strategy,
        rule=scaling.FixedLossScale(1024.0),
    )
    stepper.step(*([1.0, 1.0] for _ in range(3)))

    np.testing.assert_allclose(stepper.weights, [[1.9] * 2, [2.0] * 2, [4.0] * 2], rtol=1e-6)
    optimizers = [stepper.optimizer, *stepper.optimizer.optimizers]
    assert [int(each.iterations.numpy()) for each in optimizers] == [1, 1, 1, 1]


@needs_multi_optimizer
def test_several_optimizers_in_a_run():
    """Weights of 1 and a target of 0 at rates of 0.001 and 0.01 (test_multi_optimizer_with_model_fit)."""
    hidden = [
        keras.layers.Dense(units, use_bias=False, kernel_initializer="ones", name=name)
        for name, units in (("dense_1", 2), ("dense_2", 1))
    ]
    trainer = mean_squared(
        model=keras.Sequential([keras.Input([1]), *hidden]),
        optimizer=mapped(0.1, 1e-3, 1e-2),
        metrics=None,
    )
    trainer.train(
        (np.ones([1, 1], np.float32), np.zeros([1, 1], np.float32)), steps=1, global_batch=1
    )

    np.testing.assert_allclose(hidden[0].kernel, [[0.996, 0.996]], rtol=1e-6)
    np.testing.assert_allclose(hidden[1].kernel, [[0.96], [0.96]], rtol=1e-6)


@needs_multi_optimizer
def test_several_optimizers_that_scale_are_refused():
    """A loss-scale factor of the whole, and a choice by a function, are refused by name
    (test_loss_scaling, test_gradient_unscaling, test_custom_callable_function).
    """
    with pytest.raises(ValueError, match="loss_scale_factor"):
        Stepper([2.0], optimizer=mapped(0.1, 0.1, 0.1, loss_scale_factor=5.0))
    with pytest.raises(ValueError, match="OptimizerMap"):
        Stepper(
            [2.0],
            optimizer=keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD()),  # noqa: ARG005
        )


# optimizer_sparse_test.py

ROWS = np.array([0, 2, 4, 2])
SPARSE = {
    "adadelta": {},
    "adafactor": {"clip_threshold": 0.5},
    "adagrad": {},
    "adam": {},
    "adam amsgrad": {"amsgrad": True},
    "adamax": {},
    "adamw": {},
    "adamw amsgrad": {"amsgrad": True},
    "ftrl": {},
    "lion": {},
    "nadam": {},
    "rmsprop": {},
    "rmsprop momentum": {"momentum": 0.05},
    "rmsprop centered": {"momentum": 0.05, "centered": True},
    "sgd": {},
    "sgd momentum": {"momentum": 0.05},
    "sgd nesterov": {"momentum": 0.05, "nesterov": True},
}


class Rows(keras.Model):
    """Reads rows of a table of ones, sparsely or through a dense product."""

    def __init__(self, dense):
        """Creates the table."""
        super().__init__()
        self.dense = dense
        self.table = self.add_weight(shape=[5, 3], initializer="ones", name="table")
        self.built = True

    def call(self, rows):
        """Shape (examples, 3)."""
        if self.dense:
            return tf.one_hot(rows, 5) @ self.table
        return tf.gather(self.table, rows)


@pytest.mark.parametrize("name", few(SPARSE, "sgd momentum", "adagrad"))
def test_sparse_correctness(name):
    """Five updates with a sparse gradient are those with the same dense one (test_sparse_correctness,
    test_sparse_gradients).
    """
    found = []
    for is_dense in (True, False):
        model = Rows(is_dense)
        config = {"class_name": name.split()[0], "config": SPARSE[name]}
        run = TrainState(NO_SCALE)
        plan = plan_of(
            model,
            lambda factors, training, model=model: tf.reduce_sum(model(ROWS), axis=1) * factors,  # noqa: ARG005
            optimizer=keras.optimizers.get(config),
        )
        for step in range(5):
            attempt_step(tf.fill([4], 10.0 - step), plan, run)
        found.append(model.table.numpy())

    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_sparse_gradients_are_scaled():
    """A sparse gradient under a loss scale keeps its values (loss_scale_optimizer_sgd)."""
    gradient = tf.IndexedSlices(tf.fill([3, 10], 0.5), tf.constant([0, 2, 4]), tf.constant([5, 10]))
    scaler = LossScaler(DynamicLossScale())
    _, token = scaler.scale(0.0)
    scaled = tf.IndexedSlices(
        gradient.values * scaler.loss_scale, gradient.indices, gradient.dense_shape
    )
    found = scaler.unscale(scaled, token)

    assert isinstance(found, tf.IndexedSlices)
    assert (found.values.numpy() == 0.5).all()
