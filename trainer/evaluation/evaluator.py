"""Evaluation and prediction: each replica runs the forward pass on its share of a batch."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

import strategies
from scaling.base.argument_checks import is_name_in, shown
from strategies.division import count_examples, known_examples
from trainer.base.autograph import call_user, without_autograph
from trainer.base.keras_private import differentiable_moments
from trainer.evaluation.compiled_pass import compiled_pass
from trainer.evaluation.in_float32 import in_float32
from trainer.step.accumulate import real_aux, real_rows
from trainer.step.checks import check_weights
from trainer.step.gather import gathering, part_of_mean
from trainer.step.held_back import HoldBack
from trainer.step.losses import assert_shapes, distinct, losses_and_aux, weighted_sum
from trainer.step.microbatch import GlobalBatchSize
from trainer.step.plan import StepPlan
from trainer.step.randomness import make_keys
from trainer.step.reach import reach
from trainer.step.replica import my_share
from trainer.step.rollback import read_copies, variables_in_reach, write_copies
from trainer.step.state import TrainState
from trainer.step.types import MetricsByName, Variable
from trainer.step.user_functions import functions_of_one_precision
from trainer.step.xla import WITH_PASSES

PRECISIONS = ("float32", "train")


class EvaluationTask(Protocol):
    """The members of a task that evaluation uses; see `trainer.task.Task`."""

    @property
    def model(self) -> keras.Model | tf.Module:
        """The model to evaluate."""

    @property
    def metrics(self) -> dict[str, keras.metrics.Metric]:
        """The evaluation metrics, keyed by name."""

    def compute_loss(self, batch: Any, training: bool) -> Any:
        """Returns one loss per example, or a global loss; or (losses, aux)."""

    def example_weights(self, batch: Any) -> tf.Tensor:
        """Returns the weight of each example of a global batch: shape (examples,)."""

    def update_metrics(self, batch: Any, aux: Any) -> None:
        """Updates `metrics` with a replica's examples and the aux that `compute_loss` returned."""

    def predict_batch(self, batch: Any) -> Any:
        """Returns the model's outputs for a replica's examples."""


