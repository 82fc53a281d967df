"""The cases of PyTorch's GradScaler tests (`test/test_cuda.py` and `test/test_torch.py`)."""

import pickle
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaling
from scaling import DynamicLossScale, LossScaler, NoLossScale

QUARTER = DynamicLossScale(initial_scale=4.0)  # unscaling divides by 4
SKIPPED_BATCH = 2  # of four


def two_layers(seed, dtype="float32"):
    """Two linear layers, as PyTorch's cases have them."""
    start = keras.initializers.GlorotUniform(seed)
    layers = [keras.layers.Dense(8, kernel_initializer=start, dtype=dtype) for _ in range(2)]
    return keras.Sequential([keras.Input([8]), *layers])


def four_batches():
    """Four batches of inputs and targets."""
    random = np.random.default_rng(0)
    return [tuple(random.standard_normal([2, 8, 8]).astype(np.float32)) for _ in range(4)]


def mean_squared(outputs, target):
    """The loss of PyTorch's cases, in float32."""
    return tf.reduce_mean((tf.cast(outputs, tf.float32) - target) ** 2)


class Step(NamedTuple):
    """One step of a case."""

    index: int
    batch: Any
    poisoned: bool


class Run:
    """A model, an optimizer and a scaler. The control run has no scaler.

    Args:
        scaler: of the run; None for the control run.
        optimizer: of the model.
        dtype: the layers' policy.
        seed: of the initial weights.
    """

    def __init__(self, scaler, optimizer, dtype="float32", seed=1):
        """Builds the model."""
        self.scaler, self.optimizer = scaler, optimizer
        self.model = two_layers(seed, dtype)
        self.variables = self.model.trainable_variables
        optimizer.build(self.variables)

    def loss(self, batch):
        """The model's loss."""
        return mean_squared(self.model(batch[0]), batch[1])

    def gradients(self, loss_of):
        """Unscaled gradients of a loss."""
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled, token = self.scaler.scale(loss) if self.scaler else (loss, None)
        found = tape.gradient(scaled, self.variables)
        return self.scaler.unscale(found, token) if self.scaler else found

    def apply(self, gradients, *, poisoned):
        """Applies gradients, or skips a poisoned step. In the scaled run the scaler finds it."""
        if self.scaler is None:
            if not poisoned:
                self.optimizer.apply(gradients, self.variables)
            return
        if poisoned:  # the second layer's kernel
            gradients[2] = tf.fill(gradients[2].shape, np.inf)
        if self.scaler.update(scaling.all_finite(gradients)):
            self.optimizer.apply(gradients, self.variables)


def compare(
    body, *, unskipped=3, skipped=1, tolerance=1e-7, dtype="float32", make=None, pickled=False
):
    """Runs `body(run, step)` on every batch, with and without scaling, and with
    scaling disabled; the weights, slots and the final scale must be those of PyTorch's cases.
    """
    make = make or (lambda: keras.optimizers.SGD(1.0))
    for enabled in (True, False):
        rule = DynamicLossScale(initial_scale=128.0, growth_interval=1)
        scaler = LossScaler(rule if enabled else NoLossScale())
        control, scaled = Run(None, make()), Run(scaler, make(), dtype)
        for run in (control, scaled):
            for index, batch in enumerate(four_batches()):
                poisoned = bool(enabled and skipped and index == SKIPPED_BATCH)
                body(run, Step(index, batch, poisoned))
                if pickled and run.scaler:
                    state = pickle.loads(pickle.dumps(run.scaler.state_dict()))  # noqa: S301
                    run.scaler = LossScaler(run.scaler.rule)
                    run.scaler.load_state_dict(state)

        expected = 128.0 * 2.0 ** (unskipped - skipped) if enabled else 1.0
        assert float(scaled.scaler.loss_scale) == expected
        for one, other in zip(
            control.variables + control.optimizer.variables,
            scaled.variables + scaled.optimizer.variables,
            strict=True,
        ):
            np.testing.assert_allclose(
                other.numpy(), one.numpy(), rtol=1e-5, atol=tolerance, err_msg=one.path
            )


def slices(values, dtype, rows=(2, 0, 2)):
    """A sparse gradient in which row 2 occurs twice."""
    return tf.IndexedSlices(
        tf.constant(np.reshape(values, [3, 1]), dtype), tf.constant(rows), tf.constant([3, 1])
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unscale_sparse(dtype):
    """A sparse gradient stays sparse and is divided like a dense one; an inf or NaN in it is
    found.
    """
    scaler = LossScaler(QUARTER)
    _, token = scaler.scale(0.0)
    found = scaler.unscale(slices([16.0, 32.0, 64.0], dtype), token)

    assert isinstance(found, tf.IndexedSlices)
    assert tf.convert_to_tensor(found).numpy().tolist() == [[8.0], [0.0], [20.0]]
    for value in (np.inf, np.nan):
        _, token = scaler.scale(0.0)
        found = scaler.unscale(slices([16.0, 32.0, value], dtype), token)
        assert not scaling.all_finite(found)


def test_unscale_sparse_repeated_rows():
    """PyTorch reports an overflow if repeated rows add up to more than float16 holds. Here they are
    added in float32 after unscaling, where the sum fits: nothing needs to be skipped.
    """
    found = scaling.unscale_gradients(
        slices([64000.0, 32.0, 64000.0], "float16"), QUARTER.initial_state()
    )

    assert tf.convert_to_tensor(found).numpy().tolist() == [[8.0], [0.0], [32000.0]]
    assert bool(scaling.all_finite(found))


def plain(run, step):
    """Scale, unscale, judge, apply."""
    run.apply(run.gradients(lambda: run.loss(step.batch)), poisoned=step.poisoned)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1.0),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaling_changes_nothing(name):
    """A run with scaling ends with the weights and slots of one without, and its scale is that of
    three finite steps and one skipped one.
    """
    compare(plain, make=OPTIMIZERS[name])


