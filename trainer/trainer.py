"""`Trainer`, which holds the state of a run: it builds, trains, logs, saves and evaluates."""

import contextlib
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from absl import logging

import strategies
from scaling.base.argument_checks import check_integer
from trainer.base.argument_checks import as_python, check_choice, local_path
from trainer.base.atomic_files import only_writer
from trainer.base.autograph import without_autograph
from trainer.base.scoped_seed import ScopedSeed, random_numbers_kept
from trainer.callbacks.callback import HOOKS, Callback
from trainer.callbacks.divergence import LossWatch
from trainer.callbacks.monitoring import Monitoring
from trainer.checkpoint.best import export_model
from trainer.checkpoint.settings import Checkpoints
from trainer.data.batches import (
    Batches,
    are_arrays,
    batches,
    check_ends,
    check_length,
    repeat_first_batch,
    same_data,
)
from trainer.data.errors import reason_of
from trainer.data.iterator_state import DataPosition, OnlinePosition
from trainer.data.source_position import position_in
from trainer.data.structures import as_arrays, as_global_batch
from trainer.evaluation.ema_weights import evaluated_weights
from trainer.evaluation.eval_data import (
    EvalData,
    evaluate_each,
    first_batch,
    read_eval_data,
    result_names,
)
from trainer.evaluation.export import export
from trainer.fingerprint import entries_of, texts_of_arrays
from trainer.log.console import RunConsole, resolve_style
from trainer.log.run_log import RunLog
from trainer.log.summary import ENDLESS, History, Totals, TrainSummary
from trainer.log.trackers import Trackers, make_tracker
from trainer.losses.default_batch import all_inputs, warn_of_half_probabilities
from trainer.losses.settings import Losses
from trainer.replay.recorder import read_record
from trainer.replay.rerun import Replay, check_replayable, rerun_step
from trainer.run.adapt import (
    Setup,
    adapted,
    check_unchanged,
    followed,
    must_look_again,
    restored_again,
    setup_of,
    with_metric_variables,
)
from trainer.run.build import (
    Forward,
    build,
    parts_of_plan,
    recorded_computation,
    recorded_settings,
)
from trainer.run.compile_mode import (
    compilable_parts,
    initial_compile_mode,
    mode_of_auto,
    parts_in_mode,
    tracing,
)
from trainer.run.declared import check_agreed, declared_in_call, evaluation_identity, of_data
from trainer.run.listeners import Results, TrainRequest
from trainer.run.lost_worker import worker_loss_explained
from trainer.run.online_loop import OnlineLoop
from trainer.run.outer_loop import OuterLoop
from trainer.run.parts import Parts
from trainer.run.resolve import (
    LossScaleArgument,
    check_one_process,
    dtype_policy,
    resolve_folder,
    resolve_precision,
    resolve_rule,
    resolve_strategy,
    warn_of_conflicts,
)
from trainer.run.stop_signals import StopSignals
from trainer.step import StepReport, attempt_step
from trainer.step.plan import keeping_rows
from trainer.step.settings import Skips, Updates
from trainer.step.types import Batch, MetricsByName, Model
from trainer.step.xla import COMPILE_MODES
from trainer.task import LossArgument, MetricsArgument, ModelArgument, OptimizerArgument, Task

if TYPE_CHECKING:
    from trainer.run.dry_run import DryRun, Overfit

# Attributes that no trace reads, or that the trainer sets itself: setting them traces nothing anew.
UNTRACED = (
    "steps_per_loop",
    "log_interval",
    "actions",
    "callbacks",
    "stop_asked",
    "jit_compile",
    "compile_mode_open",
    "edits",
)