class Evaluator:
    """Runs the forward pass of a task's model, in float32 or in the training precision.

    The graph for each precision is traced once and reused.

    Args:
        task: the model, the loss and the metrics.
        plan: the plan of the training step; the evaluated loss is the sum of its objectives'.
        eval_step: evaluates one global batch; see `Trainer.eval_step`.
        state: the run's seed and step, from which random numbers are computed.
        stop: shape (), bool: whether the run was asked to stop, which ends evaluations during
            training.
    """

    def __init__(
        self,
        task: EvaluationTask,
        plan: StepPlan,
        eval_step: Callable[[Any], tuple[tf.Tensor, tf.Tensor]],
        state: TrainState,
        stop: tf.Variable,
    ) -> None:
        """Creates the graph functions, which are traced when they are first called."""
        self._task = task
        self._plan, self._strategy = plan, plan.strategy
        self._state = state
        self._stop = stop
        # The source of keys for `make_keys`: the call's own number, and the batch's index.
        self._source = tf.Variable([0, 0], trainable=False, dtype=tf.int64, name="draws")
        self._is_keras = isinstance(task.model, keras.Model)
        self._assignable = plain_variables(task.model, [*plan.held_back, *plan.seeds])
        self._generators = generators_in(task.model) if self._assignable else []

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
            self._begin_draws(asked_for=not stoppable)
            iterator = iter(dataset)
            total, weight, left = self._evaluate[precision](iterator, tf.constant(stoppable))
        stopped = stoppable and strategies.any_worker(bool(self._stop), self._strategy)
        if strategies.any_worker(bool(left), self._strategy):
            if stopped:
                return None
            raise unequal_lengths(bool(left))
        if not (weight or self._source[1] or stopped):  # a mean of nothing would be 0, the best
            raise nothing_to_read()
        if not weight and not stopped:
            raise no_weight(getattr(self._task, "data_argument", "eval_data"))
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
        """Returns a batch's weighted sum of losses and its sum of weights: shape (), float32.

        See `Trainer.eval_step`.
        """
        weights = check_weights(call_user(self._task.example_weights, batch), batch)
        compiles, source = self._compiles(self._precision), next_source(self._source)
        arguments = (batch, weights, self._task, self._plan, compiles, source)
        sums = self._strategy.run(replica_evaluate, args=arguments)
        total = self._strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        return total, tf.reduce_sum(weights)

    def predict(self, dataset: tf.data.Dataset, precision: str) -> Any:
        """Returns the model's outputs as NumPy arrays, in the order of the data set."""
        with self._computing_in(precision):
            self._begin_draws(asked_for=True)
            outputs = [self._predict[precision](batch) for batch in dataset]
        return tf.nest.map_structure(joined, *outputs)

    @contextlib.contextmanager
    def model_put_back(self, *, asked_for: bool) -> Iterator[None]:
        """Context manager: restores what the model assigns by itself, so that no run is changed.

        Those are `tf.Variable`s, and the states of `tf.random.Generator`s. What it assigns to Keras
        variables is held back: see `HoldBack`.

        Args:
            asked_for: whether a user asked for the call, so that its generators draw other numbers
                than in the calls before it.
        """
        before = read_copies(self._assignable, self._strategy)
        try:
            if asked_for:
                for generator in self._generators:
                    advance(generator, self._state.calls + 1, self._strategy)
            yield
        finally:
            write_copies(self._assignable, before, self._strategy)

    def _begin_draws(self, *, asked_for: bool) -> None:
        """Chooses the random numbers of a call.

        Args:
            asked_for: whether a user asked for the call, so that it draws other numbers than the
                calls before it. An evaluation during training depends on the step alone: a resumed
                run draws the same.
        """
        self._state.calls += asked_for
        call = self._state.calls if asked_for else 0
        number = tf.random.stateless_uniform(
            [],
            # Training's places are below 2^62.
            seed=[int(self._state.random_seed.numpy()), 2**62 + int(self._state.step)],
            maxval=2**62,
            dtype=tf.int64,
            alg="philox",
        )
        self._source.assign(tf.stack([number + call, 0]))

    def _computing_in(self, precision: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager under which a Keras model is traced in `precision`."""
        if not is_name_in(precision, PRECISIONS):
            raise ValueError(
                f'`precision` must be "float32" or "train"; got {shown(precision)}. Evaluation and '
                'prediction compute in float32 or in the training precision. Pass "float32" or '
                '"train".'
            )
        if precision == "float32" and self._is_keras:
            return in_float32(self._task.model)
        return contextlib.nullcontext()


def plain_variables(model: Any, held_back: Sequence[Variable]) -> list[tf.Variable]:
    """Returns the variables of a model that no scope of Keras holds back."""
    found = variables_in_reach([model], held_back)
    return [variable for variable in found if isinstance(variable, tf.Variable)]


def generators_in(model: Any) -> list[tf.random.Generator]:
    """Returns the random generators of TensorFlow that a model reaches."""
    found = reach({"model": model})
    return [item for _, item, _ in found if isinstance(item, tf.random.Generator)]


def advance(generator: tf.random.Generator, call: int, strategy: tf.distribute.Strategy) -> None:
    """Moves a generator to the numbers of a call, each of which has 2^32 blocks of its own."""
    for copy in strategy.experimental_local_results(generator.state):
        counter = tf.one_hot(0, copy.shape[0], dtype=copy.dtype)
        copy.assign_add(tf.cast(call * 2**32, copy.dtype) * counter)


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
        The weighted sum of losses and the sum of weights over all replicas: shape (), float64; and
        whether any batch is left: shape (), bool.
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


def next_source(counter: tf.Variable) -> tf.Tensor:
    """Returns the source of a batch's keys, and counts the batch: shape (2,), int64.

    Args:
        counter: the call's number, and the index of its next batch: shape (2,), int64.
    """
    source = counter.read_value()
    with tf.control_dependencies([source]):
        counter.assign_add([0, 1])
    return source


class UnequalLengthsError(ValueError):
    """Raised by all workers together, after an evaluation that ended earlier for some of them."""


def unequal_lengths(left: bool) -> UnequalLengthsError:
    """Returns the error for evaluation data that ends earlier on some workers.

    Args:
        left: whether this worker has batches left.
    """
    found = "this worker has batches left" if left else "another worker has batches left"
    return UnequalLengthsError(
        f"`eval_data` must be the same on every worker; got data of different lengths: {found}. "
        "Each replica takes its own share of every batch. Do not divide the data between workers."
    )


def nothing_to_read() -> ValueError:
    """Returns the error for evaluation data whose first batch was there, but nothing after it."""
    return ValueError(
        "`eval_data` must be data that can be read again; got a source that is used up. Every "
        "evaluation reads it from the beginning. Pass arrays, or a dataset that opens its source "
        "anew in each pass."
    )


def no_weight(argument: str) -> ValueError:
    """Returns the error for evaluation data whose weights are all 0."""
    return ValueError(
        f"`{argument}` must have an example whose weight is not 0; got weights whose sum is 0. The "
        "loss is a weighted mean, which does not exist without weight. Check the sample weights, "
        "the mask, or `example_weights`."
    )


def replica_evaluate(
    batch: Any,
    weights: tf.Tensor,
    task: EvaluationTask,
    plan: StepPlan,
    compiles: bool,
    source: tf.Tensor,
) -> tf.Tensor:
    """Evaluates one replica's share of a batch. Call it in replica context.

    Args:
        batch: the global batch.
        weights: shape (global_batch,), float32.
        task: the task; its metrics are updated with all examples except padding.
        plan: the plan of the training step, whose objectives' losses are added up.
        compiles: whether XLA compiles the pass.
        source: what random numbers are computed from; see `make_keys`: shape (2,), int64.

    Returns:
        This replica's weighted sum of losses: shape (), float32.
    """
    share = my_share(batch, weights)
    size = GlobalBatchSize.of(weights)
    keys = keys_of(plan, source)

    def run() -> Any:
        gathers = gathering(share, size, plan.model, global_loss=plan.global_loss)
        with without_writes(plan, keys), differentiable_moments(), gathers:
            return call_user(task.compute_loss, share.batch, training=False)

    result = compiled_pass(run, plan.strategy) if compiles else run()
    losses, aux = losses_and_aux(result, share.batch, plan.objectives, global_loss=plan.global_loss)
    call_user(task.update_metrics, real_rows(share.batch, share), real_aux(aux, share))
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
    arguments = (batch, plan, method, compiles, next_source(draws))
    shares = plan.strategy.run(replica_predict, args=arguments)
    return tf.nest.map_structure(functools.partial(gathered, plan.strategy), shares)


def gathered(strategy: tf.distribute.Strategy, shares: Any) -> Any:
    """Returns the rows of all replicas' outputs, in order. Call it in cross-replica context."""
    parts = strategy.experimental_local_results(shares)
    composite = isinstance(parts[0], tf.RaggedTensor | tf.SparseTensor)
    if composite and len(parts) == strategy.num_replicas_in_sync:
        return concatenated(parts)  # `gather` takes dense tensors only
    if strategies.has_workers(strategy) and strategy.num_replicas_in_sync > 1:
        return gathered_from_workers(strategy, shares, parts[0])
    with tf.control_dependencies([] if composite else check_inner_shapes(parts)):
        return strategy.gather(shares, axis=0)


# The dtypes that workers exchange, and those in which they send others.
SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
SENT_AS = {tf.bfloat16: tf.float32, tf.uint32: tf.int64} | dict.fromkeys(
    (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)


def gathered_from_workers(strategy: tf.distribute.Strategy, shares: Any, part: Any) -> tf.Tensor:
    """Returns the rows of all workers' outputs, in order.

    Args:
        strategy: a strategy with several workers.
        shares: the outputs of this worker's replicas.
        part: one of them.

    Raises:
        TypeError: if workers cannot exchange such outputs.
    """
    sent = SENT_AS.get(part.dtype, part.dtype)
    if not isinstance(part, tf.Tensor) or sent not in SENT:
        kind = part.dtype.name if isinstance(part, tf.Tensor) else type(part).__name__
        raise TypeError(
            "`predict_batch` must return dense tensors of numbers or bools with several workers; "
            f"got {kind}. Workers cannot exchange others. Return padded tensors or numbers, or "
            "predict in a single process."
        )
    if sent != part.dtype:
        shares = strategy.run(tf.cast, args=(shares, sent))
    return tf.cast(strategy.gather(shares, axis=0), part.dtype)


def check_inner_shapes(parts: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Returns what checks that replicas of this process return rows of one shape."""
    if len(parts) == 1 or parts[0].shape[1:].is_fully_defined():
        return []
    inner = [tf.shape(part)[1:] for part in parts]
    same = tf.reduce_all([tf.reduce_all(each == inner[0]) for each in inner[1:]])
    message = (
        "`predict_batch` must return rows of one shape on all replicas, because they are joined "
        "into one array. Pad to one length, as with output_sequence_length= of TextVectorization, "
        "or return a tf.RaggedTensor. The rows have the shapes"
    )
    return [tf.debugging.Assert(same, [message, *inner])]


def concatenated(parts: Sequence[Any]) -> Any:
    """Returns the rows of ragged or of sparse tensors in one."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.concat(parts, axis=0)


def joined(*parts: Any) -> Any:
    """Returns the rows of the outputs for all batches: an array, or a ragged or sparse tensor.

    Raises:
        ValueError: if the rows of different batches have different shapes.
    """
    if isinstance(parts[0], tf.RaggedTensor | tf.SparseTensor):
        return concatenated(parts)
    other = next((part for part in parts if part.shape[1:] != parts[0].shape[1:]), None)
    if other is not None:
        raise ValueError(
            "`predict_batch` must return rows of one shape for all batches; got shapes "
            f"{tuple(parts[0].shape)} and {tuple(other.shape)}. They are joined into one array. "
            "Pad the batches to one length, return a tf.RaggedTensor, or call predict for each "
            "batch."
        )
    return np.concatenate(parts)


def replica_predict(
    batch: Any, plan: StepPlan, method: Callable[[Any], Any], compiles: bool, source: tf.Tensor
) -> Any:
    """Returns the outputs for one replica's share of a batch. Call it in replica context."""
    share = my_share(batch, tf.ones([count_examples(batch)]))
    keys = keys_of(plan, source)

    def run() -> Any:
        with without_writes(plan, keys):
            return call_user(method, share.batch)

    outputs = compiled_pass(run, plan.strategy) if compiles else run()
    with tf.control_dependencies(check_rows(outputs, share)):
        return real_rows(outputs, share)


WRONG_ROWS = "`predict_batch` must return tensors with one row per example; got"
OF_ROWS = (
    "`predict` joins the rows of all replicas and batches. Return what belongs to each example."
)


def check_rows(outputs: Any, share: strategies.Share) -> list[tf.Operation]:
    """Raises ValueError unless outputs have one row for each example.

    Returns:
        What checks the numbers of rows that are known only when the graph runs.
    """
    examples, checks = known_examples(share.batch), []
    held, real = tf.shape(share.weights)[0], share.examples
    for leaf in tf.nest.flatten(outputs):
        rows = known_examples(leaf) if hasattr(leaf, "shape") else None
        if not hasattr(leaf, "shape"):
            found = type(leaf).__name__
        elif tf.TensorShape(leaf.shape).rank == 0 or (
            None not in (rows, examples) and rows != examples
        ):
            found = f"one of shape {leaf.shape} for {examples} examples"
        else:
            if None in (rows, examples):
                count = count_examples(leaf)
                message = [WRONG_ROWS, count, "rows for", real, "examples.", OF_ROWS]
                checks += assert_shapes((count == held) | (count == real), message)
            continue
        raise ValueError(f"{WRONG_ROWS} {found}. {OF_ROWS}")
    return checks


def keys_of(plan: StepPlan, source: tf.Tensor) -> tf.Tensor:
    """Returns a key for each of the plan's generators: shape (generators, 2), int64.

    Call it in replica context, outside of XLA-compiled code; see `make_keys`.

    Args:
        plan: the plan of the training step.
        source: what the keys are computed from: shape (2,), int64.
    """
    context = tf.distribute.get_replica_context()
    replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    return make_keys(source, replica, replicas, 1, len(plan.seeds))[0]


@contextlib.contextmanager
def without_writes(plan: StepPlan, keys: tf.Tensor) -> Iterator[None]:
    """Context manager: a Keras model does not write to its variables.

    Without this context, an evaluation would advance the seed generators used in training.

    Args:
        plan: the plan of the training step.
        keys: the generators' keys, from `keys_of`.
    """
    given = [(variable, variable.value) for variable in plan.held_back]
    given += zip(plan.seeds, tf.unstack(keys, num=len(plan.seeds)), strict=True)
    with contextlib.ExitStack() as stack:
        if isinstance(plan.model, keras.Model):
            stack.enter_context(functions_of_one_precision(plan.model))
        stack.enter_context(HoldBack([*plan.held_back, *plan.seeds], given))
        yield


def numbers_of(metrics: MetricsByName) -> dict[str, float]:
    """Returns the results of metrics. Waits for the device; see `results_of`."""
    return {name: float(result) for name, result in results_of(metrics).items()}


def results_of(metrics: MetricsByName) -> dict[str, tf.Tensor]:
    """Returns the results of metrics, each of shape ().

    Args:
        metrics: Keras metrics, keyed by name. A result may be a tensor or a variable, which has a
            copy for each replica.

    Raises:
        ValueError: if a result is not one number.
    """
    numbers = {}
    for name, metric in metrics.items():
        result = metric.result()
        value = None if isinstance(result, dict) else tf.convert_to_tensor(result)
        if value is None or value.shape.num_elements() != 1:
            found = "a dict" if value is None else f"shape {tuple(value.shape)}"
            raise ValueError(
                f"`metrics` must return one number each; got {found} from {name!r} "
                f"({type(metric).__name__}). The log and `best_metric` compare numbers. Choose an "
                "average, such as average='macro' of F1Score, or write one metric for each number."
            )
        numbers[name] = tf.reshape(value, [])
    return numbers
