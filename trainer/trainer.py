"""`Trainer`: the stateful shell around the step. It builds, loops, logs, saves and evaluates."""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

import scaling
import strategies
from trainer import checks, liveness, settings
from trainer.checkpoint import Checkpoints
from trainer.data import Batches, are_arrays, batches, check_ends, steps_to_take, without_end
from trainer.differentiate import differentiate
from trainer.evaluation import Evaluator
from trainer.log import RunLog
from trainer.loop import crossed, next_stop, run_steps
from trainer.report import StepReport, Totals, TrainSummary
from trainer.state import TrainState
from trainer.step import StepPlan, attempt_step
from trainer.task import Task


class Trainer(Task):
    """Trains a Keras 3 model or a `tf.Module` with explicit loss scaling, on any strategy.

    Subclass it and override `build_model`, `build_optimizer` and `compute_loss` (see `Task`
    for the rest), or pass `model`, `optimizer` and `loss_fn`.

    Args:
        model: a `keras.Model` or `tf.Module`, or a function that makes one; it must be a
            function under any strategy but the default.
        optimizer: a Keras optimizer, its name, or a function that makes one; it must be a name
            or a function under any strategy but the default. Its own clipping and EMA act on
            the summed, unscaled gradients of applied steps.
        loss_fn: a `keras.losses.Loss`, a function of (y_true, y_pred) that returns one loss
            per example, or the name of one.
        metrics: a function that returns new Keras metrics by name.
        model_dir: where checkpoints, `metrics.jsonl` and TensorBoard files go. A run that
            finds a checkpoint there goes on from it. None writes nothing.
        strategy: a name for `strategies.create`, or a `tf.distribute.Strategy`.
        precision: "float32", "mixed_float16" or "mixed_bfloat16".
        loss_scale: "auto" (dynamic for float16, else none), a number, None, a rule of
            `scaling`, or its name: what `scaling.parse_rule` takes.
        num_microbatches: into how many parts each replica's share is cut, to save memory.
        global_clipnorm: the bound on the gradients' global norm, or None.
        steps_per_loop: steps in one graph call; the host does nothing in between.
        checkpoint_interval: steps between checkpoints; None saves at the end only.
        max_to_keep: how many checkpoints stay.
        log_interval: steps between lines of the log.
        verbose: whether to print them.
        jit_compile: whether XLA compiles each replica's forward and backward pass. "auto" does
            so for float16 on CPU.
        seed: for initial weights and for shuffling arrays; sets Python's, NumPy's and
            TensorFlow's seeds when the model is built. None leaves them alone.
        max_consecutive_skips: how many skipped steps in a row end the run with an error.
        record_gradients: whether `metrics.jsonl` keeps each step's largest gradient magnitude,
            and counts by exponent, for `python -m scaling.simulate`; a few passes over the
            gradients in each step.

    Raises:
        TypeError, ValueError: for an argument that cannot be meant, here or, where only the
            model or the data can tell, before the first step.

    Example:
        >>> import keras, numpy as np
        >>> x = np.linspace(0, 1, 64, dtype="float32")[:, None]
        >>> line = Trainer(
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...     optimizer=lambda: keras.optimizers.SGD(0.5), loss_fn="mse", verbose=False)
        >>> line.train((x, 3 * x + 1), steps=300, global_batch=64).totals.applied
        300
        >>> np.round(line.model.get_weights()[0], 2).item()
        3.0
    """

    # Made by `_start`, when data has come.
    _plan: StepPlan
    _state: TrainState
    _run_steps: Any
    _evaluator: Evaluator
    _checkpoints: Checkpoints

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        loss_fn: Any = None,
        metrics: Callable[[], dict[str, keras.metrics.Metric]] | None = None,
        model_dir: str | pathlib.Path | None = None,
        strategy: str | tf.distribute.Strategy = "default",
        precision: str = "float32",
        loss_scale: Any = "auto",
        num_microbatches: int = 1,
        global_clipnorm: float | None = None,
        steps_per_loop: int = 10,
        checkpoint_interval: int | None = None,
        max_to_keep: int = 5,
        log_interval: int = 100,
        verbose: bool = True,
        jit_compile: bool | str = "auto",
        seed: int | None = None,
        max_consecutive_skips: int = 100,
        record_gradients: bool = False,
    ) -> None:
        """Checks the arguments. Nothing is built until data comes."""
        super().__init__(model, optimizer, loss_fn, metrics)
        settings.check_count("num_microbatches", num_microbatches)
        settings.check_count("steps_per_loop", steps_per_loop)
        settings.check_count("max_to_keep", max_to_keep)
        settings.check_count("max_consecutive_skips", max_consecutive_skips)
        settings.check_count("log_interval", log_interval)
        if checkpoint_interval is not None:
            settings.check_count("checkpoint_interval", checkpoint_interval)
        settings.check_clipnorm(global_clipnorm)
        self.precision = scaling.Precision(precision)
        self.rule = settings.resolve_rule(loss_scale, self.precision)
        self.strategy = settings.resolve_strategy(strategy)
        self.model_dir = pathlib.Path(model_dir) if model_dir is not None else None
        self.num_microbatches = num_microbatches
        self.global_clipnorm = global_clipnorm
        self.steps_per_loop = steps_per_loop
        self.checkpoint_interval = checkpoint_interval
        self.max_to_keep = max_to_keep
        self.log_interval = log_interval
        self.verbose = verbose
        self.jit_compile = settings.resolve_jit_compile(jit_compile, self.precision, self.strategy)
        self.seed = seed
        self.max_consecutive_skips = max_consecutive_skips
        self.record_gradients = record_gradients
        self._started = False
        self._metrics_of: dict[bool, dict[str, keras.metrics.Metric]] = {False: {}, True: {}}
        self._evaluating = False
        self._skips_in_a_row = 0

    # What a run is made of. Built when first asked for, so that a subclass may set its own
    # attributes after super().__init__().

    @functools.cached_property
    def model(self) -> Any:
        """The model, made by `build_model` on first use."""
        if self.seed is not None:
            keras.utils.set_random_seed(self.seed)
        with self.strategy.scope(), settings.dtype_policy(self.precision):
            return self.build_model()

    @functools.cached_property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer, made by `build_optimizer` on first use."""
        with self.strategy.scope():
            return self.build_optimizer()

    @property
    def metrics(self) -> dict[str, keras.metrics.Metric]:
        """The metrics in use: evaluation has its own."""
        return self._metrics_of[self._evaluating]

    @property
    def totals(self) -> Totals:
        """How the steps so far have ended. Waits for the device."""
        return Totals.from_outcomes(self._state.outcomes.numpy())

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step. Waits for the device."""
        return float(self._state.loss_scaler.loss_scale)

    def train_step(self, batch: Any) -> StepReport:
        """Attempts one update with a global batch. Called in cross-replica context, in a graph.

        Args:
            batch: the global batch; each replica takes its share.

        Returns:
            The step's report, each field of shape ().
        """
        return attempt_step(batch, self._plan, self._state)

    def train(
        self,
        train_data: Any,
        steps: int | None = None,
        *,
        epochs: int | None = None,
        global_batch: int | None = None,
        eval_data: Any = None,
        eval_interval: int | None = None,
    ) -> TrainSummary:
        """Trains until the run has attempted `steps` steps, over all calls and restarts.

        Args:
            train_data: a `tf.data.Dataset` batched to the global batch; or a function of a
                `tf.distribute.InputContext`; or arrays, which are shuffled in every epoch.
                Data that ends is repeated.
            steps: the step to reach: an absolute target, so the same command goes on where a
                checkpoint was left.
            epochs: the same in passes over `train_data`; give one of the two.
            global_batch: the batch size, if `train_data` is arrays.
            eval_data: what to evaluate on while training; None does not. Arrays are batched
                like the training data.
            eval_interval: steps between evaluations; None evaluates at the end only.

        Returns:
            How the run stands now.

        Raises:
            ValueError, TypeError: if data, model or optimizer cannot be trained.
            TrainingStuckError: if `max_consecutive_skips` steps in a row were skipped.
        """
        began = time.perf_counter()
        data = batches(train_data, "train_data", self.strategy, global_batch, self.seed or 0)
        target = steps_to_take(steps, epochs, data)
        replicas = self.strategy.num_replicas_in_sync
        strategies.check_divisible(data.global_batch, replicas, self.num_microbatches)
        evaluated = self._evaluation_data(eval_data, eval_interval, data.global_batch)
        self._start(data.first)
        shares = replicas * self.num_microbatches
        log = RunLog(self.model_dir, self.verbose, self.precision.name, shares)
        iterator = iter(without_end(data))
        start = step = self.totals.attempted
        if start:
            log.say(f"going on from step {start}")
        saved = None
        while step < target:
            intervals = [eval_interval, self.checkpoint_interval]
            before, step = step, next_stop(step, target, self.steps_per_loop, intervals)
            report = self._run_steps(iterator, tf.constant(step - before))
            log.add(report, compiling=before == start)
            if step == target or crossed(self.log_interval, before, step):
                self._read_log(log, target)
            if evaluated and (step == target or crossed(eval_interval, before, step)):
                log.evaluation(step, self._evaluate(evaluated, "float32"))
            if step == target or crossed(self.checkpoint_interval, before, step):
                saved = self._checkpoints.save(step)
        summary = TrainSummary(
            step=step,
            steps_run=step - start,
            totals=self.totals,
            loss_scale=self.loss_scale,
            seconds=time.perf_counter() - began,
            checkpoint=saved or self._checkpoints.latest,
        )
        log.say(str(summary))
        return summary

    def evaluate(
        self, data: Any, *, global_batch: int | None = None, precision: str = "float32"
    ) -> dict[str, float]:
        """Returns the weighted mean loss and the metrics over a whole data set.

        Args:
            data: as for `train`; arrays are not shuffled.
            global_batch: the batch size, if `data` is arrays.
            precision: "float32" computes a Keras model in float32 on the same weights; "train"
                as in training. A `tf.Module` always computes as in training.

        Returns:
            "loss" and every metric by name. `model.losses` are not in it.
        """
        found = batches(data, "data", self.strategy, global_batch)
        check_ends(found, "data")
        self._start(found.first)
        if self.model_dir and not self.totals.attempted:
            logging.warning("There is no checkpoint in %s: the model is untrained.", self.model_dir)
        return self._evaluate(found, precision)

    def predict(
        self, data: Any, *, global_batch: int | None = None, precision: str = "float32"
    ) -> Any:
        """Returns the model's outputs for a whole data set, in its order.

        Args:
            data: as for `evaluate`; of a tuple, the model is handed the first item.
            global_batch: the batch size, if `data` is arrays.
            precision: as for `evaluate`.

        Returns:
            NumPy arrays in the structure of `predict_batch`; first dimension: the example.
        """
        found = batches(data, "data", self.strategy, global_batch)
        check_ends(found, "data")
        self._start(found.first, lambda batch, training: self.predict_batch(batch))  # noqa: ARG005
        return self._evaluator.predict(found.dataset, precision)

    def _evaluation_data(
        self, eval_data: Any, eval_interval: int | None, global_batch: int
    ) -> Batches | None:
        """Reads what to evaluate on while training, before the first step."""
        if eval_interval is not None:
            settings.check_count("eval_interval", eval_interval)
        if eval_data is None:
            if eval_interval is not None:
                raise ValueError(
                    f"`eval_interval` must be None without `eval_data`; got {eval_interval}. There "
                    "is nothing to evaluate on. Pass eval_data=."
                )
            return None
        of_arrays = global_batch if are_arrays(eval_data) else None
        found = batches(eval_data, "eval_data", self.strategy, of_arrays)
        check_ends(found, "eval_data")
        return found

    def _evaluate(self, found: Batches, precision: str) -> dict[str, float]:
        self._evaluating = True
        try:
            return self._evaluator.evaluate(found.dataset, precision)
        finally:
            self._evaluating = False

    def _start(self, batch: Any, forward: Callable[..., Any] | None = None) -> None:
        """Builds what is not built yet, checks it, and takes up an earlier run if there is one.

        Args:
            batch: the first one.
            forward: (batch, training) -> anything: calls the model, if that is needed to build
                it; None is `compute_loss`.
        """
        if self._started:
            return
        model, strategy = self.model, self.strategy
        checks.check_model(model, self.precision)
        with strategy.scope():
            if not getattr(model, "built", bool(getattr(model, "trainable_variables", ()))):
                # One example through the model makes the variables that it makes when called. In
                # a stateless scope, so that it makes them and writes none.
                one = tf.nest.map_structure(lambda tensor: tensor[:1], batch)
                with settings.dtype_policy(self.precision), keras.StatelessScope():
                    (forward or self.compute_loss)(one, training=False)
            checks.check_built_model(model, self.precision, strategy)
            checks.check_optimizer(self.optimizer, self.global_clipnorm, strategy)
            self.optimizer.build(model.trainable_variables)
            self._state = TrainState(self.rule)
            self._metrics_of = {False: self.build_metrics(), True: self.build_metrics()}
            self._checkpoints = Checkpoints(
                self.model_dir,
                self.max_to_keep,
                model=model,
                optimizer=self.optimizer,
                state=self._state,
            )
            if path := self._checkpoints.restore():
                checks.check_restored_scale(self.rule, self.loss_scale, path)
        self._plan = StepPlan(
            strategy=strategy,
            model=model,
            optimizer=self.optimizer,
            rule=self.rule,
            example_weights=self.example_weights,
            update_metrics=self.update_metrics,
            differentiate=tf.function(
                functools.partial(
                    differentiate,
                    model=model,
                    compute_loss=self.compute_loss,
                    dense=self.jit_compile or self.num_microbatches > 1,
                ),
                jit_compile=self.jit_compile or None,
            ),
            num_microbatches=self.num_microbatches,
            global_clipnorm=self.global_clipnorm,
            record_gradients=self.record_gradients,
        )
        self._run_steps = tf.function(functools.partial(run_steps, self.train_step))
        self._evaluator = Evaluator(self, strategy, jit_compile=self.jit_compile)
        self._started = True

    def _read_log(self, log: RunLog, target: int) -> None:
        """Prints and writes what has happened since the last time; ends a run that is stuck."""
        metrics = {name: float(metric.result()) for name, metric in self.metrics.items()}
        steps = log.flush(target, self.totals, metrics)
        for metric in self.metrics.values():
            metric.reset_state()
        self._skips_in_a_row = liveness.check_alive(
            steps, self._skips_in_a_row, self.max_consecutive_skips
        )
