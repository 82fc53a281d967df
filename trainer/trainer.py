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

import scaling
import strategies
from trainer.base.argument_checks import (
    check_bool,
    check_count,
    check_ema_momentum,
    check_keep_count,
    check_no_unknown_arguments,
    check_path,
    check_seed,
    check_writable,
)
from trainer.base.autograph import without_autograph
from trainer.checkpoint.best import export_model
from trainer.config.checkpoint_config import Saving
from trainer.config.resolve import (
    check_recordable,
    check_trial,
    dtype_policy,
    resolve_rule,
    resolve_strategy,
    warn_of_conflicts,
)
from trainer.config.skip_policy import SkipPolicy
from trainer.data.batches import Batches, are_arrays, batches, check_ends, same_data, target_step
from trainer.data.iterator_state import DataPosition
from trainer.evaluation.ema_weights import evaluated_weights
from trainer.evaluation.export import check_export, export
from trainer.log.console import resolve_style
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals, TrainSummary
from trainer.monitor.actions import Action, check_actions
from trainer.monitor.divergence import Divergence, LossWatch, check_divergence
from trainer.monitor.preemption import StopSignals
from trainer.monitor.profiling import check_profile
from trainer.replay.recorder import read_record
from trainer.replay.rerun import Replay, check_setting, rerun_step
from trainer.run.build import Parts, build, setting_of
from trainer.run.compile_autotune import Choice, initial_compile_mode, settle
from trainer.run.dry_run import DryRun, Overfit, dry_run, overfit
from trainer.run.outer_loop import Training
from trainer.step import Clip, StepReport, attempt_step
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
            the summed, unscaled gradients of applied steps. A function may return several, by
            the names of the model's attributes whose variables they move.
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
        clipnorm: the bound on the norm of each variable's gradient, or None.
        clipvalue: the bound on each element's magnitude, or None; at most one of the three.
        ema_momentum: how much of the old a moving average of the weights keeps at each update;
            evaluation and export then use the average. None keeps none.
        alternate_optimizers: whether several optimizers move one after the other, each at the
            weights that those before it leave, instead of all at the old weights. All move, or
            none.
        steps_per_loop: steps in one graph call; the host does nothing in between.
        checkpoint_interval: steps between checkpoints; None saves at the end only, and when the
            run is stopped.
        checkpoint_secs: seconds between checkpoints, at least; may be given beside the steps.
        max_to_keep: how many checkpoints stay.
        async_checkpoint: whether to write them in a thread, from a copy of the variables.
        keep_best: of how many evaluations `model_dir/best` keeps the model.
        best_metric: which result of an evaluation says which are best.
        best_is: "lowest" or "highest".
        data_resume: how a run that is taken up again finds its place in the data: "exact" saves
            the position; "skip" reads and drops as many batches as were taken; "restart" begins
            a new pass.
        allow_changes: what may differ from the run in `model_dir` that is taken up:
            "precision", "loss_scale" (the new rule begins at its first scale), "seed",
            "num_replicas", "global_batch", "data" (the data begin anew after a change of one of
            the last two, and of the seed).
        init_from: whose weights to begin with, if there is no checkpoint in `model_dir`: a
            checkpoint, a `model_dir`, or a file of Keras weights. Nothing else is taken over.
        divergence: when the run counts as diverged and is taken back: a `trainer.Divergence`.
        log_interval: steps between lines of the log.
        verbose: True shows a bar on a terminal, and lines anywhere else; "detailed" also the
            lines on a terminal, every skipped step, and every variable; False shows nothing.
        profile_steps: the first and the last step to profile, for TensorBoard; None profiles none.
        jit_compile: what XLA compiles: True, each replica's forward and backward pass;
            "elementwise", of these what is no product, convolution or pooling; "update", the
            optimizer's update, on one replica; False, nothing. "auto" compiles half precision
            that a CPU computes in scalar loops; else it measures which is fastest, once, before
            the first step of a run of 1,000 steps or more, and keeps to it. Results differ by
            rounding.
        seed: for initial weights, for shuffling arrays and for what steps draw; sets Python's,
            NumPy's and TensorFlow's seeds when the model is built, from 0 to 2^32 - 1. None leaves
            those alone, and takes one by chance for what steps draw.
        on_overflow: "skip" leaves out a batch whose gradients overflow; "retry" attempts it
            again in the same step, at the next scale that the rule comes to, up to
            `max_retries` times. Nothing else differs between attempts.
        max_retries: see there.
        attribute_causes: whether the loss scale moves only after overflows that a smaller scale
            may cure; False backs off after every skip, as other systems do.
        on_nonfinite_loss: "skip" leaves out a batch whose unscaled loss is inf or NaN; "raise"
            ends the run.
        max_consecutive_skips: how many skipped steps in a row are too many.
        on_stuck: what then happens: "raise" ends the run with an error that says why; "hold"
            waits, warns at every log line, and ends it after ten times as many; "float32"
            computes one step in float32, which only a Keras model can, and goes on.
        max_overflow_records: how many skipped steps are kept in `model_dir/overflows`, the
            latest ones, to be run again; only the first of a row is. 0 keeps none and costs
            nothing.
        max_overflow_bytes: how much room they may take together.
        actions: `trainer.Action`s: what else to do every so many steps or seconds.
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

    _parts: Parts  # made by `_start`, when data has come

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
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        ema_momentum: float | None = None,
        alternate_optimizers: bool = False,
        steps_per_loop: int = 10,
        checkpoint_interval: int | None = None,
        checkpoint_secs: float | None = None,
        max_to_keep: int = 5,
        async_checkpoint: bool = False,
        keep_best: int = 0,
        best_metric: str = "loss",
        best_is: str = "lowest",
        data_resume: str = "exact",
        allow_changes: Sequence[str] = (),
        init_from: str | pathlib.Path | None = None,
        divergence: Divergence | None = None,
        log_interval: int = 100,
        verbose: bool | str = True,
        profile_steps: Sequence[int] | None = None,
        jit_compile: bool | str = "auto",
        seed: int | None = None,
        on_overflow: str = "skip",
        max_retries: int = 40,
        attribute_causes: bool = True,
        on_nonfinite_loss: str = "skip",
        max_consecutive_skips: int = 100,
        on_stuck: str = "raise",
        max_overflow_records: int = 0,
        max_overflow_bytes: int = 2**30,
        record_gradients: bool = False,
        actions: Sequence[Action] = (),
        **unknown: Any,
    ) -> None:
        """Checks the arguments. Nothing is built until data comes."""
        check_no_unknown_arguments(unknown, Trainer.__init__)
        super().__init__(model, optimizer, loss_fn, metrics)
        check_path("model_dir", model_dir, "runs/digits", optional=True)
        check_path("init_from", init_from, "runs/digits/ckpt-1000", optional=True)
        check_count("num_microbatches", num_microbatches)
        check_count("steps_per_loop", steps_per_loop)
        check_count("log_interval", log_interval)
        check_count("max_overflow_bytes", max_overflow_bytes)
        check_keep_count("max_overflow_records", max_overflow_records, model_dir, "Records")
        check_keep_count("keep_best", keep_best, model_dir, "Models")
        check_bool("alternate_optimizers", alternate_optimizers)
        check_profile(profile_steps, model_dir)
        check_bool("record_gradients", record_gradients)
        check_ema_momentum(ema_momentum)
        check_seed(seed)
        check_actions(actions)
        check_divergence(divergence, model_dir)
        self.saving = Saving(
            checkpoint_interval,
            checkpoint_secs,
            max_to_keep,
            async_checkpoint,
            keep_best,
            best_metric,
            best_is,
            data_resume,
            allow_changes,
            pathlib.Path(init_from) if init_from is not None else None,
        )
        self.skip_policy = SkipPolicy(
            on_overflow,
            max_retries,
            on_nonfinite_loss,
            max_consecutive_skips,
            on_stuck,
            attribute_causes,
        )
        self.clip = Clip(global_clipnorm, clipnorm, clipvalue)
        self.precision = scaling.Precision(precision)
        warn_of_conflicts(loss_scale, self.precision)
        self.rule = resolve_rule(loss_scale, self.precision)
        # As it was typed, if it can be: a record of an overflow says it.
        plain = loss_scale is None or isinstance(loss_scale, (str, float, int))
        self.loss_scale_argument = loss_scale if plain else "auto"
        self.strategy = resolve_strategy(strategy)
        # Of several workers one prints and keeps files. All read them.
        self.is_chief = strategies.is_chief(self.strategy)
        check_recordable(max_overflow_records, self.strategy)
        self.strategy_name = strategy if isinstance(strategy, str) else None
        self.model_dir = pathlib.Path(model_dir) if model_dir is not None else None
        self.num_microbatches = num_microbatches
        self.ema_momentum = ema_momentum
        self.alternate_optimizers = alternate_optimizers
        self.steps_per_loop = steps_per_loop
        self.log_interval = log_interval
        self.style = resolve_style(verbose, shown=self.is_chief)
        self.profile_steps = profile_steps
        self.jit_compile = initial_compile_mode(jit_compile, self.precision, self.strategy)
        self._compilation_open = jit_compile == "auto"
        self.seed = seed
        self.max_overflow_records = max_overflow_records
        self.max_overflow_bytes = max_overflow_bytes
        self.record_gradients = record_gradients
        self.actions = list(actions)
        self.divergence = divergence
        self._watch = LossWatch(divergence) if divergence else None
        self._started = self._evaluating = self._introduced = False
        self._trained_on: tuple[Any, DataPosition] | None = None
        self.stop_asked = False

    # What a run is made of. Built when first asked for, so that a subclass may set its own
    # attributes after super().__init__().

    @functools.cached_property
    def model(self) -> Any:
        """The model, made by `build_model` on first use."""
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
        """The metrics in use: evaluation has its own."""
        return self._parts.metrics[self._evaluating] if self._started else {}

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
    def train_step(self, batch: Any) -> StepReport:
        """Attempts one update with a global batch. Called in cross-replica context, in a graph.

        Args:
            batch: the global batch; each replica takes its share.

        Returns:
            The step's report, each field of shape ().
        """
        return attempt_step(batch, self._parts.plan, self._parts.state)

    @without_autograph
    def eval_step(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
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
            TrainingStuckError: if `max_consecutive_skips` steps in a row were skipped, or the
                weights, or with on_nonfinite_loss="raise" a loss, were inf or NaN.
            DataError: if the data raise, or end though they said that they would not.
            CheckpointError: if a checkpoint cannot be written; those before it are as they were.
            DivergedError: see `Divergence`.
            WorkerLostError: if another worker's process has ended or answers no more.
            SystemExit, KeyboardInterrupt: after SIGTERM, with code 75, and SIGINT; all is saved.
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
            results = ["loss", *self._parts.metrics[True]]
            self.saving.check_results(results if evaluate else None)
            log = self._new_log()
            choice = self._settle_compilation(data, target, log)
            training = Training(
                self,
                self._parts,
                self._position(train_data, data),
                self._watch,
                log,
                target,
                evaluate,
                eval_interval,
                self._export_into,
            )
            training.take_up()
            if not self._introduced:
                training.introduce()
                self._introduced = True
            if choice:
                log.say(str(choice))
            self.on_train_begin()
            training.run()
            summary = training.conclude(began)
            self.on_train_end(summary)
            asked = strategies.any_worker(bool(signals.received), self.strategy)
            signals.end_process(others=asked)
        return summary

    def _settle_compilation(self, data: Batches, target: int, log: RunLog) -> Choice | None:
        """Decides what XLA compiles from the next step on, if that is not decided."""
        if not self._compilation_open:
            return None
        self._compilation_open = False
        with log.console.status("measuring what XLA shall compile ..."):
            left = target - self.totals.attempted
            choice = settle(self, self._parts, data, left, self._use)
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
        """Returns where the run stands in its data: at the beginning, if they are others."""
        before, self._trained_on = self._trained_on, None
        if before and same_data(before[0], train_data, before[1].data.global_batch, data):
            position = before[1]
        else:
            position = DataPosition(data, self.saving.data_resume)
            # Workers that shuffle each in an order of its own would train on some data twice.
            shared = self.model_dir or strategies.has_workers(self.strategy)
            if shared and not are_arrays(train_data):
                position.check_savable()
        self._trained_on = train_data, position
        return position

    def stop(self) -> None:
        """Asks `train` to end after the step that is running; it saves before it does.

        It may be called from any thread. On several workers one that asks is enough: all end after
        the same step.
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
                as in training. A `tf.Module` always computes as in training.
            averaged: whether to use the moving average of the weights; None does if the run
                keeps one.

        Returns:
            "loss" and every metric by name. `model.losses` are not in it.
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
            data: as for `evaluate`; of a tuple, the model is handed the first item.
            global_batch: the batch size, if `data` is arrays.
            precision: as for `evaluate`.
            averaged: as for `evaluate`.

        Returns:
            NumPy arrays in the structure of `predict_batch`; first dimension: the example.
        """
        found = batches(data, "data", self.strategy, global_batch)
        check_ends(found, "data")
        self._start(found.first, lambda batch, training: self.predict_batch(batch))  # noqa: ARG005
        with evaluated_weights(self._parts.plan, averaged):
            return self._parts.evaluator.predict(found.dataset, precision)

    def dry_run(
        self, train_data: Any, *, global_batch: int | None = None, eval_data: Any = None
    ) -> DryRun:
        """Tries, in seconds, what a long run would do, and puts everything back bit for bit.

        Two steps on real batches, one evaluation step, a checkpoint saved (in a temporary folder)
        and restored, a comparison of the replicas, and an estimate of memory.

        Args:
            train_data: as for `train`.
            global_batch: the batch size, if the data are arrays.
            eval_data: as for `train`.

        Returns:
            The findings: print it. `.ok` is whether nothing speaks against a long run.

        Raises:
            ValueError: with several workers or parameter servers.
            TypeError, ValueError: what `train` would raise.
        """
        check_trial("dry_run", self.strategy)
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

        A model and a loss that belong together bring its loss near 0; if they do not, no amount of
        data will help.

        Args:
            train_data: as for `train`.
            steps: how many.
            global_batch: the batch size, if the data are arrays.

        Returns:
            The loss of every step: print it.

        Raises:
            ValueError: with several workers or parameter servers.
        """
        check_trial("overfit_one_batch", self.strategy)
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
            path: a file that ends in `.keras`, or a folder, for a SavedModel.
            averaged: as for `evaluate`.
            precision: "train" writes the model as it is: float32 weights, and layers that compute
                in half precision if they were trained so. "float32", "float16" and "bfloat16"
                write weights and layers of that dtype alone.
            compare_on: inputs for the model. What was written is loaded again, and must predict
                the same but for rounding.

        Returns:
            With `compare_on`, the largest difference, as a share of the largest output.

        Raises:
            TypeError, ValueError: if it is another kind of file, or no Keras model; if the
                predictions differ by more than 32 roundings.
        """
        self._check_started("export")
        check_export(self.model, path, precision)
        with evaluated_weights(self._parts.plan, averaged):
            return export(self.model, pathlib.Path(path), precision, compare_on)

    def replay(self, overflow: str | pathlib.Path) -> Replay:
        """Runs a step again that the flight recorder has kept (L18).

        The model takes the recorded values and keeps them: use a trainer of its own for it.

        Args:
            overflow: a folder `model_dir/overflows/step-*`.

        Returns:
            The recorded verdict, the verdict now, and the first layer that was not finite.

        Raises:
            ValueError: if it is no record, or one of another model or another way to compute.
        """
        check_path("overflow", overflow, "runs/digits/overflows/step-00000120")
        record, dataset, state = read_record(pathlib.Path(overflow))
        if self._compilation_open and not self._started:
            self.jit_compile = record.setting["jit_compile"]
        check_setting(record.setting, setting_of(self))
        self._start(next(iter(dataset)))
        return rerun_step(record, dataset, state, self._parts.plan)

    def _evaluation(
        self, eval_data: Any, eval_interval: int | None, global_batch: int
    ) -> Callable[[], dict[str, float] | None] | None:
        """Reads what to evaluate on while training, before the first step; returns how."""
        if eval_interval is not None:
            check_count("eval_interval", eval_interval)
        if eval_data is None:
            if eval_interval is not None:
                raise ValueError(
                    f"`eval_interval` must be None without `eval_data`; got {eval_interval}. There "
                    "is nothing to evaluate on. Pass eval_data=."
                )
            return None
        found = self._read_eval_data(eval_data, global_batch)
        check_ends(found, "eval_data")
        return functools.partial(self._evaluate, found, "float32", averaged=None, stoppable=True)

    def _read_eval_data(self, eval_data: Any, global_batch: int | None) -> Batches:
        """Reads what is evaluated beside a training; arrays are batched as the training's are."""
        of_arrays = global_batch if are_arrays(eval_data) else None
        return batches(eval_data, "eval_data", self.strategy, of_arrays)

    def _export_into(self, folder: pathlib.Path) -> None:
        """Writes the model as it was evaluated into a folder."""
        with evaluated_weights(self._parts.plan, averaged=None):
            export_model(self.model, folder)

    def _evaluate(
        self, found: Batches, precision: str, averaged: bool | None, *, stoppable: bool
    ) -> dict[str, float] | None:
        """Returns the results of an evaluation, or None if it may be stopped, and was."""
        self._evaluating = True
        try:
            with evaluated_weights(self._parts.plan, averaged):
                return self._parts.evaluator.evaluate(found.dataset, precision, stoppable=stoppable)
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
        self._parts = build(self, batch, forward or self.compute_loss)
        self._started = True
        self._parts.stop.assign(self.stop_asked)  # asked while it was built

    def _check_started(self, name: str) -> None:
        """Raises RuntimeError before there is anything to look at."""
        if not self._started:
            raise RuntimeError(
                f"`{name}` must be asked for after train, evaluate or predict; got a trainer that "
                "has seen no data. The first batch builds the model and restores a run. Call one "
                "of the three before."
            )
