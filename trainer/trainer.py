"""`Trainer`: the stateful shell around the step. It builds, loops, logs, saves and evaluates."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

import strategies
from trainer.base.argument_checks import (
    check_count,
    check_keep_count,
    check_no_unknown_arguments,
    check_path,
    check_writable,
)
from trainer.base.autograph import without_autograph
from trainer.checkpoint.best import export_model
from trainer.config.checkpoint_config import CheckpointConfig
from trainer.config.fields import take_fields
from trainer.config.groups import (
    MonitorConfig,
    OverflowRecordConfig,
    PrecisionConfig,
    RunConfig,
    UpdateConfig,
)
from trainer.config.resolve import (
    LossScaleArgument,
    check_one_process,
    check_recordable,
    dtype_policy,
)
from trainer.config.skip_policy import SkipPolicy
from trainer.data.batches import Batches, are_arrays, batches, check_ends, same_data, target_step
from trainer.data.iterator_state import DataPosition
from trainer.evaluation.ema_weights import evaluated_weights
from trainer.evaluation.export import check_export, export
from trainer.log.console import resolve_style
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals, TrainSummary
from trainer.monitor.actions import Action
from trainer.monitor.divergence import Divergence, LossWatch
from trainer.monitor.preemption import StopSignals
from trainer.replay.recorder import read_record
from trainer.replay.rerun import Replay, check_setting, rerun_step
from trainer.run.build import Forward, build, recorded_settings
from trainer.run.compile_autotune import Choice, initial_compile_mode, settle
from trainer.run.dry_run import DryRun, Overfit, dry_run, overfit
from trainer.run.outer_loop import OuterLoop, Results, TrainRequest
from trainer.run.protocol import Parts
from trainer.step import StepReport, attempt_step
from trainer.step.types import Batch, Model
from trainer.task import LossArgument, MetricsArgument, ModelArgument, OptimizerArgument, Task


class Trainer(Task):
    """Trains a Keras 3 model or a `tf.Module` with explicit loss scaling, on any strategy.

    Subclass it and override `build_model`, `build_optimizer` and `compute_loss` (see `Task` for
    the other methods), or pass `model`, `optimizer` and `loss_fn`.

    Args: What to train
        model: a `keras.Model` or `tf.Module`, or a function that returns a new one. Only the
            default strategy accepts a model object.
        optimizer: a Keras optimizer, its name, or a function that returns a new one. Only the
            default strategy accepts an optimizer object. Its own clipping and EMA apply to the
            summed, unscaled gradients of applied steps. A function may return several optimizers
            in a dict, each under the name of the model's attribute whose variables it updates.
        loss_fn: a `keras.losses.Loss`, its name, or a function of (y_true, y_pred) that returns
            one loss per example.
        metrics: a function that returns new Keras metrics in a dict by name.

    Args: Precision and loss scale
        precision: the Keras dtype policy under which the model is built. One of "float32",
            "mixed_float16" and "mixed_bfloat16"; weights are float32 in all of them.
        loss_scale: "auto" (dynamic for float16, otherwise none), a number for a fixed scale, None
            for no scaling, a rule of `scaling`, or the name of a rule or preset as
            `scaling.parse_rule` takes it.

    Args: Update
        num_microbatches: number of parts to cut each replica's share of a batch into. More parts
            need less memory.
        global_clipnorm: upper bound on the global norm of all gradients. None sets no bound.
        clipnorm: upper bound on the norm of each variable's gradient. None sets no bound.
        clipvalue: upper bound on the magnitude of each gradient element. None sets no bound. At
            most one of the three bounds may be set.
        ema_momentum: momentum of a moving average of the weights, between 0 and 1. Evaluation and
            export use the average. None keeps no average.
        alternate_optimizers: whether several optimizers take turns, each computing its gradients
            after the ones before it have been applied, instead of all at the old weights. Either
            way all of them are applied, or none.

    Args: Where and how it runs
        model_dir: folder for checkpoints, `metrics.jsonl` and TensorBoard files. A run that finds
            a checkpoint there resumes from it. None writes nothing.
        strategy: a name for `strategies.create`, or a `tf.distribute.Strategy`.
        steps_per_loop: number of steps in one graph call. The host does nothing between them.
        jit_compile: what XLA compiles. True: each replica's forward and backward pass.
            "elementwise": only the element-wise operations in them. "update": the optimizer's
            update, on a single replica. False: nothing. "auto": half precision is compiled where
            a CPU would compute it in scalar loops; otherwise a run of 1,000 steps or more
            measures which is fastest before its first step, and keeps to it. Results differ by
            rounding.
        seed: seed of initial weights, shuffling and all random numbers in steps. From 0 to
            2^32 - 1. Python's, NumPy's and TensorFlow's global seeds are set to it when the
            model is built. None leaves those alone and draws a random seed for the steps.

    Args: Checkpoints and resuming
        checkpoint_interval: number of steps between checkpoints. None saves only at the end of
            the run and when it is stopped.
        checkpoint_secs: minimum number of seconds between checkpoints; may be combined with
            checkpoint_interval. None sets no time.
        max_to_keep: number of checkpoints to keep.
        async_checkpoint: whether checkpoints are written in a background thread, from a copy of
            the variables.
        keep_best: number of models to keep in `model_dir/best`, those with the best evaluations.
        best_metric: name of the evaluation result that says which models are best.
        best_is: "lowest" or "highest": which value of best_metric is best.
        data_resume: how a resumed run finds its place in the data. "exact" restores the saved
            position. "skip" reads and drops as many batches as were used. "restart" begins a new
            pass.
        allow_changes: what may differ from the run that is resumed: "precision", "loss_scale"
            (the new rule begins at its initial scale), "seed", "num_replicas", "global_batch",
            "data" (a change of one of the last two, or of the seed, restarts the data).
        init_from: a checkpoint, a model_dir, or a file of Keras weights, whose weights a new run
            begins with. Nothing else is taken over. It has no effect on a resumed run.

    Args: Skipped steps
        on_overflow: what to do with a batch whose gradients overflow. "skip" leaves it out.
            "retry" attempts it again in the same step, at the next scale of the rule, up to
            max_retries times.
        max_retries: number of further attempts with on_overflow="retry".
        on_nonfinite_loss: what to do with a batch whose unscaled loss is inf or NaN. "skip" leaves
            it out. "raise" ends the run.
        max_consecutive_skips: number of skipped steps in a row after which a run counts as stuck.
        on_stuck: what to do after max_consecutive_skips skipped steps in a row. "raise" ends the
            run with an error that explains why. "hold" keeps waiting, warns at every log line,
            and ends the run after ten times as many. "float32" computes one step in float32
            (Keras models only) and goes on.
        attribute_causes: whether the loss scale moves only after overflows that a smaller scale
            may cure. False backs off after every skipped step, as other systems do.

    Args: Records of overflows
        max_overflow_records: number of skipped steps to keep in `model_dir/overflows`, the latest
            ones, so that they can be run again. Of several in a row only the first is kept. 0
            keeps none and costs nothing.
        max_overflow_bytes: upper bound on their total size in bytes.

    Args: Log and monitoring
        log_interval: number of steps between log lines.
        verbose: what to print. True: a bar on a terminal, lines anywhere else. "detailed": lines
            on a terminal too, every skipped step, and every variable. False: nothing.
        profile_steps: the first and the last step to profile for TensorBoard; None profiles none.
        record_gradients: whether to record gradient magnitudes, for reports and the simulator.
            `metrics.jsonl` then holds each step's largest magnitude and counts by exponent, which
            `python -m scaling.simulate` reads. Costs a few passes over the gradients per step.
        divergence: a `trainer.Divergence`: when a run counts as diverged and is rolled back.
        actions: `trainer.Action`s: functions to call every so many steps or seconds.

    Raises:
        TypeError, ValueError: for an argument that is not allowed; here or, if only the model or
            the data can tell, before the first step.

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

    _parts: Parts  # made by `_start`, when data has come

    def __init__(
        self,
        *,
        # What to train.
        model: ModelArgument = None,
        optimizer: OptimizerArgument = None,
        loss_fn: LossArgument = None,
        metrics: MetricsArgument = None,
        # Precision and loss scale.
        precision: str = PrecisionConfig.precision,
        loss_scale: LossScaleArgument = PrecisionConfig.loss_scale,
        # Update.
        num_microbatches: int = UpdateConfig.num_microbatches,
        global_clipnorm: float | None = UpdateConfig.global_clipnorm,
        clipnorm: float | None = UpdateConfig.clipnorm,
        clipvalue: float | None = UpdateConfig.clipvalue,
        ema_momentum: float | None = UpdateConfig.ema_momentum,
        alternate_optimizers: bool = UpdateConfig.alternate_optimizers,
        # Where and how it runs.
        model_dir: str | pathlib.Path | None = RunConfig.model_dir,
        strategy: str | tf.distribute.Strategy = RunConfig.strategy,
        steps_per_loop: int = RunConfig.steps_per_loop,
        jit_compile: bool | str = RunConfig.jit_compile,
        seed: int | None = RunConfig.seed,
        # Checkpoints and resuming.
        checkpoint_interval: int | None = CheckpointConfig.checkpoint_interval,
        checkpoint_secs: float | None = CheckpointConfig.checkpoint_secs,
        max_to_keep: int = CheckpointConfig.max_to_keep,
        async_checkpoint: bool = CheckpointConfig.async_checkpoint,
        keep_best: int = CheckpointConfig.keep_best,
        best_metric: str = CheckpointConfig.best_metric,
        best_is: str = CheckpointConfig.best_is,
        data_resume: str = CheckpointConfig.data_resume,
        allow_changes: Sequence[str] = CheckpointConfig.allow_changes,
        init_from: str | pathlib.Path | None = CheckpointConfig.init_from,
        # Skipped steps.
        on_overflow: str = SkipPolicy.on_overflow,
        max_retries: int = SkipPolicy.max_retries,
        on_nonfinite_loss: str = SkipPolicy.on_nonfinite_loss,
        max_consecutive_skips: int = SkipPolicy.max_consecutive_skips,
        on_stuck: str = SkipPolicy.on_stuck,
        attribute_causes: bool = SkipPolicy.attribute_causes,
        # Records of overflows.
        max_overflow_records: int = OverflowRecordConfig.max_overflow_records,
        max_overflow_bytes: int = OverflowRecordConfig.max_overflow_bytes,
        # Log and monitoring.
        log_interval: int = MonitorConfig.log_interval,
        verbose: bool | str = MonitorConfig.verbose,
        profile_steps: Sequence[int] | None = MonitorConfig.profile_steps,
        record_gradients: bool = MonitorConfig.record_gradients,
        divergence: Divergence | None = MonitorConfig.divergence,
        actions: Sequence[Action] = MonitorConfig.actions,
        **unknown: object,
    ) -> None:
        """Checks the arguments. Nothing is built until data comes."""
        arguments = dict(locals())
        check_no_unknown_arguments(unknown, Trainer.__init__)
        super().__init__(model, optimizer, loss_fn, metrics)
        self.skip_policy: SkipPolicy = take_fields(SkipPolicy, arguments)
        self.checkpoint_config: CheckpointConfig = take_fields(CheckpointConfig, arguments)
        self._take_run(take_fields(RunConfig, arguments))
        self._take_precision(take_fields(PrecisionConfig, arguments))
        self._take_update(take_fields(UpdateConfig, arguments))
        self._take_records(take_fields(OverflowRecordConfig, arguments))
        self._take_monitor(take_fields(MonitorConfig, arguments))
        check_keep_count("keep_best", self.checkpoint_config.keep_best, model_dir, "Models")
        self.jit_compile = initial_compile_mode(jit_compile, self.precision, self.strategy)
        self._compile_mode_open = jit_compile == "auto"
        self._started = self._evaluating = self._introduced = False
        self._trained_on: tuple[Any, DataPosition] | None = None
        self.stop_asked = False

    def _take_run(self, config: RunConfig) -> None:
        self.strategy = config.resolved_strategy
        self.strategy_name = config.strategy if isinstance(config.strategy, str) else None
        # One of several workers prints and writes files; all of them read files.
        self.is_chief = strategies.capabilities(self.strategy).is_chief
        self.model_dir = config.folder
        self.steps_per_loop = config.steps_per_loop
        self.seed = config.seed

    def _take_precision(self, config: PrecisionConfig) -> None:
        self.precision = config.resolved
        self.rule = config.rule
        # The argument itself, if a record of an overflow can hold it.
        plain = config.loss_scale is None or isinstance(config.loss_scale, (str, float, int))
        self.loss_scale_argument = config.loss_scale if plain else "auto"

    def _take_update(self, config: UpdateConfig) -> None:
        self.num_microbatches = config.num_microbatches
        self.clip = config.clip
        self.ema_momentum = config.ema_momentum
        self.alternate_optimizers = config.alternate_optimizers

    def _take_records(self, config: OverflowRecordConfig) -> None:
        self.max_overflow_records = config.max_overflow_records
        self.max_overflow_bytes = config.max_overflow_bytes
        check_keep_count(
            "max_overflow_records", self.max_overflow_records, self.model_dir, "Records"
        )
        check_recordable(self.max_overflow_records, self.strategy)

    def _take_monitor(self, config: MonitorConfig) -> None:
        config.check_model_dir(self.model_dir)
        self.log_interval = config.log_interval
        self.style = resolve_style(config.verbose, shown=self.is_chief)
        self.profile_steps = config.profile_steps
        self.record_gradients = config.record_gradients
        self.actions = list(config.actions)
        self.divergence = config.divergence
        self._watch = LossWatch(config.divergence) if config.divergence else None

    # Model and optimizer are built when they are first asked for, so that a subclass may set its
    # own attributes after super().__init__().

    @functools.cached_property
    def model(self) -> Model:
        """The model, made by `build_model` on first use, under the precision's dtype policy."""
        if self.seed is not None:
            keras.utils.set_random_seed(self.seed)
        with self.strategy.scope(), dtype_policy(self.precision):
            return self.build_model()

    @functools.cached_property
    def optimizer(self) -> Any:
        """The optimizer, or several by name, made by `build_optimizer` on first use."""
        with self.strategy.scope():
            return self.build_optimizer()

    @property
    def metrics(self) -> dict[str, keras.metrics.Metric]:
        """The metrics in use: those of the training or, during an evaluation, its own."""
        if not self._started:
            return {}
        return self._parts.metrics.eval if self._evaluating else self._parts.metrics.train

    @property
    def totals(self) -> Totals:
        """How the steps so far have ended. Waits for the device."""
        self._check_started("totals")
        return Totals.from_state(self._parts.state)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step. Waits for the device."""
        self._check_started("loss_scale")
        return float(self._parts.state.loss_scaler.loss_scale)

    @without_autograph
    def train_step(self, batch: Batch) -> StepReport:
        """Attempts one update with a global batch. Called in cross-replica context, in a graph.

        Args:
            batch: the global batch; each replica takes its share.

        Returns:
            The step's report, each field of shape ().
        """
        return attempt_step(batch, self._parts.plan, self._parts.state)

    @without_autograph
    def eval_step(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Evaluates one global batch. Called in cross-replica context, in a graph.

        Args:
            batch: the global batch; each replica takes its share.

        Returns:
            The weighted sum of its losses, and the sum of its weights: shape (), float32.
        """
        return self._parts.evaluator.evaluate_batch(batch)

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
                Finite data is repeated.
            steps: the step to reach, counted from the beginning of the run: the same command
                resumes a run from its checkpoint.
            epochs: the same in passes over `train_data`; give one of the two.
            global_batch: the batch size, if `train_data` is arrays.
            eval_data: data to evaluate on during training; None evaluates nothing. Arrays are
                batched like the training data.
            eval_interval: number of steps between evaluations; None evaluates at the end only.

        Returns:
            A summary of the run.

        Raises:
            ValueError, TypeError: if data, model or optimizer cannot be trained.
            TrainingStuckError: if `max_consecutive_skips` steps in a row were skipped, or the
                weights, or with on_nonfinite_loss="raise" a loss, were inf or NaN.
            DataError: if the data raises, or ends although its cardinality is infinite.
            CheckpointError: if a checkpoint cannot be written; earlier ones stay as they are.
            DivergedError: see `Divergence`.
            WorkerLostError: if another worker's process has ended or no longer responds.
            SystemExit, KeyboardInterrupt: after SIGTERM (exit code 75) and SIGINT, once the run is
                saved.
        """
        began = time.perf_counter()
        check_writable(self.model_dir if self.is_chief else None)
        self.stop_asked = False
        if self._started:
            self._parts.stop.assign(value=False)
        with StopSignals(self.stop) as signals:
            data = batches(train_data, "train_data", self.strategy, global_batch, self.seed or 0)
            target = target_step(steps, epochs, data)
            replicas = self.strategy.num_replicas_in_sync
            strategies.check_divisible(data.global_batch, replicas, self.num_microbatches)
            evaluate = self._evaluation(eval_data, eval_interval, data.global_batch)
            self._start(data.first)
            results = ["loss", *self._parts.metrics.eval]
            self.checkpoint_config.check_results(results if evaluate else None)
            log = self._new_log()
            choice = self._settle_compile_mode(data, target, log)
            request = TrainRequest(target, evaluate, eval_interval, self._export_into)
            position = self._position(train_data, data)
            loop = OuterLoop(self, self._parts, position, self._watch, log, request)
            loop.resume()
            if not self._introduced:
                loop.introduce()
                self._introduced = True
            if choice:
                log.say(str(choice))
            self.on_train_begin()
            loop.run()
            summary = loop.conclude(began)
            self.on_train_end(summary)
            asked = strategies.any_worker(bool(signals.received), self.strategy)
            signals.end_process(others=asked)
        return summary

    def _settle_compile_mode(self, data: Batches, target: int, log: RunLog) -> Choice | None:
        """Decides what XLA compiles from the next step on, if that is not decided yet."""
        if not self._compile_mode_open:
            return None
        self._compile_mode_open = False
        with log.console.status("measuring what XLA should compile ..."):
            steps_left = target - self.totals.attempted
            choice = settle(self, self._parts, data, steps_left, self._use)
        self.jit_compile = self._parts.plan.jit_compile
        return choice

    def _use(self, parts: Parts) -> None:
        """Goes on with other parts."""
        self._parts = parts

    def _new_log(self) -> RunLog:
        shares = self.strategy.num_replicas_in_sync * self.num_microbatches
        names = self._parts.plan.variable_names
        model_dir = self.model_dir if self.is_chief else None
        return RunLog(model_dir, self.style, names, self.precision.name, shares)

    def _position(self, train_data: Any, data: Batches) -> DataPosition:
        """Returns the position in the data: that of the last call, unless the data is different."""
        before, self._trained_on = self._trained_on, None
        if before and same_data(before[0], train_data, before[1].data.global_batch, data):
            position = before[1]
        else:
            position = DataPosition(data, self.checkpoint_config.data_resume)
            # Workers that each shuffle in a different order would train on some data twice.
            multi_worker = strategies.capabilities(self.strategy).multi_worker
            if (self.model_dir or multi_worker) and not are_arrays(train_data):
                position.check_savable()
        self._trained_on = train_data, position
        return position

    def stop(self) -> None:
        """Asks `train` to save the run and end after the step that is running.

        It may be called from any thread. With several workers it is enough if one of them calls
        it: all end after the same step.
        """
        self.stop_asked = True
        if self._started:
            self._parts.stop.assign(value=True)

    def evaluate(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        precision: str = "float32",
        averaged: bool | None = None,
    ) -> dict[str, float]:
        """Returns the weighted mean loss and the metrics over a whole data set.

        Args:
            data: as for `train`; arrays are not shuffled.
            global_batch: the batch size, if `data` is arrays.
            precision: "float32" computes a Keras model in float32 on the same weights; "train"
                computes it as in training. A `tf.Module` always computes as in training.
            averaged: whether to use the moving average of the weights; None uses it if the run
                keeps one.

        Returns:
            "loss" and every metric by name. The loss does not include `model.losses`.
        """
        found = batches(data, "data", self.strategy, global_batch)
        check_ends(found, "data")
        self._start(found.first)
        if self.model_dir and not self.totals.attempted:
            logging.warning("There is no checkpoint in %s: the model is untrained.", self.model_dir)
        return self._evaluate(found, precision, averaged, stoppable=False) or {}

    def predict(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        precision: str = "float32",
        averaged: bool | None = None,
    ) -> Any:
        """Returns the model's outputs for a whole data set, in its order.

        Args:
            data: as for `evaluate`; if it yields tuples, the model is called with the first item.
            global_batch: the batch size, if `data` is arrays.
            precision: as for `evaluate`.
            averaged: as for `evaluate`.

        Returns:
            NumPy arrays in the structure of `predict_batch`; the first dimension is the example.
        """
        found = batches(data, "data", self.strategy, global_batch)
        check_ends(found, "data")
        self._start(found.first, lambda batch, training: self.predict_batch(batch))  # noqa: ARG005
        with evaluated_weights(self._parts.plan, averaged):
            return self._parts.evaluator.predict(found.dataset, precision)

    def dry_run(
        self, train_data: Any, *, global_batch: int | None = None, eval_data: Any = None
    ) -> DryRun:
        """Tries, in seconds, everything that a long run does, and puts it all back bit for bit.

        It takes two steps on real batches, evaluates one batch, saves and restores a checkpoint in
        a temporary folder, compares the replicas, and estimates the memory.

        Args:
            train_data: as for `train`.
            global_batch: the batch size, if the data is arrays.
            eval_data: as for `train`.

        Returns:
            The findings, which can be printed. `.ok` is whether everything worked.

        Raises:
            ValueError: with several workers or parameter servers.
            TypeError, ValueError: for the reasons for which `train` raises them.
        """
        check_one_process("dry_run", self.strategy)
        data = batches(train_data, "train_data", self.strategy, global_batch, self.seed or 0)
        evaluate = None
        if eval_data is not None:
            found = self._read_eval_data(eval_data, data.global_batch)
            one = dataclasses.replace(found, dataset=found.dataset.take(1))
            evaluate = functools.partial(self._evaluate, one, "float32", None, stoppable=False)
        self._start(data.first)
        return dry_run(self, self._parts, data, evaluate)

    def overfit_one_batch(
        self, train_data: Any, steps: int = 100, *, global_batch: int | None = None
    ) -> Overfit:
        """Trains on the first batch alone, and puts everything back bit for bit.

        If model, loss and learning rate work together, the loss of one batch comes close to 0. If
        it does not, more data will not help.

        Args:
            train_data: as for `train`.
            steps: number of steps.
            global_batch: the batch size, if the data is arrays.

        Returns:
            The loss of every step, which can be printed.

        Raises:
            ValueError: with several workers or parameter servers.
        """
        check_one_process("overfit_one_batch", self.strategy)
        check_count("steps", steps)
        data = batches(train_data, "train_data", self.strategy, global_batch, self.seed or 0)
        self._start(data.first)
        return overfit(self, self._parts, data, steps)

    def export(
        self,
        path: str | pathlib.Path,
        *,
        averaged: bool | None = None,
        precision: str = "train",
        compare_on: Any = None,
    ) -> float | None:
        """Writes a Keras model, for others to use.

        Args:
            path: a file that ends in `.keras`; or a folder, for a SavedModel.
            averaged: as for `evaluate`.
            precision: "train" writes the model as it is: float32 weights, and layers that compute
                in the precision they were trained in. "float32", "float16" and "bfloat16" write
                weights and layers of that dtype.
            compare_on: inputs for the model. The written model is loaded and must predict the
                same for them, up to rounding.

        Returns:
            With `compare_on`, the largest difference as a fraction of the largest output.

        Raises:
            TypeError, ValueError: if `path` is another kind of file; if the model is not a Keras
                model; or if the predictions differ by more than 32 roundings.
        """
        self._check_started("export")
        check_export(self.model, path, precision)
        with evaluated_weights(self._parts.plan, averaged):
            return export(self.model, pathlib.Path(path), precision, compare_on)

    def replay(self, overflow: str | pathlib.Path) -> Replay:
        """Runs a skipped step again that the flight recorder has kept (L18).

        The model's variables are set to the recorded values and keep them, so use a separate
        trainer.

        Args:
            overflow: a folder `model_dir/overflows/step-*`.

        Returns:
            The recorded verdict, the verdict now, and the first layer that was not finite.

        Raises:
            ValueError: if the folder is not a record, or the record is of another model or of
                other settings.
        """
        check_path("overflow", overflow, "runs/digits/overflows/step-00000120")
        record, dataset, state = read_record(pathlib.Path(overflow))
        if self._compile_mode_open and not self._started:
            self.jit_compile = record.setting["jit_compile"]
        check_setting(record.setting, recorded_settings(self))
        self._start(next(iter(dataset)))
        return rerun_step(record, dataset, state, self._parts.plan)

    def _evaluation(
        self, eval_data: Any, eval_interval: int | None, global_batch: int
    ) -> Callable[[], Results | None] | None:
        """Returns a function that evaluates during training; None if there is no `eval_data`."""
        if eval_interval is not None:
            check_count("eval_interval", eval_interval)
        if eval_data is None:
            if eval_interval is not None:
                raise ValueError(
                    f"`eval_interval` must be None without `eval_data`; got {eval_interval}. There "
                    "is nothing to evaluate on. Pass eval_data= as well."
                )
            return None
        found = self._read_eval_data(eval_data, global_batch)
        check_ends(found, "eval_data")
        return functools.partial(self._evaluate, found, "float32", averaged=None, stoppable=True)

    def _read_eval_data(self, eval_data: Any, global_batch: int | None) -> Batches:
        """Reads the data to evaluate on during training; arrays are batched like the training's."""
        batch_size = global_batch if are_arrays(eval_data) else None
        return batches(eval_data, "eval_data", self.strategy, batch_size)

    def _export_into(self, folder: pathlib.Path) -> None:
        """Writes the model as it was evaluated into a folder."""
        with evaluated_weights(self._parts.plan, averaged=None):
            export_model(self.model, folder)

    def _evaluate(
        self, found: Batches, precision: str, averaged: bool | None, *, stoppable: bool
    ) -> Results | None:
        """Returns the results of an evaluation; None if it may be stopped, and was."""
        self._evaluating = True
        try:
            with evaluated_weights(self._parts.plan, averaged):
                return self._parts.evaluator.evaluate(found.dataset, precision, stoppable=stoppable)
        finally:
            self._evaluating = False

    def _start(self, batch: Batch, forward: Forward | None = None) -> None:
        """Builds what is not built yet, checks it, and restores a checkpoint if there is one.

        Args:
            batch: the first batch.
            forward: (batch, training) -> anything: calls the model, if it needs that to be built;
                None calls `compute_loss`.
        """
        if self._started:
            return
        self._parts = build(self, batch, forward or self.compute_loss)
        self._started = True
        self._parts.stop.assign(self.stop_asked)  # somebody may have asked while it was built

    def _check_started(self, name: str) -> None:
        """Raises RuntimeError if the trainer has not seen any data yet."""
        if not self._started:
            raise RuntimeError(
                f"`{name}` must be used after train, evaluate or predict; got a trainer that has "
                "not seen any data. The first batch builds the model and restores the run. Call "
                "one of these methods first."
            )