class Trainer(Task):
    """Trains a Keras 3 model or a `tf.Module` with explicit loss scaling, on any strategy.

    Subclass it and override `build_model`, `build_optimizer` and `compute_loss` (see `Task` for
    the other methods), or pass `model`, `optimizer` and `loss_fn`.

    Args: What to train
        model: a `keras.Model`, `keras.Layer` or `tf.Module`, or a function that returns a new one.
            Only the default strategy accepts a model object.
        optimizer: a Keras optimizer, its name, or a function that returns a new one. Only the
            default strategy accepts an optimizer object. The optimizer's own clipping and
            EMA apply to the summed, unscaled gradients of applied steps. A function may return a
            dict of several optimizers. Each key is then the name of an attribute of the model, and
            the optimizer updates the variables of that attribute.
        loss_fn: a `keras.losses.Loss`, its name, or a function of (y_true, y_pred) that returns
            one loss per example; further dimensions are averaged. A Keras loss means what it
            means in `compile`, or is refused: it must give each example its own loss, and its
            reduction must be a mean. For a model with several outputs, a dict or a list of these,
            one for each output, as in `compile`.
        metrics: names, Keras metrics and functions of labels and outputs, in a list or by name in a
            dict, as in `compile`; or one function, which returns a dict of new metrics, keyed by
            name. Of a function in a list or dict, the mean is taken. "accuracy" and
            "crossentropy" stand for the class that fits the cross entropy in `loss_fn`. A metric
            is an example: training and evaluation each make their own from its configuration.
            With a loss for each output, a dict or a list with the metrics of each output: they are
            logged as "OUTPUT_METRIC", and each output's loss as "OUTPUT_loss".

    Args: Precision and loss scale
        precision: the Keras dtype policy under which the model is built. One of "float32",
            "float64", "mixed_float16" and "mixed_bfloat16"; or "mixed_float8", which is
            "mixed_bfloat16" with the products of large dense layers in float8: see
            `convert_to_float8`. None takes Keras's global policy. Weights are float64 in
            "float64", and float32 in all others.
        loss_scale: "auto" (dynamic for float16, otherwise none), a number for a fixed scale, None
            for no scaling, a rule from `scaling`, or the name of a rule or preset that
            `scaling.parse_rule` accepts.

    Args: Where and how it runs
        num_microbatches: number of parts to split each replica's share of a batch into. More parts
            need less memory.
        model_dir: folder for checkpoints, `metrics.jsonl` and TensorBoard files. A run that finds
            a checkpoint there resumes from it. None writes nothing.
        strategy: a name for `strategies.create`, or a `tf.distribute.Strategy`.
        steps_per_loop: number of steps in one graph call, at most 10,000. The host does nothing
            between them.
        jit_compile: what XLA compiles. True: each replica's forward and backward pass.
            "elementwise": only the element-wise operations in them. "update": the optimizer's
            update, on a single replica. "step": the whole step as one program, on a single replica;
            a metric's update and `update_metrics` are part of it. False: nothing. "auto" is "step"
            on a single GPU without microbatches, else False, or True for half precision that
            TensorFlow would compute in scalar loops on this CPU. Where batches have several shapes,
            it compiles no passes, because XLA compiles a program for each. With True and "step",
            evaluations and predictions in the training precision are compiled too, unless XLA
            cannot compute them right.
            The results of different values differ by rounding and by random numbers, and XLA leaves
            out assertions.
        seed: seed of initial weights, shuffling and all random numbers in steps. From 0 to
            2^32 - 1. While the model and the optimizer are built, the global generators of Python,
            NumPy, TensorFlow and Keras are set to it; then all but that of `keras.random` are
            restored. With None, the model draws from the global generators as they are, and a
            random seed is chosen for the steps.

    Args: Log and callbacks
        log_interval: number of steps between log lines.
        verbose: what to print. True: a progress bar on a terminal, lines elsewhere. "detailed":
            lines on a terminal too, with every skipped step and every variable. False: nothing.
        callbacks: a sequence of `trainer.Callback`, whose hooks are called after the trainer's own.
            `trainer.callbacks` has some that are ready to use; a `trainer.Action` calls a function
            every given number of steps or seconds.

    Args: Groups of settings
        losses: a `trainer.Losses`: what a loss returns, and the factors of losses.
        updates: a `trainer.Updates`: clipping, the moving average of the weights, optimizers that
            alternate, and the sum of gradients over replicas.
        checkpoints: a `trainer.Checkpoints`: when checkpoints are written, which are kept, and how
            a run resumes or starts from one.
        skips: a `trainer.Skips`: what to do about steps that cannot be applied.
        monitoring: a `trainer.Monitoring`: profiles, records of gradients, checks of data,
            divergence, and trackers.

    Raises:
        TypeError, ValueError: for an argument that is not allowed. An argument that depends
            on the model or the data is checked before the first step.

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

    _parts: Parts  # set by `_start`, which needs a batch
    _setup: Setup  # what `_parts` were made for

    def __init__(
        self,
        *,
        model: ModelArgument = None,
        optimizer: OptimizerArgument = None,
        loss_fn: LossArgument = None,
        metrics: MetricsArgument = None,
        precision: str | None = None,
        loss_scale: LossScaleArgument = "auto",
        num_microbatches: int = 1,
        model_dir: str | pathlib.Path | None = None,
        strategy: str | tf.distribute.Strategy = "default",
        steps_per_loop: int = 10,
        jit_compile: bool | str = "auto",
        seed: int | None = None,
        log_interval: int = 100,
        verbose: bool | str = True,
        callbacks: Sequence[Callback] = (),
        losses: Losses = Losses(),
        updates: Updates = Updates(),
        checkpoints: Checkpoints = Checkpoints(),
        skips: Skips = Skips(),
        monitoring: Monitoring = Monitoring(),
    ) -> None:
        """Checks and stores the arguments. The model is built when it is first used."""
        arguments, before = dict(locals()), {*vars(self)}
        # First: a strategy may configure the devices, which a metric's variables would initialize.
        self.strategy = resolve_strategy(strategy)
        # With several workers, only the chief prints and writes files; all of them read files.
        self.is_chief = strategies.capabilities(self.strategy).is_chief
        super().__init__(model, optimizer, loss_fn, metrics, losses)
        self.precision = resolve_precision(precision)
        self.rule = resolve_rule(loss_scale, self.precision)
        warn_of_conflicts(loss_scale, self.precision)
        self.model_dir = resolve_folder(model_dir)
        for name in ("num_microbatches", "steps_per_loop", "log_interval"):
            check_integer(name, arguments[name], 1)
        self.num_microbatches = as_python(num_microbatches)
        self.steps_per_loop, self.log_interval = as_python(steps_per_loop), as_python(log_interval)
        check_choice("jit_compile", jit_compile, ("auto", *COMPILE_MODES))
        self.jit_compile = initial_compile_mode(jit_compile, self.precision, self.strategy)
        self.compile_mode_open = jit_compile == "auto"
        self.seed = as_python(seed)
        self._seeded = ScopedSeed(self.seed)
        self.style = resolve_style(verbose, shown=self.is_chief)
        self.callbacks = list(callbacks)
        self.updates, self.checkpoints = updates, checkpoints
        self.skips, self.monitoring = skips, monitoring
        self.trackers = [make_tracker(each) for each in monitoring.trackers]
        self._watch = LossWatch(monitoring.divergence) if monitoring.divergence else None
        self._check_settings()
        self._trained_on: tuple[Any, int | None, DataPosition] | None = None
        self._position: DataPosition | None = None  # of the last call of `train`
        self._loop: OuterLoop | None = None  # what the last call of `train` or its like used
        self._online: OnlineLoop | None = None  # the same of `train_on_batch`, if it can go on
        self._failed: OnlineLoop | None = None  # the same, if an error has ended it
        self.when_training_begins: list[Callable[[], None]] = []  # called when training begins
        self._history = History()
        self._borrowed_metrics: MetricsByName = {}
        self._running: int | None = None  # the thread in which `train` takes steps
        self._averaging = False  # whether the model has averaged weights for the user's program
        self.stop_asked = False
        self._begun = False  # whether a run has begun or was resumed, even without steps to take
        self._introduced = False  # whether the log has the model and the settings
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    "`callbacks` must hold trainer.Callback, and Keras's in KerasCallbacks([...]); "
                    f"got {type(callback).__name__}"
                )
            callback.set_trainer(self)
        self.edits = 0  # how often an attribute was set, or `retrace` called, between two calls
        self._started = self._evaluating = False
        own = {name for name in {*vars(self)} - before if name.startswith("_")}
        self._own = own | {"_parts", "_setup", *UNTRACED}  # from here on, see __setattr__

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. If a program does so between two calls, the next one traces anew."""
        super().__setattr__(name, value)
        if name == "optimizer":
            self.has_optimizer = True
        own = getattr(self, "_own", {name})
        if name not in own and tf.executing_eagerly() and not (self._running or self._evaluating):
            self.edits += 1  # traced methods may read the attribute

    def _check_settings(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        needs_folder = {
            "keep_best": self.checkpoints.keep_best,
            "max_records": self.skips.max_records,
            "profile_steps": self.monitoring.profile_steps,
            "divergence": self.monitoring.divergence,
        }
        for name, value in needs_folder.items():
            if value and self.model_dir is None:
                raise ValueError(f"`{name}` must be left out without `model_dir`; got {value!r}")
        found, records = strategies.capabilities(self.strategy), self.skips.max_records
        if records and found.several_processes:  # no process has the variables of another
            raise ValueError(f"`max_records` must be 0 with several processes; got {records}")
        if self.checkpoints.background and found.asynchronous:  # servers do not share memory
            raise ValueError("`background` must be False with parameter servers; got True")
        if self.monitoring.divergence and not self.checkpoints.enabled:
            raise ValueError("`enabled` must be True with a divergence, which restores checkpoints")

    # The model and the optimizer are built on first use, so that a subclass may set its own
    # attributes after super().__init__().

    @functools.cached_property
    def model(self) -> Model:
        """The model, made by `build_model` on first use, under the precision's dtype policy.

        Its weights are new until `train`, `evaluate` or `predict` restores the newest checkpoint.
        """
        seeded = self._seeded.in_use(from_start=True)
        with tf.init_scope(), seeded, self.strategy.scope(), dtype_policy(self.precision):
            return self.build_model()

    @functools.cached_property
    def optimizer(self) -> Any:
        """The optimizer or a dict of several, made by `build_optimizer` on first use."""
        with tf.init_scope(), self._seeded.in_use(), self.strategy.scope():
            return self.build_optimizer()

    def __repr__(self) -> str:
        """Returns one line that says where the run stands. Waits for the device."""
        name = type(self).__name__
        if not vars(self).get("_started"):  # maybe because the constructor has raised an error
            return f"<{name}: not started>"
        if not tf.executing_eagerly():  # in the graph of a step, no variable can be read
            return f"<{name}: in a graph>"
        totals, replicas = self.totals, self.strategy.num_replicas_in_sync
        parts = [
            f"at step {totals.attempted}, {totals.applied} applied, {totals}",
            self.precision.name,
            f"loss_scale {self.loss_scale:g}",
            f"{replicas} replica{'s' if replicas > 1 else ''}",
        ]
        if self.model_dir:
            parts.append(f"model_dir {str(self.model_dir)!r}")
        return f"<{name}: {', '.join(parts)}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: `copy` and `pickle` would have to copy variables and open files."""
        del protocol
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; see `export`")

    @property
    def metrics(self) -> dict[str, keras.metrics.Metric]:
        """The metrics in use: those of evaluation while it runs, otherwise those of training."""
        if self._borrowed_metrics or not self._started:
            return self._borrowed_metrics
        return self._parts.metrics.eval if self._evaluating else self._parts.metrics.train

    @contextlib.contextmanager
    def using_metrics(self, metrics: MetricsByName) -> Iterator[None]:
        """Context manager in which `metrics` are those in use."""
        self._borrowed_metrics = metrics
        try:
            yield
        finally:
            self._borrowed_metrics = {}

    @property
    def totals(self) -> Totals:
        """The number of steps so far, by outcome. Waits for the device."""
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
            The weighted sum of the losses, and what to divide the sums of all batches by, such as
            the sum of the weights' magnitudes: each of shape (), float32.
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
        eval_steps: int | None = None,
        evaluate_at_start: bool = False,
    ) -> TrainSummary:
        """Trains until the run has attempted `steps` steps, counting all calls and restarts.

        Args:
            train_data: a `tf.data.Dataset` batched to the global batch; or a function that takes a
                `tf.distribute.InputContext` and returns a dataset batched to
                `context.get_per_replica_batch_size(global_batch)`; or arrays, which are shuffled in
                every epoch. Finite data is repeated. Arrays are read when the call begins; later
                changes count in the next call, which then begins a new epoch.
            steps: the step to reach, counted from the beginning of the run, so that the same
                command also resumes a run from its checkpoint. A program may call `train` several
                times, with other data or settings: started again, it repeats calls whose steps have
                all been taken, without effect.
            epochs: the target in passes over `train_data` instead of steps, counted from the
                beginning of the run; passes over other data in earlier calls count, too. Give
                either `steps` or `epochs`.
            global_batch: the batch size, if `train_data` is arrays.
            eval_data: data to evaluate on during training; None evaluates nothing. Arrays are
                batched like the training data. A dict of several data sets, such as
                {"clean": clean, "noisy": noisy}, gives results named "clean/loss", "noisy/loss"
                and so on.
            eval_interval: number of steps between evaluations; None evaluates at the end only.
            eval_steps: the largest number of batches to evaluate of each data set, counted from
                its beginning. None evaluates whole data sets.
            evaluate_at_start: whether to evaluate before the run's first step as well, as step 0.
                A resumed run does not repeat that evaluation.

        Returns:
            A summary of the run.

        Raises:
            ValueError, TypeError: if the data, the model or the optimizer cannot be used.
            TrainingStuckError: if `skips.max_consecutive` steps in a row were skipped; if a weight
                is inf or NaN; or, with on_nonfinite_loss="raise", if a loss is inf or NaN.
            DataError: if reading the data raises an error, or if the data ends although its
                cardinality is infinite.
            CheckpointError: if a checkpoint cannot be written. Earlier checkpoints are unaffected.
            DivergedError: if the run has diverged and cannot be rolled back; see `Divergence`.
            WorkerLostError: if another worker's process has ended or no longer responds.
            RuntimeError: if another process is training in `model_dir`, if another trainer has
                trained there since this one has, or if `train` is called in a hook or an action.
            SystemExit, KeyboardInterrupt: after SIGTERM (exit code 75) and SIGINT, once the run is
                saved.
        """
        began = time.perf_counter()
        self._check_no_run("train")
        folder = self.model_dir if self.is_chief else None
        self._end_online()
        self._withdraw_stop()
        with only_writer(folder), self._with_workers(), StopSignals(self.stop) as signals:
            known, data = self._read_train_data(train_data, steps, epochs, global_batch)
            if eval_interval is not None:
                check_integer("eval_interval", eval_interval, 1)
            evaluated = self._read_eval_data(eval_data, data, eval_steps)
            with RunConsole(self.style).busy("building the model ..."):
                self._start(data.first)
            self._parts.checkpoints.check_only_writer()
            evaluations = self._evaluations(evaluated, eval_interval, at_start=evaluate_at_start)
            log = self._new_log()
            position = known or self._new_position(train_data, data)
            target = self._target(steps, epochs, position)
            if evaluated:
                identity = evaluation_identity(self, eval_data, evaluated, eval_steps)
                self._history.evaluate_on(identity, self.totals.attempted, target)
            due = self._loop.evaluation_due if self._loop else None
            request = evaluations._replace(target=target, due=due)
            check_agreed(
                lambda: declared_in_call(self, self._parts, position, request, evaluated),
                self.strategy,
            )
            self._settle_compile_mode(data, target, log, position)
            loop = OuterLoop(self, self._parts, position, self._watch, log, request, signals)
            self._loop = loop
            self._begin(loop, target, None if known else (train_data, global_batch, position))
            loop.note_setup()
            self._take_steps(loop)
            summary = loop.conclude(began)
            self._call_hook("on_train_end", summary)
            asked = strategies.any_worker(bool(signals.received), self.strategy)
            signals.end_process(others=asked)
        return summary

    def _with_workers(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the loss of another worker is a WorkerLostError."""

        def progress() -> tuple[int, pathlib.Path | None]:
            if not self._started:
                return 0, None
            return self.totals.attempted, self._parts.checkpoints.latest

        if not strategies.capabilities(self.strategy).multi_worker:
            return contextlib.nullcontext()
        return worker_loss_explained(self.strategy, progress)

    def _take_steps(self, loop: OuterLoop) -> None:
        """Calls `on_train_begin` and runs the loop; changes of settings are refused meanwhile."""
        self._running = threading.get_ident()
        try:
            self._call_hook("on_train_begin")
            loop.run()
        finally:
            self._running = None

    def _call_hook(self, hook: str, *arguments: Any) -> None:
        """Calls a hook, unless this call of `train` has been left to a later one."""
        if not self._parts.checkpoints.deferred:
            self.call_hook(hook, *arguments)

    def train_on_batch(self, batch: Any, *, return_aux: bool = False) -> Any:
        """Takes one step with a batch: for data that is made during training.

        A step and what follows it are as in `train`: skipped steps, loss scale, log lines every
        `log_interval` steps, callbacks, and checkpoints every `checkpoints.interval` steps
        and by `save_checkpoint`. The first call builds the model and resumes the run. SIGTERM and
        `stop` do not end anything. docs/online.md has more.

        Args:
            batch: arrays or tensors in the structure that a dataset would yield, such as (x, y).
                The first dimension is the example; its size may differ from call to call.
            return_aux: whether to return the losses and the aux of this batch's examples, too, as
                for a prioritized replay.

        Returns:
            A dict of floats: the weighted mean loss of the batch as "loss", and the training
            metrics over the steps since the last log line, keyed by name. A skipped step returns
            the loss that it had. Without weight the loss is 0; without an applied step the metrics
            are NaN. With `return_aux=True`, a `BatchResult` that has these as `values`, and
            `applied`, `losses` and `aux` of this batch.

        Raises:
            TypeError, ValueError: if the batch, the model or the optimizer cannot be used; with
                several workers or parameter servers; if something waits for the end of an epoch.
            TrainingStuckError, CheckpointError, DivergedError: as for `train`.
            RuntimeError: if it is called while `train` runs, in a hook or an action.
        """
        self._check_no_run("train_on_batch")
        tensors = as_global_batch(batch, whole=self._shapes()["whole"])
        loop = self._online
        # `evaluate` may have traced anew, and a loop that keeps no rows cannot return them.
        if loop and (loop.parts is not self._parts or (return_aux and not loop.parts.plan.kept)):
            loop = None
        if loop is None or must_look_again(loop.parts.plan, self._setup):
            parts = self._start(tensors)
            if loop is None or loop.parts is not parts:
                loop = self._begin_online(tensors, return_aux=return_aux)
        try:
            result = loop.take(tensors)
        except BaseException:
            self._online, self._failed = None, loop  # the next call begins anew
            loop.release()
            raise
        return result if return_aux else result.values

    def restore(self, batch: Any) -> int:
        """Builds the model and resumes the run from its newest checkpoint, without taking a step.

        `train` and `train_on_batch` do so themselves. Call it before them if something that their
        first batch is made with is restored, too, such as the random numbers of an environment that
        `checkpoint_items` returns, or a policy that acts with the model.

        Args:
            batch: as for `train_on_batch`. Its structure, shapes and dtypes count, not its values.

        Returns:
            The number of steps that the run has taken; 0 for a new run.

        Raises:
            TypeError, ValueError: if the batch, the model or the optimizer cannot be used, or if
                the checkpoint is that of another run.
            RuntimeError: if it is called while `train` runs.
        """
        self._check_no_run("restore")
        tensors = as_global_batch(batch, whole=self._shapes()["whole"])
        self._start(tensors)
        return self.totals.attempted

    def _begin_online(self, batch: Batch, *, return_aux: bool = False) -> OnlineLoop:
        """Does what comes before the first step of `train_on_batch`."""
        check_one_process("train_on_batch", self.strategy)
        if self.overrides("on_epoch_end") or any(each.per_epoch for each in self.callbacks):
            raise ValueError("`train_on_batch` has no epochs, which a callback or hook waits for")
        checkpoints = self._parts.checkpoints
        modes = self.checkpoints.data_resume, checkpoints.facts.get("data_resume", "restart")
        place_lost = "data" in checkpoints.facts and "restart" not in modes
        if place_lost and not (self._trained_on or checkpoints.resumed):
            raise ValueError(
                "`train_on_batch` must come after train() with the data of "
                f'{checkpoints.latest}; or pass data_resume="restart"'
            )
        self._end_online()
        self._parts.checkpoints.check_only_writer()
        self._withdraw_stop()
        position = OnlinePosition(batch, self._trained_on[2] if self._trained_on else None)
        if self.compile_mode_open:
            # Not that of a dry run: batches that are passed one by one may have any shape.
            self._parts = parts_in_mode(self.jit_compile, self, self._parts)
        if return_aux:
            parts, plan = self._parts, keeping_rows(self._parts.plan)
            own = parts_of_plan(self, plan, parts.state, parts.stop, parts.metrics)
            self._parts = parts._replace(**own)
        self._parts = compilable_parts(
            self,
            self._parts,
            lambda parts: parts.run_batch.get_concrete_function(batch, tf.constant(0.0)),
        )
        self.compile_mode_open = False
        self.jit_compile = self._parts.plan.jit_compile
        request = TrainRequest(ENDLESS, None, None, None, self._export_into)
        log = self._new_log()
        loop = OnlineLoop(self, self._parts, position, self._watch, log, request)
        self._loop = loop
        try:
            loop.begin(first=not self._introduced)
            self._begun = True
            if not self._introduced:
                self._introduce(loop)
            loop.start_recording()
            loop.note_setup()
            self.call_hook("on_train_begin")
        except BaseException:
            loop.release()
            raise
        self._online = loop
        return loop

    def _end_online(self, *, save: bool = False) -> None:
        """Logs the last steps of `train_on_batch`, if it was called."""
        loop, self._online = self._online, None
        self._failed = None
        if loop:
            loop.close(save=save)

    def retrace(self) -> None:
        """Makes the next call trace the step and the evaluation anew, from the code as it is now.

        In a notebook, each executed cell does so by itself, and in a script a call of `train`,
        `evaluate` or `predict` after an attribute of the trainer was set. Call this after anything
        else that traced code reads has changed: a function, a container, a layer's attribute.
        """
        self._end_online()
        self.edits += 1

    def save_checkpoint(self) -> None:
        """Saves the run after `train_on_batch`, and waits until the checkpoint is written.

        The steps since the last log line are logged, and other processes may write to `model_dir`
        until the next call of `train_on_batch`. After a call that an error or Ctrl-C has ended, the
        steps before it are saved. `train` saves by itself when it ends; then nothing is written.

        Raises:
            ValueError: if there is no `model_dir`, or no checkpoints are written there.
            RuntimeError: while `train` runs; or if an operation of the last step failed, which
                leaves a part of the step.
            CheckpointError: if the checkpoint cannot be written.
        """
        if self.model_dir is None:
            raise ValueError("`model_dir` must be given to save a checkpoint; got None")
        if not self.checkpoints.enabled:
            raise ValueError("`enabled` of checkpoints must be True to save one; got False")
        self._check_started("save_checkpoint")
        self._check_no_run("save_checkpoint")
        if self._failed:
            if self._failed.failure:
                raise RuntimeError(
                    "The run cannot be saved: an operation failed in the middle of a step. Make a "
                    "new trainer, which goes on from the newest checkpoint"
                ) from self._failed.failure
            self._begin_online(self._failed.batch)
        self._end_online(save=True)

    def _begin(
        self, loop: OuterLoop, target: int, read: tuple[Any, int | None, DataPosition] | None
    ) -> None:
        """Begins a loop, and notes what data the run reads from here on.

        A call that is refused, or has no steps to take, leaves the place in other data as it is.
        But a restarted program repeats calls without taking steps, and what they read is noted:
        the checkpoint's place may be in their data.

        Args:
            loop: the loop.
            target: the step to reach.
            read: the data, the batch size, and the position; None if the run goes on in its data.
        """
        checkpoints = self._parts.checkpoints
        repeated = checkpoints.latest is not None and not checkpoints.resumed
        loop.begin(first=not self._introduced)
        self._begun = True
        idle = self._trained_on and target <= self.totals.attempted and not repeated
        if read and not idle:
            self._trained_on, self._position = read, read[2]
        if not (self._introduced or checkpoints.deferred):
            self._introduce(loop)

    def _introduce(self, loop: OuterLoop) -> None:
        """Logs the model and the settings, once, and calls what has waited for that.

        A call whose steps a restarted program has already taken does not log its settings. They
        were not compared with those of the run.
        """
        loop.introduce()
        while self.when_training_begins:
            self.when_training_begins.pop(0)()
        self._introduced = True

    def _withdraw_stop(self) -> None:
        """Forgets that an earlier call of `train` was asked to stop."""
        self.stop_asked = False
        if self._started:
            self._parts.stop.assign(value=False)

    def _read_train_data(
        self, train_data: Any, steps: int | None, epochs: int | None, global_batch: int | None
    ) -> tuple[DataPosition | None, Batches]:
        """Returns the position in the data, if the last call ended there, and the batches."""
        known = self._known_position(train_data, global_batch)
        data = known.data if known else self._batches(train_data, global_batch)
        check_length(steps, epochs, data)
        if data.steps_per_epoch is None and self.overrides("on_epoch_end"):
            raise ValueError("`train_data` must have a known length for on_epoch_end to be called")
        return known, data

    def _target(self, steps: int | None, epochs: int | None, position: DataPosition) -> int:
        """Returns the step to reach. Exactly one of `steps` and `epochs` is given."""
        if epochs is None:
            return as_python(steps) or 0
        checkpoints = self._parts.checkpoints
        saved = checkpoints.facts if checkpoints.latest and not checkpoints.resumed else None
        return position.target(as_python(epochs), self.totals.attempted, saved)

    def _settle_compile_mode(
        self, data: Batches, target: int, log: RunLog, position: DataPosition
    ) -> None:
        """Chooses the compile mode for the coming steps, if it has not been chosen yet."""
        if target > self.totals.attempted:
            with log.console.busy("tracing the training step ..."):
                self._try_compile_mode(data, position.iterator)
        self.compile_mode_open = False
        self.jit_compile = self._parts.plan.jit_compile

    def _try_compile_mode(self, data: Batches, iterator: tf.data.Iterator) -> None:
        """Takes the compile mode for the data, if "auto" leaves it open, and traces the step."""
        if self.compile_mode_open:
            mode = mode_of_auto(self, self._parts.plan, data)
            self._parts = parts_in_mode(mode, self, self._parts)
        self._parts = compilable_parts(self, self._parts, tracing(iterator))

    def _new_log(self) -> RunLog:
        shares = self.strategy.num_replicas_in_sync * self.num_microbatches
        plan, history = self._parts.plan, self._history
        model_dir = self.model_dir if self.is_chief else None
        trackers = Trackers(self.trackers if self.is_chief else (), model_dir)
        log = RunLog(
            model_dir,
            self.style,
            plan.variable_names,
            self.precision.name,
            shares,
            history,
            trackers,
            plan.float8,
        )
        if self._loop:
            if self._loop.failure:
                logging.warning(
                    "An operation failed in the last step (%s). The variables may hold a part of "
                    "it; a new trainer goes on from the newest checkpoint.",
                    reason_of(self._loop.failure.message),
                )
            log.go_on_with(self._loop.log.unlogged)
        return log

    def _known_position(self, train_data: Any, global_batch: int | None) -> DataPosition | None:
        """Returns the position at which the last call of `train` ended, if the data is the same."""
        if self._trained_on is None:
            return None
        data, batch_size, position = self._trained_on
        same = batch_size == global_batch and same_data(data, train_data, position.data)
        return position if same else None

    def _batches(self, train_data: Any, global_batch: int | None) -> Batches:
        step = self.totals.attempted if self._begun else 0
        found = batches(
            train_data,
            "train_data",
            self.strategy,
            global_batch,
            self.seed or 0,
            step,
            **self._shapes(),
        )
        least = self.strategy.num_replicas_in_sync * self.num_microbatches
        if found.global_batch < least:
            raise ValueError(
                f"`global_batch` must be at least {least}, the microbatches of all replicas; "
                f"got {found.global_batch}"
            )
        return found

    def _shapes(self) -> dict[str, bool]:
        """Returns what the loss requires of batches, as arguments of `batches`.

        Replicas exchange rows in one shape; where nothing is divided, rows may have any shape.
        """
        exchanged = self.losses.reduction == "global"
        return {
            "one_size": exchanged and strategies.capabilities(self.strategy).one_shape,
            "whole": exchanged and self.strategy.num_replicas_in_sync == 1,
        }

    def _new_position(self, train_data: Any, data: Batches) -> DataPosition:
        """Returns a position at the beginning of the data."""
        position = position_in(data, self.checkpoints.data_resume)
        ended = self._position.epochs_ended if self._position else 0
        position.begin(self.totals.attempted if self._begun else 0, ended)
        self._check_savable(train_data, position)
        if self.model_dir and are_arrays(train_data) and position.resume_mode != "restart":
            position.content = texts_of_arrays(as_arrays(train_data))
        return position

    def _check_savable(self, train_data: Any, position: DataPosition) -> None:
        """Raises ValueError if the position in the data will be saved and cannot be."""
        # Check with several workers too: if each shuffled in a different order, they would
        # train on some examples twice.
        multi_worker = strategies.capabilities(self.strategy).multi_worker
        if (self.model_dir or multi_worker) and not are_arrays(train_data):
            position.check_savable()

    def stop(self) -> None:
        """Asks `train` to save the run and end after the step that is running.

        May be called from any thread. With several workers, a call on one of them is enough: all
        of them end after the same step.
        """
        self.stop_asked = True
        if self._started:
            self._parts.stop.assign(value=True)

    def evaluate(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        steps: int | None = None,
        precision: str = "float32",
        averaged: bool | None = None,
    ) -> dict[str, float]:
        """Returns the weighted mean loss and the metrics over a whole data set.

        A trainer that has not trained itself evaluates the newest checkpoint in `model_dir`, and
        looks for a newer one in every call. So it may follow a run that another process trains; it
        never writes there. Neither an optimizer nor trainable variables are needed.

        Random numbers, as of a Dropout that is called with training=True, depend on the seed and
        the batch's number alone: the same weights give the same result each time.

        Args:
            data: as for `train`, or a dict of several data sets as for `eval_data`; arrays are not
                shuffled.
            global_batch: the batch size, if `data` is arrays.
            steps: the largest number of batches to evaluate of each data set, counted from its
                beginning. None evaluates whole data sets.
            precision: "float32" runs a Keras model's half-precision layers in float32 with the same
                weights; "train" runs it in the training precision, which a `tf.Module` always uses.
            averaged: whether to use the moving average of the weights; None uses the average if
                the run keeps one.

        Returns:
            A dict of "loss" and all metrics, keyed by name; with several data sets, by names such
            as "clean/loss". The loss does not include `model.losses`.

        Raises:
            TypeError, ValueError: if the data or the model cannot be used.
            RuntimeError: in another thread while `train` runs, if the average would be used.
        """
        limit = "steps", steps
        found = self._read_to_evaluate(data, "data", global_batch, limit)
        with self._with_workers():
            self._start_without_training(found, precision=precision, averaged=averaged)
            return self._evaluate(found, precision, averaged, stoppable=False) or {}

    def evaluate_continuously(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        steps: int | None = None,
        last_step: int | None = None,
        timeout_secs: float | None = None,
    ) -> dict[int, dict[str, float]]:
        """Evaluates each checkpoint of the run in `model_dir` while another process trains it.

        Checkpoints are evaluated once each, in the order of their steps, with the same results as
        the run's own evaluations, to the bit. The results are written to `model_dir/eval`, and with
        keep_best the best models too; nothing else in `model_dir` is touched. `on_evaluate_begin`
        and `on_evaluate_end` of the trainer and of its callbacks are called, except callbacks that
        act on training, such as EarlyStopping. The call ends when the run has reached its target
        and all checkpoints are evaluated. Called again, it goes on after the last one. No optimizer
        is needed, unless it keeps the moving average of the weights.

        Args:
            data: as for `evaluate`.
            global_batch: as for `evaluate`.
            steps: as for `evaluate`.
            last_step: the step of the last checkpoint to wait for. None: the step at which the
                run's log says that `train` has reached its target; pass a number if the run calls
                `train` several times.
            timeout_secs: number of seconds without a new checkpoint after which to end. None waits
                without limit.

        Returns:
            The results of `evaluate` for each checkpoint of this call, keyed by step.

        Raises:
            TypeError, ValueError: if there is no `model_dir`, if the trainer has trained itself, if
                it has several workers, or for the same reasons as `evaluate`.
            SystemExit, KeyboardInterrupt: after SIGTERM (exit code 75) and SIGINT.
        """
        from trainer.run.follow import ContinuousEvaluation  # noqa: PLC0415  # few programs need it

        if self.model_dir is None:
            raise ValueError("`model_dir` must be given for evaluate_continuously; got None")
        if self._begun:  # which would lose its weights
            raise ValueError("`evaluate_continuously` must be called before training, or elsewhere")
        check_one_process("evaluate_continuously", self.strategy)
        limit = "steps", steps
        found = self._read_to_evaluate(data, "data", global_batch, limit)
        self._withdraw_stop()
        with StopSignals(self.stop) as signals:
            evaluation = ContinuousEvaluation(
                self,
                self.model_dir,
                evaluation_identity(self, data, found, steps),
                start=lambda: self._start(first_batch(found), training=False),
                evaluation=lambda: self._evaluation(found),
                export=self._export_into,
            )
            results = evaluation.run(last_step, timeout_secs)
            signals.end_process()
        return results

    def predict(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        precision: str = "float32",
        averaged: bool | None = None,
    ) -> Any:
        """Returns the model's outputs for a whole data set, in its order.

        For newer checkpoints, see `evaluate`. Random numbers differ in every batch and in every
        call, and are the same when the program is run again. No `loss_fn` is needed.

        Args:
            data: as for `evaluate`; if it yields tuples, the model is called with the first item.
                A tuple or list with an array for each of several inputs of a Keras model is its
                inputs.
            global_batch: the batch size, if `data` is arrays.
            precision: as for `evaluate`.
            averaged: as for `evaluate`.

        Returns:
            NumPy arrays in the structure that `predict_batch` returns, with one row per example.
            Ragged outputs are a `tf.RaggedTensor`.
        """
        if type(self).predict_batch is Task.predict_batch:
            data = all_inputs(data, self.model)
        found = batches(data, "data", self.strategy, global_batch, whole=self._shapes()["whole"])
        check_ends(found, "data")
        with self._with_workers():
            self._start_without_training(
                {"": found},
                lambda batch, training: self.predict_batch(batch),  # noqa: ARG005
                precision=precision,
                averaged=averaged,
            )
            with self._model_restored(predicts=True), self._weights(averaged):
                return self._parts.evaluator.predict(found.dataset, precision)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context manager in which the model has the moving average of its weights.

        For programs that call `trainer.model` themselves, such as a sampler. Afterwards the trained
        weights are restored, to the bit.

        Raises:
            ValueError: if the run keeps no average; see `Updates`.
            RuntimeError: before the run has begun, in another thread while `train` runs, and if
                steps are taken or saved inside.
        """
        self._check_started("averaged_weights")
        with self._weights(averaged=True):
            self._averaging = True
            try:
                yield
            finally:
                self._averaging = False

    def dry_run(
        self, train_data: Any, *, global_batch: int | None = None, eval_data: Any = None
    ) -> "DryRun":
        """Quickly tries everything that a long run does, then restores all variables exactly.

        A dry run takes two steps on real batches, evaluates one batch, saves and restores a
        checkpoint in a temporary folder, compares the replicas, and says what memory weights,
        slots and gradients need. Restored are all variables, metrics and generators that the
        trainer reaches. What Python itself counts, a generator of data that has been read, the
        passes that TensorFlow counts over a dataset that shuffles, and a lookup table that
        `update_metrics` writes are not restored.

        Args:
            train_data: as for `train`.
            global_batch: the batch size, if the data is arrays.
            eval_data: as for `train`.

        Returns:
            The findings, which can be printed. `.ok` is True if everything worked.

        Raises:
            ValueError: with several workers or parameter servers.
            TypeError, ValueError: for the same reasons as `train`.
        """
        from trainer.run.dry_run import dry_run  # noqa: PLC0415  # few programs need it

        check_one_process("dry_run", self.strategy)
        self._withdraw_stop()
        data = self._batches(train_data, global_batch)
        if data.reader is None:  # which would be read by a second iterator
            self._check_savable(train_data, position_in(data, self.checkpoints.data_resume))
        found = self._read_eval_data(eval_data, data, 1)
        evaluate = functools.partial(self._evaluate, found, stoppable=False)
        self._start(data.first)
        if found:
            self.checkpoints.check_results(self._result_names(found))
        self._try_compile_mode(data, iter(repeat_first_batch(data)))
        return dry_run(self, self._parts, data, evaluate if found else None)

    def overfit_one_batch(
        self, train_data: Any, steps: int = 100, *, global_batch: int | None = None
    ) -> "Overfit":
        """Trains on the first batch alone, then restores all variables exactly.

        If the model, the loss and the learning rate work together, the loss on one batch comes
        close to 0. If it stays high, more data will not help.

        Args:
            train_data: as for `train`.
            steps: number of steps.
            global_batch: the batch size, if the data is arrays.

        Returns:
            The loss of every step, which can be printed.

        Raises:
            ValueError: with several workers or parameter servers.
        """
        from trainer.run.dry_run import overfit  # noqa: PLC0415  # few programs need it

        check_one_process("overfit_one_batch", self.strategy)
        self._withdraw_stop()
        data = self._batches(train_data, global_batch)
        self._start(data.first)
        self._try_compile_mode(data, iter(repeat_first_batch(data)))
        return overfit(self, self._parts, data, as_python(steps))

    def export(
        self,
        path: str | pathlib.Path,
        *,
        averaged: bool | None = None,
        precision: str = "train",
        compare_on: Any = None,
    ) -> float | None:
        """Writes the trained Keras model, or a model of the trained layer, for use elsewhere.

        Args:
            path: the path of a `.keras` file, or of a folder for a SavedModel.
            averaged: as for `evaluate`.
            precision: "train" writes the model as it is: float32 weights, and layers that compute
                in the precision they were trained in. "float32", "float16" and "bfloat16" write
                weights and layers of that dtype.
            compare_on: inputs on which to compare the models. The written model is loaded, and its
                predictions must be the same up to rounding. None compares nothing.

        Returns:
            With `compare_on`, the largest difference between two outputs as a fraction of the
            largest output; otherwise None.

        Raises:
            TypeError, ValueError: if `path` names another kind of file, or if the predictions
                differ by more than 32 times the machine epsilon.
        """
        self._check_started("export")
        with self._weights(averaged), random_numbers_kept():
            return export(self.model, local_path(path), precision, compare_on, self._inputs)

    def replay(self, overflow: str | pathlib.Path) -> Replay:
        """Repeats a skipped step that the flight recorder has recorded (law L18, docs/numerics.md).

        This overwrites the model's variables with the recorded values, so use a separate trainer.

        Args:
            overflow: the folder of the record, `model_dir/overflows/step-*`.

        Returns:
            The recorded verdict, the verdict of the repeated step, and the name of the first layer
            input, layer output or gradient of these that is not finite, or None.

        Raises:
            ValueError: if the folder is not a record, or if the record comes from a run with a
                different model or different settings.
        """
        record, dataset, state = read_record(local_path(overflow))
        if self.compile_mode_open and not self._started:
            self.jit_compile = record.setting["jit_compile"]
        self._start(next(iter(dataset)))
        declared = recorded_computation(self)
        check_replayable(record.setting, recorded_settings(self), declared)
        return rerun_step(record, dataset, state, self._parts.plan)

    def _result_names(self, found: EvalData) -> list[str]:
        """Returns the names of the results of an evaluation."""
        return list(result_names(found, ["loss", *self._parts.metrics.eval]))

    def _evaluation(self, found: EvalData) -> Callable[[], Results | None] | None:
        """Returns a function that evaluates a run while it is trained; None without data.

        Raises:
            ValueError: if the evaluation has no result named `best_metric`.
        """
        self.checkpoints.check_results(self._result_names(found) if found else None)
        if not found:
            return None
        return functools.partial(self._evaluate, found, stoppable=True)

    def _evaluations(
        self, found: EvalData, eval_interval: int | None, *, at_start: bool
    ) -> TrainRequest:
        """Returns a request to train, with evaluations on these data; its target is set later."""
        return TrainRequest(
            target=0,
            evaluate=self._evaluation(found),
            trace_evaluation=functools.partial(self._trace_evaluation, found),
            eval_interval=as_python(eval_interval),
            export=self._export_into,
            evaluate_at_start=at_start,
            results=self._result_names(found),
        )

    def _read_to_evaluate(
        self,
        data: Any,
        argument: str,
        global_batch: int | None,
        limit: tuple[str, int | None],
        like: Any = None,
    ) -> EvalData:
        """Reads data to evaluate on; for the arguments see `read_eval_data`."""
        return read_eval_data(
            data,
            argument,
            self.strategy,
            global_batch,
            limit=limit,
            like=like,
            **self._shapes(),
        )

    def _read_eval_data(self, eval_data: Any, data: Batches, steps: int | None) -> EvalData:
        """Reads the data to evaluate on during training, if any, in batches as large as those."""
        if eval_data is None:
            return {}
        limit = "eval_steps", steps
        return self._read_to_evaluate(
            eval_data, "eval_data", data.global_batch, limit, like=data.first
        )

    def _weights(self, averaged: bool | None) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that gives the model the weights to evaluate or export."""
        checkpoints = self._parts.checkpoints
        if checkpoints.lacks_average and averaged is not False:
            raise ValueError(
                f"`optimizer` must be that of the run for the moving average in "
                f"{checkpoints.latest}; got None. Pass averaged=False for the weights themselves"
            )
        return evaluated_weights(self._parts.plan, averaged, beside_train=self._beside_train)

    @property
    def _beside_train(self) -> bool:
        """Whether this thread is another one than that in which `train` takes steps."""
        return self._running not in (None, threading.get_ident())

    def _model_restored(self, *, predicts: bool = False) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager after which the model's variables are as they were."""
        if self._beside_train:  # `train` moves them meanwhile
            return contextlib.nullcontext()
        return self._parts.evaluator.model_restored(predicts=predicts)

    def _export_into(self, folder: pathlib.Path) -> None:
        """Writes the model, with the weights that are evaluated, into a folder."""
        with self._weights(averaged=None):
            export_model(self.model, folder)

    def _evaluate(
        self,
        found: EvalData,
        precision: str = "float32",
        averaged: bool | None = None,
        *,
        stoppable: bool,
    ) -> Results | None:
        """Returns the results of an evaluation; None if it is stoppable and was stopped."""

        def evaluate(dataset: tf.data.Dataset) -> Results | None:
            with self._model_restored():
                return self._parts.evaluator.evaluate(dataset, precision, stoppable=stoppable)

        self._evaluating = True
        try:
            with self._weights(averaged):
                return evaluate_each(found, evaluate)
        finally:
            self._evaluating = False
            if self._online:
                self._online.leave_out_time()

    def _trace_evaluation(self, found: EvalData) -> None:
        """Traces the evaluations of a run; they use the same traces."""
        self._evaluating = True
        try:
            for one in found.values():
                self._parts.evaluator.trace(one.dataset, "float32")
        finally:
            self._evaluating = False

    def _start_without_training(
        self, found: EvalData, forward: Forward | None = None, **settings: Any
    ) -> None:
        """Builds what an evaluation or a prediction needs, and compares the workers' arguments.

        Warns if a run in `model_dir` is asked for results before it has any.
        """
        self._start(first_batch(found), forward, training=False)
        warm = self.checkpoints.init_from
        if self.model_dir and not (self.totals.attempted or warm):
            logging.warning(
                "There is no checkpoint in %s: the model has not been trained there.",
                self.model_dir,
            )
        check_agreed(lambda: of_data(found, "data") | entries_of(settings), self.strategy)

    def _start(
        self, batch: Batch, forward: Forward | None = None, *, training: bool = True
    ) -> Parts:
        """On the first call, builds and checks the parts, and restores the newest checkpoint.

        On later calls, adapts the parts to what has changed about the model or the optimizer.

        Args:
            batch: the first global batch.
            forward: a function of (batch, training) that calls the model, for models that create
                their variables when they are first called; None for `compute_loss`.
            training: whether to train, and not only to evaluate.

        Returns:
            The trainer's parts.
        """
        if self._started and not self._begun:
            if forward is None:
                self._parts = with_metric_variables(self, self._parts, batch)
            # Another process may be training this run.
            self._parts = followed(self, self._parts, clean_up=training)
        elif self._started and training and self._parts.checkpoints.deferred:
            self._parts, self._setup = restored_again(self, self._parts, self._setup)
        # In a hook or an action, which may have changed something.
        if self._running == threading.get_ident():
            check_unchanged(self, self._parts, self._setup)
        if self._started and (self._parts.plan.groups or not training):
            self._parts, self._setup = adapted(self, self._parts, self._setup, training=training)
            return self._parts
        with self._seeded.in_use():
            self._parts = build(self, batch, forward or self.compute_loss, training=training)
        warn_of_half_probabilities(self.model, self._loss_fn)
        self._setup = setup_of(self._parts.plan, self)
        self._started = True
        self._parts.stop.assign(self.stop_asked)  # `stop` may have been called during `build`
        return self._parts

    def check_unchanged(self) -> None:
        """Raises ValueError if a hook or an action has changed what the step was traced with.

        `train` calls it before each inner loop. Without hooks and callbacks it does nothing.
        """
        if self.callbacks or any(self.overrides(hook) for hook in HOOKS):
            check_unchanged(self, self._parts, self._setup)

    def note_setup(self) -> None:
        """Notes what the step was traced with; see `OuterLoop.note_setup`."""
        self._setup = setup_of(self._parts.plan, self)._replace(code=self._setup.code)

    def overrides(self, hook: str) -> bool:
        """Returns whether the trainer or one of its callbacks has a hook such as "on_log"."""
        own = getattr(getattr(self, hook), "__func__", None) is not getattr(Task, hook)
        return own or any(callback.overrides(hook) for callback in self.callbacks)

    def call_hook(self, hook: str, *arguments: Any) -> None:
        """Calls a hook such as "on_log" of the trainer, and then of each callback."""
        for listener in (self, *self.callbacks):
            getattr(listener, hook)(*arguments)

    def _check_no_run(self, name: str) -> None:
        """Raises RuntimeError if a method that takes or saves steps is called at a wrong time.

        Steps of a hook would be counted with those of `train`, and averaged weights be saved.
        """
        if self._averaging:
            raise RuntimeError(f"`averaged_weights` must be left before {name}() is called")
        if self._running is not None:
            raise RuntimeError(f"`{name}` must not be called while train() runs, as in a hook")

    def _check_started(self, name: str) -> None:
        """Raises RuntimeError in a graph, or if the trainer has not seen any data yet."""
        if not tf.executing_eagerly():
            # A Python number would stay in the graph as it is now.
            raise RuntimeError(
                f"`{name}` must be used outside of traced methods; read self.optimizer.iterations "
                "there"
            )
        if not self._started:
            raise RuntimeError(f"`{name}` must be used after train, evaluate or predict")
