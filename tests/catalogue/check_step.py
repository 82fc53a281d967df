"""Compares a step with the plain one."""

import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from catalogue import models
from catalogue.configurations import Configuration
from catalogue.plain import LEARNING_RATE, plain_step
from catalogue.rows import WHOLE
from helpers import copies
from hypothesis import Phase, given, settings

import scaling
from trainer import Skips
from trainer.step import TrainState, attempt_step, plan_step
from trainer.step.randomness import key_source, make_keys, seed_states
from trainer.step.xla import layers_without_xla

SEED = 7
# The distance from 1 to the next number.
EPS = {"float32": 2.0**-23, "mixed_float16": 2.0**-10, "mixed_bfloat16": 2.0**-7}
ROUNDINGS = {"float32": 64, "mixed_float16": 16, "mixed_bfloat16": 16}
RULES = {
    "float32": scaling.NoLossScale(),
    "mixed_bfloat16": scaling.NoLossScale(),
    # High enough to overflow in the first attempts.
    "mixed_float16": scaling.DynamicLossScale(2.0**22, backoff_factor=2.0**-4),
}


def build_in(case, precision):
    """The model under a dtype policy."""
    keras.config.set_dtype_policy(precision)
    try:
        return models.build(case)
    finally:
        keras.config.set_dtype_policy("float32")


class Built:
    """A model under a strategy, with its step."""

    def __init__(self, case, configuration, strategy):
        """Builds and plans."""
        self.case, self.strategy = case, strategy
        rule = RULES[configuration.precision]
        with strategy.scope():
            self.model = build_in(case, configuration.precision)
            self.optimizer = keras.optimizers.SGD(LEARNING_RATE)
            self.run = TrainState(rule, seed=SEED)
            self.plan = plan_step(
                strategy=strategy,
                model=self.model,
                optimizer=self.optimizer,
                compute_loss=lambda batch, training: models.losses(self.model, batch, training),
                rule=rule,
                num_microbatches=configuration.num_microbatches,
                jit_compile=configuration.jit_compile,
                skips=Skips(on_overflow="retry", max_retries=8),
            )
        self.step = tf.function(self.attempt, autograph=False)

    def attempt(self, batch):
        """One step. The batch size is known or not."""
        if not self.case.known_size:
            batch = tf.nest.map_structure(
                lambda x: tf.compat.v1.placeholder_with_default(x, [None, *x.shape[1:]]), batch
            )
        return attempt_step(batch, self.plan, self.run)

    @property
    def variables(self):
        """All variables of the model, the optimizer and the run's random state."""
        return [*self.model.variables, *self.optimizer.variables]

    def bits(self):
        """All copies of all variables."""
        return [[copy.copy() for copy in copies(variable)] for variable in self.variables]


