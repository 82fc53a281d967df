"""A user's `tf.function` does not take the precision of one pass into another."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer

X = np.random.default_rng(0).normal(size=[8, 3]).astype(np.float32)


def trainer_of(precision, *, kept, normalizes=False):
    """A trainer whose loss calls the model in a `tf.function`: the same in all passes, or a new one."""

    def call(model, x):
        return model(x)

    forward = tf.function(call)

    class Own(Trainer):
        def build_model(self):
            inner = [keras.layers.BatchNormalization()] if normalizes else []
            return keras.Sequential([keras.Input([3]), *inner, keras.layers.Dense(2)])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def compute_loss(self, batch, training):
            function = forward if kept else tf.function(call)
            outputs = tf.cast(function(self.model, batch), tf.float32)
            return tf.reduce_mean(outputs**2, axis=1)

    return Own(precision=precision, seed=0, verbose=False)


@pytest.mark.parametrize("evaluates_first", [False, True])
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_refused(precision, evaluates_first):
    """Without the error the evaluation would be in half precision, or the training in float32."""
    trainer = trainer_of(precision, kept=True)
    half = precision.removeprefix("mixed_")

    def train():
        trainer.train(X, steps=1, global_batch=4)

    def evaluate():
        trainer.evaluate(X, global_batch=4)

    first, second = (evaluate, train) if evaluates_first else (train, evaluate)
    before, now = ("float32", half) if evaluates_first else (half, "float32")
    first()
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        second()

    assert str(error.value) == (
        "`compute_loss` and `predict_batch` must not call a tf.function of their own that was traced "
        f"in another precision; got 'call', first traced with layers in {before}, and called in a "
        f"pass in {now}. A tf.function keeps its first trace. Leave out @tf.function: steps and "
        "evaluations are graphs already."
    )


@pytest.mark.parametrize(
    ("precision", "kept"), [("float32", True), ("mixed_float16", False)], ids=["float32", "anew"]
)
def test_what_is_right_is_accepted(precision, kept):
    """In float32 there is one precision; a function that each pass makes anew has the pass's own."""
    trainer = trainer_of(precision, kept=kept)
    trainer.train(X, steps=2, global_batch=4)
    kernel, bias = trainer.model.get_weights()
    outputs = X.astype(np.float64) @ kernel + bias

    assert trainer.evaluate(X, global_batch=4)["loss"] == pytest.approx(np.mean(outputs**2), 1e-6)


def test_values_of_another_trace_are_refused():
    """The statistics of BatchNormalization are held back, as tensors of the step's trace."""
    trainer = trainer_of("float32", kept=True, normalizes=True)
    trainer.train(X, steps=1, global_batch=4)
    with pytest.raises(
        ValueError,
        match=r"^`compute_loss` and `predict_batch` must not call a tf.function .* kept a value",
    ):
        trainer.evaluate(X, global_batch=4)


@pytest.mark.parametrize("reads", ["teacher", "layer in float32", "variable"])
def test_what_has_one_precision_is_accepted(reads):
    """A function that reads no layer in half precision computes the same in every pass."""
    scale = tf.Variable(2.0, trainable=False)
    teacher = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, kernel_initializer="ones")])

    @tf.function
    def helper(model, x):
        if reads == "teacher":
            return teacher(x)
        return model.layers[0](x) if reads == "layer in float32" else scale * x

    class Own(Trainer):
        def build_model(self):
            self.scale, self.teacher = scale, teacher
            teacher.trainable = False
            first = keras.layers.Dense(2, dtype="float32")
            return keras.Sequential([keras.Input([3]), first, keras.layers.Dense(2)])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def compute_loss(self, batch, training):
            outputs = tf.cast(self.model(batch, training=training), tf.float32)
            extra = tf.reduce_mean(tf.cast(helper(self.model, batch), tf.float32) ** 2, axis=1)
            return tf.reduce_mean(outputs**2, axis=1) + extra

    trainer = Own(precision="mixed_bfloat16", seed=0, verbose=False)
    before = trainer.evaluate(X, global_batch=4)["loss"]
    trainer.train(X, steps=2, global_batch=4)

    assert trainer.evaluate(X, global_batch=4)["loss"] < before
