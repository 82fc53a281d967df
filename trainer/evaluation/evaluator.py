"""Evaluation and prediction: each replica runs the forward pass on its share of a batch."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

import strategies
from strategies.division import count_examples
from trainer.base.autograph import call_user, without_autograph
from trainer.base.tracking import read_copies, tracked_variables, write_copies
from trainer.evaluation.passes import (
    compiled_pass,
    keys_of,
    next_source,
    place_for_call,
    without_writes,
)
from trainer.keras_compat import computing_in_float32, differentiable_moments
from trainer.losses.metrics import numbers_of
from trainer.step.accumulate import real_examples, real_outputs
from trainer.step.checks import check_weights
from trainer.step.gather import gathering, part_of_mean
from trainer.step.losses import distinct, losses_and_aux, weighted_sum
from trainer.step.plan import StepPlan
from trainer.step.state import TrainState
from trainer.step.types import GlobalBatchSize
from trainer.step.xla import WITH_PASSES, note_xla

if TYPE_CHECKING:
    from trainer.task import Task

PRECISIONS = ("float32", "train")


class Evaluator:
    """Runs the forward pass of a task's model, in float32 or in the training precision.

    The graph for each precision is traced once and reused.

    Args:
        task: the model, the loss and the metrics.
        plan: the plan of the training step; the evaluated loss is the sum of its objectives'.
        eval_step: evaluates one global batch; see `Trainer.eval_step`.
        state: the run's seed, from which random numbers are computed.
        stop: shape (), bool: whether the run was asked to stop, which ends evaluations during
            training.
        generators: the generators of TensorFlow that the loss may draw from.
    """

    def __init__(
        self,
        task: "Task",
        plan: StepPlan,
        eval_step: Callable[[Any], tuple[tf.Tensor, tf.Tensor]],
        state: TrainState,
        stop: tf.Variable,
        generators: Sequence[tf.random.Generator] = (),
    ) -> None:
        """Creates the graph functions, which are traced when they are first called."""
        self._task = task
        self._plan, self._strategy = plan, plan.strategy
        self._state = state
        self._stop = stop
        # The source of keys for `make_keys`: the call's own number, and the batch's index.
        self._source = tf.Variable([0, 0], trainable=False, dtype=tf.int64, name="draws")
        self._is_keras = isinstance(task.model, keras.Layer)
        self._generators = generators
        found = tracked_variables([task.model], but=[*plan.held_back, *plan.seeds])
        self._assignable = [variable for variable in found if isinstance(variable, tf.Variable)]
        self._assignable += [generator.state for generator in generators]

        self._precision = PRECISIONS[0]  # precision of the evaluation that is running
        self._evaluate = {
            each: tf.function(
                functools.partial(evaluate_all, eval_step, stop, plan.strategy), autograph=False
            )
            for each in PRECISIONS
        }
        self._predict = {each: self._prediction(each) for each in PRECISIONS}

    def _prediction(self, precision: str) -> Callable[[Any], Any]:
        """Returns a function of a batch, which is traced anew for one other shape, and no more."""

        def predict(batch: Any) -> Any:
            plan, method = self._plan, self._task.predict_batch
            return predict_batch(plan, method, self._source, self._compiles(precision), batch)

        traced: Callable[[Any], Any] = tf.function(predict, autograph=False, reduce_retracing=True)
        return traced

    def _compiles(self, precision: str) -> bool:
        """Returns whether XLA compiles a pass, as it does those of the training step."""
        as_in_training = precision == "train" or not self._is_keras
        return as_in_training and self._plan.jit_compile in WITH_PASSES

    def evaluate(
        self, dataset: tf.data.Dataset, precision: str, *, stoppable: bool
    ) -> dict[str, float] | None:
        """Returns the weighted mean loss and the task's metrics over a data set.

        Args:
            dataset: a dataset of global batches.
            precision: one of `PRECISIONS`.
            stoppable: whether a request to stop the run ends the evaluation.

        Returns:
            The results, keyed by name; None if the evaluation was stopped.
        """
        for metric in self._task.metrics.values():
            metric.reset_state()
        with self._computing_in(precision):
            self._precision = precision
            self._begin_draws(call=0)
            iterator = iter(dataset)
            total, weight, left = self._evaluate[precision](iterator, tf.constant(stoppable))
        stopped = stoppable and strategies.any_worker(bool(self._stop), self._strategy)
        if strategies.any_worker(bool(left), self._strategy):
            if stopped:
                return None
            found = "this worker" if left else "another worker"
            raise UnequalLengthsError(
                f"`data` must be the same on every worker; got batches left on {found}"
            )
        if not (weight or stopped):  # a mean of nothing would be 0, the best
            what = "an example whose weight is not 0" if self._source[1] else "data for each pass"
            raise ValueError(f"`data` must hold {what}")
        metrics = numbers_of(self._task.metrics)
        return {"loss": float(total / weight), **metrics}

    def trace(self, dataset: tf.data.Dataset, precision: str) -> None:
        """Traces an evaluation, so that what is wrong with it is known; `evaluate` uses the trace.

        Args:
            dataset: as for `evaluate`; nothing is read from it.
            precision: one of `PRECISIONS`.
        """
        if tf.config.functions_run_eagerly():
            return
        with self._computing_in(precision):
            self._precision = precision
            evaluate = self._evaluate[precision]
            evaluate.get_concrete_function(iter(dataset), tf.constant(value=True))

    @without_autograph
    def evaluate_batch(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a batch's weighted sum of losses, and what to divide it by: shape (), float32.

        See `Trainer.eval_step`.
        """
        weights = check_weights(call_user(self._task.example_weights, batch), batch)
        compiles, source = self._compiles(self._precision), next_source(self._source)
        shares = strategies.shares(batch, weights, self._strategy)
        size = GlobalBatchSize.of(weights)
        arguments = (shares, size, self._task, self._plan, compiles, source)
        sums = self._strategy.run(replica_evaluate, args=arguments)
        total = self._strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        return total, size.weight

    def predict(self, dataset: tf.data.Dataset, precision: str) -> Any:
        """Returns the model's outputs as NumPy arrays, in the order of the data set."""
        with self._computing_in(precision):
            self._state.predictions += 1
            self._begin_draws(self._state.predictions)
            outputs = [self._predict[precision](batch) for batch in dataset]
        return tf.nest.map_structure(joined, *outputs)

    @contextlib.contextmanager
    def model_restored(self, *, predicts: bool = False) -> Iterator[None]:
        """Context manager: restores what the model assigns by itself, so that no run is changed.

        Those are `tf.Variable`s, and the states of `tf.random.Generator`s. What it assigns to Keras
        variables is held back: see `HoldBack`.

        Args:
            predicts: whether the call is a prediction, which draws other numbers than the ones
                before it. Every evaluation draws the same numbers.
        """
        before = read_copies(self._assignable, self._strategy)
        call = self._state.predictions + 1 if predicts else 0
        try:
            for generator in self._generators:
                place_for_call(generator, call, self._strategy)
            yield
        finally:
            write_copies(self._assignable, before, self._strategy)

    def _begin_draws(self, call: int) -> None:
        """Chooses the random numbers of a call, by the run's seed and the call's number alone."""
        number = tf.random.stateless_uniform(
            [],
            # Training's places are below 2^62.
            seed=[int(self._state.random_seed.numpy()), 2**62],
            maxval=2**62,
            dtype=tf.int64,
            alg="philox",
        )
        self._source.assign(tf.stack([number + call, 0]))

    @contextlib.contextmanager
    def _computing_in(self, precision: str) -> Iterator[None]:
        """Context manager under which a Keras model is traced in `precision`."""
        in_float32 = precision == "float32" and self._is_keras
        try:
            with computing_in_float32(self._task.model) if in_float32 else contextlib.nullcontext():
                yield
        except tf.errors.OpError as error:
            note_xla(error)
            raise