@pytest.mark.parametrize("pickled", [False, True])
def test_autocast(pickled):
    """The same in float16, to 1e-3, also if the scaler's state is pickled between steps."""
    compare(plain, dtype="mixed_float16", tolerance=5e-3, pickled=pickled)


def clipped(gradients):
    """Gradients clipped to a global norm of 0.2."""
    return tf.clip_by_global_norm(gradients, 0.2)[0]


def test_clipping_separate_unscale():
    """Unscaled gradients are clipped by the same bound as without scaling."""

    def body(run, step):
        found = run.gradients(lambda: run.loss(step.batch))
        found = [tf.convert_to_tensor(each) for each in clipped(found)]
        run.apply(found, poisoned=step.poisoned)

    compare(body)


def test_clipping_scaled_gradients():
    """Scaled gradients may also be clipped, by a bound that is multiplied by the scale."""

    def body(run, step):
        with tf.GradientTape() as tape:
            loss = run.loss(step.batch)
            scaled, token = run.scaler.scale(loss) if run.scaler else (loss, None)
        found = tape.gradient(scaled, run.variables)
        bound = 0.2 * (token.state.loss_scale if run.scaler else 1.0)
        found, _ = tf.clip_by_global_norm(found, bound)
        run.apply(run.scaler.unscale(found, token) if run.scaler else found, poisoned=step.poisoned)

    compare(body, tolerance=1e-5)


def test_penalty():
    """A gradient penalty sees unscaled gradients: the inner gradients are divided by the scale while
    the outer tape records.
    """

    def body(run, step):
        def loss_of():
            with tf.GradientTape() as inner:
                loss = run.loss(step.batch)
                scaled = loss if run.scaler is None else scaling.scale_loss(loss, run.scaler.state)
            found = inner.gradient(scaled, run.variables)
            if run.scaler:
                found = scaling.unscale_gradients(found, run.scaler.state)
            return loss + tf.linalg.global_norm(found)

        run.apply(run.gradients(loss_of), poisoned=step.poisoned)

    compare(body)


def test_accumulation():
    """Gradients of two batches, each half of the loss, are one step: the scale moves once per step."""
    sums = {}

    def body(run, step):
        with tf.GradientTape() as tape:
            loss = run.loss(step.batch) / 2
            scaled = scaling.scale_loss(loss, run.scaler.state) if run.scaler else loss
        found = tape.gradient(scaled, run.variables)
        if step.index % 2 == 0:
            sums[run] = found
            return
        total = [one + other for one, other in zip(sums[run], found, strict=True)]
        if run.scaler:
            _, token = run.scaler.scale(0.0)
            total = run.scaler.unscale(total, token)
        run.apply(total, poisoned=False)

    compare(body, unskipped=2, skipped=0)


@pytest.mark.parametrize("enabled", [True, False])
def test_two_models_two_losses_two_optimizers(enabled):
    """Two losses that both read both models, at one scale: three finite steps and a skipped one.
    PyTorch skips only the optimizer whose gradients overflowed. Here the step has one verdict, so
    both optimizers skip.
    """
    rule = DynamicLossScale(initial_scale=128.0, growth_interval=1) if enabled else NoLossScale()
    scaler = LossScaler(rule)
    controls = [Run(None, keras.optimizers.SGD(1.0), seed=seed) for seed in (1, 2)]
    scaled = [Run(None, keras.optimizers.SGD(1.0), seed=seed) for seed in (1, 2)]
    for runs in (controls, scaled):
        for index, (x, y) in enumerate(four_batches()):
            with tf.GradientTape() as tape:
                first, second = (run.model(x) for run in runs)
                losses = [
                    mean_squared(0.3 * first + 0.7 * second, y),
                    mean_squared(0.6 * first - 0.4 * second, y),
                ]
                total = tf.add_n(losses)
                if runs is scaled:
                    total, token = scaler.scale(total)
            found = tape.gradient(total, [run.variables for run in runs])
            finite = not (enabled and index == SKIPPED_BATCH)
            if runs is scaled:
                found = scaler.unscale(found, token)
                if not finite:
                    found[1][2] *= np.inf
                finite = scaler.update(scaling.all_finite(found))
            if finite:
                for run, gradients in zip(runs, found, strict=True):
                    run.optimizer.apply(gradients, run.variables)

    assert float(scaler.loss_scale) == (512.0 if enabled else 1.0)
    for one, other in zip(controls, scaled, strict=True):
        for expected, value in zip(one.variables, other.variables, strict=True):
            np.testing.assert_allclose(value.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


def test_gradients_that_break_after_the_verdict():
    """Gradients that turn non-finite after they were judged reach the weights: the verdict is about
    what it was given.
    """
    run = Run(LossScaler(DynamicLossScale()), keras.optimizers.Adam())
    [batch, *_] = four_batches()
    found = run.gradients(lambda: run.loss(batch))
    assert run.scaler.update(scaling.all_finite(found))
    run.optimizer.apply([each * np.nan for each in found], run.variables)

    assert all(np.isnan(variable.numpy()).all() for variable in run.variables)
