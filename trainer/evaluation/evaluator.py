"""Evaluation and prediction: a forward pass over each replica's share, and what is left of it."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import strategies
from trainer.base.autograph import call_user, without_autograph
from trainer.base.keras_private import computing_in_float32
from trainer.step.accumulate import real_rows
from trainer.step.checks import check_weights
from trainer.step.held_back import held_back_variables
from trainer.step.losses import losses_and_aux, weighted_sum
from trainer.step.objective import Objective
from trainer.step.randomness import seed_states
from trainer.step.replica import my_share
from trainer.task import Task

PRECISIONS = ("float32", "train")


class Evaluator:
    """Runs a task's model forward, in float32 or as in training; keeps what it has traced.

    Args:
        task: the model, the loss and the metrics.
        strategy: where the replicas run.
        objectives: what is trained; their losses are added up.
        eval_step: evaluates one global batch; see `Trainer.eval_step`.
        stop: shape (), bool: while it is true, what may be stopped is.
        jit_compile: whether XLA compiles what computes as in training.
    """

    def __init__(
        self,
        task: Task,
        strategy: tf.distribute.Strategy,
        objectives: Sequence[Objective],
        eval_step: Callable[[Any], tuple[tf.Tensor, tf.Tensor]],
        stop: tf.Variable,
        *,
        jit_compile: bool,
    ) -> None:
        """Traces nothing yet."""
        self._task = task
        self._strategy = strategy
        self._stop = stop
        self._objectives = objectives
        self._is_keras = isinstance(task.model, keras.Model)

        def forward(method: Callable[..., Any], precision: str) -> Callable[..., Any]:
            as_in_training = precision == "train" or not self._is_keras
            return (
                tf.function(method, jit_compile=True) if jit_compile and as_in_training else method
            )

        self._compute_loss = {way: forward(task.compute_loss, way) for way in PRECISIONS}
        self._precision = PRECISIONS[0]  # of the evaluation that is running
        self._evaluate = {
            way: tf.function(
                functools.partial(evaluate_all, eval_step, stop, strategy), autograph=False
            )
            for way in PRECISIONS
        }
        self._predict = {
            # By place: what stands by name, TensorFlow would take for an argument of the graph.
            way: tf.function(
                functools.partial(
                    predict_batch, strategy, task.model, forward(task.predict_batch, way)
                ),
                autograph=False,
            )
            for way in PRECISIONS
        }

    def evaluate(
        self, dataset: tf.data.Dataset, precision: str, *, stoppable: bool
    ) -> dict[str, float] | None:
        """Returns the weighted mean loss and the task's metrics over a data set.

        None if it may be stopped, and was.
        """
        for metric in self._task.metrics.values():
            metric.reset_state()
        with self._computing_in(precision):
            self._precision = precision
            iterator = iter(dataset)
            total, weight, left = self._evaluate[precision](iterator, tf.constant(stoppable))
        stopped = stoppable and strategies.any_worker(bool(self._stop), self._strategy)
        if strategies.any_worker(bool(left), self._strategy):
            if stopped:
                return None
            raise unequal(bool(left))
        metrics = {name: float(metric.result()) for name, metric in self._task.metrics.items()}
        return {"loss": float(tf.math.divide_no_nan(total, weight)), **metrics}

    @without_autograph
    def evaluate_batch(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a global batch's weighted sum of losses, and of weights; see `eval_step`."""
        weights = check_weights(call_user(self._task.example_weights, batch), batch)
        compute_loss = self._compute_loss[self._precision]
        arguments = (batch, weights, self._task, self._objectives, compute_loss)
        sums = self._strategy.run(replica_evaluate, args=arguments)
        total = self._strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        return total, tf.reduce_sum(weights)

    def predict(self, dataset: tf.data.Dataset, precision: str) -> Any:
        """Returns the model's outputs over a data set, as NumPy arrays."""
        with self._computing_in(precision):
            outputs = [self._predict[precision](batch) for batch in dataset]
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    def _computing_in(self, precision: str) -> contextlib.AbstractContextManager[None]:
        """Checks `precision`, and holds a Keras model's layers in float32 while it is traced."""
        if precision not in PRECISIONS:
            raise ValueError(
                f'`precision` must be "float32" or "train" here; got {precision!r}. Evaluation '
                "computes in float32, or in whatever the model is trained in. Use one of the two."
            )
        if precision == "float32" and self._is_keras:
            return computing_in_float32(self._task.model)
        return contextlib.nullcontext()