def evaluate_all(
    eval_step: Callable[[Any], tuple[tf.Tensor, tf.Tensor]],
    stop: tf.Variable,
    strategy: tf.distribute.Strategy,
    iterator: tf.data.Iterator,
    stoppable: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Evaluates the remaining batches of an iterator. Call it in a `tf.function`.

    Args:
        eval_step: evaluates one global batch; see `Trainer.eval_step`.
        stop: shape (), bool: whether the run was asked to stop.
        strategy: the strategy that runs the replicas.
        iterator: an iterator over a `tf.data.Dataset` of global batches.
        stoppable: shape (), bool: whether `stop` ends the evaluation.

    Returns:
        The weighted sum of losses and the sum of the weights' magnitudes over all replicas: shape
        (), float64; and whether any batch is left: shape (), bool.
    """

    def may_continue(following: tf.experimental.Optional) -> tf.Tensor:
        end = ~following.has_value() | (stop.read_value() & stoppable)
        return ~strategies.any_worker(end, strategy)

    def body(
        following: tf.experimental.Optional,
        continues: tf.Tensor,
        total: tf.Tensor,
        weight: tf.Tensor,
    ) -> tuple[tf.experimental.Optional, tf.Tensor, tf.Tensor, tf.Tensor]:
        del continues
        losses, weights = call_user(eval_step, following.get_value())
        following = iterator.get_next_as_optional()
        # A float32 sum over many batches would drop digits of each.
        sums = total + tf.cast(losses, tf.float64), weight + tf.cast(weights, tf.float64)
        return following, may_continue(following), *sums

    first = iterator.get_next_as_optional()
    following, _, total, weight = tf.while_loop(
        lambda following, continues, *_: continues,  # noqa: ARG005
        body,
        (first, may_continue(first), tf.constant(0.0, tf.float64), tf.constant(0.0, tf.float64)),
        parallel_iterations=1,
    )
    return total, weight, following.has_value()


class UnequalLengthsError(ValueError):
    """Raised by all workers together, after an evaluation that ended earlier for some of them."""


def replica_evaluate(
    share: strategies.Share,
    size: GlobalBatchSize,
    task: "Task",
    plan: StepPlan,
    compiles: bool,
    source: tf.Tensor,
) -> tf.Tensor:
    """Evaluates one replica's share of a batch. Call it in replica context.

    Args:
        share: this replica's, from `strategies.shares`.
        size: the size of the global batch.
        task: the task; its metrics are updated with all examples except padding.
        plan: the plan of the training step, whose objectives' losses are added up.
        compiles: whether XLA compiles the pass.
        source: what random numbers are computed from; see `make_keys`: shape (2,), int64.

    Returns:
        This replica's weighted sum of losses: shape (), float32.
    """
    share = strategies.own_share(share)
    keys = keys_of(plan, source)

    def run() -> Any:
        gathers = gathering(share, size, plan.model, global_loss=plan.global_loss)
        with without_writes(plan, keys), differentiable_moments(), gathers:
            return call_user(task.compute_loss, share.batch, training=False)

    result = compiled_pass(run) if compiles else run()
    losses, aux = losses_and_aux(result, share.batch, plan.objectives, global_loss=plan.global_loss)
    call_user(task.update_metrics, *real_examples(share, aux))
    total = tf.add_n(distinct(losses.values()))
    if plan.global_loss:  # the mean over batches weights each by its number of examples
        return part_of_mean(total, share, size) * size.weight
    return weighted_sum(total, share)


def predict_batch(
    plan: StepPlan,
    method: Callable[[Any], Any],
    draws: tf.Variable,
    compiles: bool,
    batch: Any,
) -> Any:
    """Returns the outputs for a global batch, in the order of its examples.

    Call it in a `tf.function`.

    Args:
        plan: the plan of the training step, whose model `method` calls; none of its variables is
            written.
        method: `Task.predict_batch`.
        draws: the counter of `next_source`.
        compiles: whether XLA compiles the pass.
        batch: the global batch.
    """
    shares = strategies.shares(batch, tf.ones([count_examples(batch)]), plan.strategy)
    arguments = (shares, plan, method, compiles, next_source(draws))
    outputs = plan.strategy.run(replica_predict, args=arguments)
    return tf.nest.map_structure(functools.partial(gathered, plan.strategy), outputs)


def gathered(strategy: tf.distribute.Strategy, shares: Any) -> Any:
    """Returns the rows of all replicas' outputs, in order. Call it in cross-replica context."""
    parts = strategy.experimental_local_results(shares)
    composite = isinstance(parts[0], tf.RaggedTensor | tf.SparseTensor)
    if composite and len(parts) == strategy.num_replicas_in_sync:
        return concatenated(parts)  # `gather` takes dense tensors only
    dtype = parts[0].dtype
    sent = SENT_AS.get(dtype, dtype)
    if strategies.capabilities(strategy).multi_worker:
        if sent not in SENT:
            raise TypeError(
                f"`predict_batch` must return numbers or bools with several workers; got {dtype!r}"
            )
        shares = strategy.run(tf.cast, args=(shares, sent))
    return tf.cast(strategy.gather(shares, axis=0), dtype)


# The dtypes that workers exchange, and those in which they send others.
SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
SENT_AS = {tf.bfloat16: tf.float32, tf.uint32: tf.int64} | dict.fromkeys(
    (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)


def concatenated(parts: Sequence[Any]) -> Any:
    """Returns the rows of ragged or of sparse tensors in one."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.concat(parts, axis=0)


def joined(*parts: Any) -> Any:
    """Returns the rows of the outputs for all batches: an array, or a ragged or sparse tensor."""
    if isinstance(parts[0], tf.RaggedTensor | tf.SparseTensor):
        return concatenated(parts)
    return np.concatenate(parts)


def replica_predict(
    share: strategies.Share,
    plan: StepPlan,
    method: Callable[[Any], Any],
    compiles: bool,
    source: tf.Tensor,
) -> Any:
    """Returns the outputs for one replica's share of a batch. Call it in replica context."""
    share = strategies.own_share(share)
    keys = keys_of(plan, source)

    def run() -> Any:
        with without_writes(plan, keys):
            return call_user(method, share.batch)

    outputs = compiled_pass(run) if compiles else run()
    if plan.global_loss and plan.strategy.num_replicas_in_sync == 1:  # rows may not be examples
        return outputs
    return real_outputs(outputs, share, "predict_batch")