def check_step(case, configuration, strategy):
    """As `check_step_in`, with a folder for checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        check_step_in(folder, case, configuration, strategy)


def check_step_in(folder, case, configuration, strategy):
    """A skipped step moves nothing; an applied one equals the plain one, and does so again after a
    restore.
    """
    ours = Built(case, configuration, strategy)
    plain = build_in(case, configuration.precision)
    weights = models.weights_of(plain, case)
    plain.set_weights(weights)
    ours.model.set_weights(weights)
    batch = models.batch_of(case)

    before = ours.bits()
    report = ours.step(with_inf(batch, case.row))
    assert not report.grads_finite
    assert_same(before, ours.bits(), "after a skipped step")

    random = tf.stack([tf.constant(SEED, tf.int64), ours.run.step])
    generators = len(seed_states(ours.model))
    keys = [
        make_keys(
            key_source(random, 0, 1),
            replica,
            configuration.replicas,
            configuration.num_microbatches,
            generators,
        )
        for replica in range(configuration.replicas)
    ]
    checkpoint = tf.train.Checkpoint(model=ours.model, optimizer=ours.optimizer, run=ours.run)
    saved = checkpoint.write(f"{folder}/{ours.model.name}")
    report = ours.step(batch)
    assert report.grads_finite
    gradients = plain_step(plain, batch, case, configuration, keys, float(report.loss_scale))
    precision = case.row.rounds_to or configuration.precision
    try:
        assert_near(ours, plain, gradients, precision)
    except AssertionError:
        if precision == "float32" or case.row.compared_with != WHOLE:
            raise
        exact = build_in(case, "float32")
        exact.set_weights(weights)
        plain_step(exact, batch, case, configuration, keys, 1.0)
        assert_near(ours, plain, gradients, precision, noise=2 * distances(plain, exact))

    after = ours.bits()
    checkpoint.restore(saved)
    ours.step(batch)
    assert_same(after, ours.bits(), "after a restore")


def one_case(entry):
    """One model with a class."""
    found = []

    @settings(max_examples=1, database=None, phases=[Phase.generate])
    @given(models.cases(entry.cls, entry.row))
    def take(case):
        found.append(case)

    take()
    return found[0]


def check_fails_in_keras(entry):
    """Keras by itself raises in the precisions that the row names."""
    case = one_case(entry)
    for precision in entry.row.fails_in:
        configuration = Configuration(1, 1, False, precision)
        with pytest.raises(Exception) as error:  # noqa: PT011  # TensorFlow's, of many types
            plain_step(
                build_in(case, precision), models.batch_of(case), case, configuration, None, 1.0
            )
        assert isinstance(error.value, (ValueError, tf.errors.OpError, TypeError))


def check_refused_in(entry):
    """Halfstep refuses the class in the precisions that the row names."""
    case = one_case(entry)
    for precision in entry.row.refused_in:
        built = Built(case, Configuration(1, 1, False, precision), tf.distribute.get_strategy())
        with pytest.raises(ValueError, match="`model` must assign"):
            built.step(models.batch_of(case))


def check_no_xla(entry):
    """Keras says so, and `jit_compile="auto"` asks it."""
    assert layers_without_xla(build_in(one_case(entry), "float32"))


def check_xla_lacks(entry):
    """A model of the class by itself cannot be compiled, for want of the operation."""
    case = one_case(entry)
    model = build_in(case, "float32")
    inputs, _ = models.batch_of(case)
    with pytest.raises(tf.errors.InvalidArgumentError, match=entry.row.xla_lacks):
        tf.function(lambda: model(inputs, training=True), jit_compile=True, autograph=False)()


def with_inf(batch, row):
    """The batch with an inf in the last example's targets and floating-point inputs.

    Pixels stay as they are: Keras looks their values up in tables.
    """
    inputs, targets = batch
    last = np.zeros([models.EXAMPLES], np.float32)
    last[-1] = np.inf

    def spoiled(tensor):
        if not tensor.dtype.is_floating:
            return tensor
        return tensor + last.reshape([-1, *[1] * (len(tensor.shape) - 1)])

    kinds = [each.kind for each in row.inputs]
    inputs = [
        each if kind == "unit" else spoiled(each) for each, kind in zip(inputs, kinds, strict=True)
    ]
    return inputs, spoiled(targets)


def assert_same(before, after, when):
    """Raises unless all copies have the same bits."""
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        for replica, (one, other) in enumerate(zip(old, new, strict=True)):
            assert one.tobytes() == other.tobytes(), f"variable {place}, replica {replica} {when}"


def distances(plain, exact):
    """How far each variable is from where a step in float32 puts it: what rounding costs.

    Sums of many terms that cancel lose more than a bound from their result says.
    """
    pairs = zip(plain.variables, exact.variables, strict=True)
    return np.array([float(np.abs(a.numpy() - b.numpy()).max(initial=0)) for a, b in pairs])


def assert_near(ours, plain, gradients, precision, noise=None):
    """Raises unless each variable is where the plain step put it, on all replicas.

    Args:
        noise: what is added to each variable's bound.
    """
    eps = EPS[precision] * ROUNDINGS[precision]
    sizes = [float(np.abs(each).max(initial=0.0)) for each in gradients]
    largest = max(sizes)
    assert largest > 0
    of_gradient = {id(v): size for v, size in zip(plain.trainable_variables, sizes, strict=True)}
    noise = np.zeros(len(plain.variables)) if noise is None else noise
    for mine, theirs, more in zip(ours.model.variables, plain.variables, noise, strict=True):
        if "seed_generator_state" in theirs.path:
            continue
        expected = theirs.numpy()
        bound = more + 4 * EPS["float32"] * float(np.abs(expected).max(initial=0.0))
        if id(theirs) in of_gradient:
            bound += LEARNING_RATE * (eps * of_gradient[id(theirs)] + 4 * EPS[precision] * largest)
        elif expected.dtype.kind == "f":
            bound += eps * float(np.abs(expected).max(initial=0.0))
        for replica, copy in enumerate(copies(mine)):
            np.testing.assert_allclose(
                copy, expected, rtol=0, atol=bound, err_msg=f"{theirs.path} on replica {replica}"
            )