def evaluate_all(
    eval_step: Callable[[Any], tuple[tf.Tensor, tf.Tensor]],
    stop: tf.Variable,
    strategy: tf.distribute.Strategy,
    iterator: Any,
    stoppable: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Evaluates every batch that is left in an iterator. Trace it in a `tf.function`.

    Returns:
        The weighted sum of losses and the sum of weights, over all replicas: shape (), float32;
        and whether a batch is left: shape (), bool.
    """

    def going(following: Any) -> tf.Tensor:
        end = ~following.has_value() | (stop.read_value() & stoppable)
        return ~strategies.any_worker(end, strategy)

    def body(following: Any, going_on: tf.Tensor, total: tf.Tensor, weight: tf.Tensor) -> tuple:
        del going_on
        losses, weights = call_user(eval_step, following.get_value())
        following = iterator.get_next_as_optional()
        return following, going(following), total + losses, weight + weights

    first = iterator.get_next_as_optional()
    following, _, total, weight = tf.while_loop(
        lambda following, going_on, *_: going_on,  # noqa: ARG005
        body,
        (first, going(first), tf.constant(0.0), tf.constant(0.0)),
        parallel_iterations=1,
    )
    return total, weight, following.has_value()


def unequal(left: bool) -> ValueError:
    """Returns the error for an evaluation that not all workers could end."""
    return ValueError(
        "`eval_data` must be the same on every worker; got data of several lengths: "
        f"{'some are left here' if left else 'others have some left'}. Each replica takes its "
        "share of every batch. Do not divide them beforehand."
    )


def replica_evaluate(
    batch: Any,
    weights: tf.Tensor,
    task: Task,
    objectives: Sequence[Objective],
    compute_loss: Callable[..., Any],
) -> tf.Tensor:
    """Evaluates one replica's share of a batch. Call it in replica context.

    Args:
        batch: the global batch.
        weights: shape (global_batch,), float32.
        task: whose metrics are updated, with real examples only.
        objectives: whose losses are added up.
        compute_loss: the task's, compiled or not.

    Returns:
        This replica's weighted sum of losses: shape (), float32.
    """
    share = my_share(batch, weights)
    with nothing_written(task.model):
        result = call_user(compute_loss, share.batch, training=False)
    losses, aux = losses_and_aux(result, share.batch, objectives)
    call_user(task.update_metrics, real_rows(share.batch, share), real_rows(aux, share))
    return weighted_sum(tf.add_n(list(losses.values())), share)


def predict_batch(
    strategy: tf.distribute.Strategy, model: Any, method: Callable[[Any], Any], batch: Any
) -> Any:
    """Returns the outputs for a global batch, in its order. Trace it in a `tf.function`."""
    shares = strategy.run(replica_predict, args=(batch, model, method))
    return tf.nest.map_structure(lambda share: strategy.gather(share, axis=0), shares)


def replica_predict(batch: Any, model: Any, method: Callable[[Any], Any]) -> Any:
    """Returns the outputs for one replica's share of a batch. Call it in replica context."""
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    share = my_share(batch, tf.ones([rows]))
    with nothing_written(model):
        outputs = call_user(method, share.batch)
    return real_rows(outputs, share)


def nothing_written(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a Keras model writes nothing.

    Else a random number that is drawn in an evaluation would be missing in the training.
    """
    variables = [*held_back_variables(model), *seed_states(model)]
    return keras.StatelessScope([(variable, variable.value) for variable in variables])
