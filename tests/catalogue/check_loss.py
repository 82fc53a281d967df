"""Compares losses with Keras's own training, and metrics with Keras's own results."""

import functools

import keras
import numpy as np
import tensorflow as tf
from catalogue.check_step import EPS, ROUNDINGS, RULES
from catalogue.labels import labelled, model_for
from catalogue.models import made_by
from helpers import attempt, copies
from hypothesis import assume

from trainer import Skips, Trainer

LEARNING_RATE = 0.25


def make_trainer(kind, loss, configuration, strategy, **arguments):
    """A trainer of the model for a kind of labels."""
    return Trainer(
        model=functools.partial(model_for, kind),
        optimizer=functools.partial(keras.optimizers.SGD, LEARNING_RATE),
        loss_fn=loss,
        strategy=strategy,
        num_microbatches=configuration.num_microbatches,
        jit_compile=configuration.jit_compile,
        precision=configuration.precision,
        loss_scale=RULES[configuration.precision],
        skips=Skips(on_overflow="retry", max_retries=8),
        verbose=False,
        seed=1,
        **arguments,
    )


def check_loss(case, configuration, strategy):
    """A step with `loss_fn` reports the loss of Keras's `train_on_batch`, and moves the weights to
    the same place.
    """
    kind = case.row.kind
    batch = labelled(kind, case.seed)
    assume(not near_a_kink(kind, batch, configuration.precision))
    trainer = make_trainer(kind, made_by(case), configuration, strategy)
    [report] = attempt(trainer, [batch])
    keras.config.set_dtype_policy(configuration.precision)
    try:
        model = model_for(kind)
    finally:
        keras.config.set_dtype_policy("float32")
    start = [v.numpy() for v in model.trainable_variables]
    model.compile(
        keras.optimizers.SGD(LEARNING_RATE), made_by(case), jit_compile=False, auto_scale_loss=False
    )
    expected = model.train_on_batch(*batch)
    bound = ROUNDINGS[configuration.precision] * EPS[configuration.precision]

    assert report.grads_finite
    np.testing.assert_allclose(report.loss, expected, rtol=bound, atol=bound)
    moves = [v.numpy() - s for v, s in zip(model.trainable_variables, start, strict=True)]
    largest = max(float(np.abs(move).max()) for move in moves)
    assert largest > 0
    for mine, theirs in zip(
        trainer.model.trainable_variables, model.trainable_variables, strict=True
    ):
        for copy in copies(mine):
            np.testing.assert_allclose(
                copy,
                theirs.numpy(),
                rtol=8 * EPS["float32"],
                atol=bound * largest,
                err_msg=theirs.path,
            )


def near_a_kink(kind, batch, precision):
    """Whether an error is so small that rounding decides its sign, and with it the slope of |error|."""
    inputs, labels = batch
    predictions = model_for(kind)(inputs).numpy()
    if precision == "float32" or predictions.shape != labels.shape:
        return False
    return bool((np.abs(predictions - labels) < 2 * EPS[precision] * np.abs(predictions)).any())


def check_metrics(rows, classes, kind, configuration, strategy):
    """Yields (name, ours, Keras's) for all metrics of one kind of labels, after an evaluation."""
    chosen = {name: row for name, row in rows.items() if row.kind == kind}

    def new():
        return {name: (row.make or classes[name])(**row.arguments) for name, row in chosen.items()}

    loss = "sparse_categorical_crossentropy" if kind == "sparse" else "mse"
    trainer = make_trainer(kind, loss, configuration, strategy, metrics=new)
    sizes = (12, 12, 7, 2)
    batches = [labelled(kind, seed, size) for seed, size in enumerate(sizes)]
    joined = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
    data = tf.data.Dataset.from_tensor_slices(tuple(joined)).batch(12)
    found = trainer.evaluate(data)
    model = model_for(kind)
    expected = new()
    for x, y in data:
        predictions = model(x, training=False)
        for metric in expected.values():
            metric.update_state(y, predictions)
    return {name: (found[name], np.asarray(metric.result())) for name, metric in expected.items()}
