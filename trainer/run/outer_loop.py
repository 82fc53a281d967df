"""One call of `Trainer.train`: inner loops, and what is done between them.

After each inner loop, in this order: look whether the run must not go on, or has diverged;
log; evaluate, and keep the model if it is one of the best; actions; hooks; and last of all
save, so that nothing is saved that has not been looked at, and nothing is missing in it.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import strategies
from trainer.checkpoint import CheckpointError
from trainer.checkpoint.best import BETTER, Best
from trainer.checkpoint.compatibility import check_same, versions
from trainer.data.errors import explain, reason_of
from trainer.data.iterator_state import DataPosition
from trainer.log.model_table import variable_rows
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals, TrainSummary
from trainer.loop.inner import crossed, next_stop
from trainer.monitor.divergence import Detection, LossWatch, diverged_error
from trainer.monitor.lost_worker import worker_loss_explained
from trainer.monitor.profiling import Profile
from trainer.monitor.stuck import TrainingStuckError, check_not_stuck
from trainer.replay.recorder import keep_overflow
from trainer.run.build import Parts
from trainer.step.randomness import check_no_stateful_ops


class Training:
    """Takes a trainer from where it stands to a target.

    Args:
        trainer: a `Trainer` that has started.
        parts: what it is made of.
        position: where it stands in its data.
        watch: what looks for divergence, or None.
        log: the run's.
        target: the step to reach.
        evaluate: returns the results of an evaluation, or None if it was stopped; None for none.
        eval_interval: steps between evaluations, or None.
        export: writes the model as it was evaluated into a folder.
    """

    def __init__(
        self,
        trainer: Any,
        parts: Parts,
        position: DataPosition,
        watch: LossWatch | None,
        log: RunLog,
        target: int,
        evaluate: Callable[[], dict[str, float] | None] | None,
        eval_interval: int | None,
        export: Callable[[pathlib.Path], None],
    ) -> None:
        """Takes no step yet."""
        self._trainer = trainer
        self._parts = parts
        self._position = position
        self._watch = watch
        self._log = log
        self._target = target
        self._evaluate = evaluate
        self._eval_interval = eval_interval
        self._export = export
        self._step = self._start = Totals.from_state(parts.state).attempted
        self._saved_at = parts.checkpoints.facts.get("step")
        self._saved = time.monotonic()
        self._offence: Detection | None = None  # seen, and not yet answered
        steps = trainer.profile_steps if trainer.is_chief else None
        self._profile = Profile(steps, trainer.model_dir) if steps else None
        self._results: dict[int, float] = {}  # of the evaluations, by step: the best metric's
        keeps = evaluate and trainer.model_dir and trainer.is_chief
        keep = trainer.saving.keep_best if keeps else 0
        self._best = keep and Best(
            trainer.model_dir, keep, trainer.saving.best_metric, trainer.saving.best_is
        )

    def take_up(self) -> None:
        """Goes to where the checkpoint that was restored was written, if one was.

        Raises:
            ValueError: if that checkpoint is of a run that is not to be gone on with.
        """
        checkpoints, trainer, state = self._parts.checkpoints, self._trainer, self._parts.state
        if state.halted.numpy():  # by an earlier call, whose error the user has seen
            state.halted.assign(value=False)
            state.consecutive_skips.assign(0)
        if checkpoints.resumed or not checkpoints.latest:
            return
        saved, ours, allowed = dict(checkpoints.facts), self._facts(), trainer.saving.allow_changes
        if saved["data_resume"] == ours["data_resume"]:  # else one of the two was not looked at
            for facts in (saved, ours):
                facts["data"] += facts["pipeline"]
        changed = check_same(saved, ours, allowed, checkpoints.latest)
        if "seed" in changed and trainer.seed is not None:
            state.random_seed.assign(trainer.seed)
        if not {"seed", "global_batch", "data"} & {*changed}:
            self._position.read(checkpoints.latest, saved["batches_taken"])
        if self._watch and saved["divergence"]:
            self._watch.set_state(saved["divergence"])
        if len(saved["actions"]) == len(trainer.actions):
            for action, action_state in zip(trainer.actions, saved["actions"], strict=True):
                action.set_state(action_state)
        checkpoints.resumed = True
        self._log.rewind(self._start)
        self._log.say(f"going on from step {self._start} ({checkpoints.latest})")

    def introduce(self) -> None:
        """Tells, on the screen and in `metrics.jsonl`, what is trained, and how."""
        trainer = self._trainer
        best = {"best_metric": trainer.saving.best_metric, "best_is": trainer.saving.best_is}
        told, rows = self._facts() | best, variable_rows(trainer.model)
        with self._writing_log():
            self._log.log_start(type(trainer).__name__, self._start, told, rows)

    def run(self) -> None:
        """Takes inner loops until the target, or until somebody asks to stop."""
        following = self._log.progress_bar(self._start, self._target)
        with following, worker_loss_explained(self._trainer.strategy, self._progress):
            self._run()

    def conclude(self, began: float) -> TrainSummary:
        """Shows and returns how the run stands.

        Args:
            began: the `time.perf_counter()` when this call did.
        """
        totals, checkpoints = Totals.from_state(self._parts.state), self._parts.checkpoints
        sizes = checkpoints.bytes
        summary = TrainSummary(
            step=self._step,
            steps_run=self._step - self._start,
            totals=totals,
            loss_scale=self._trainer.loss_scale,
            seconds=time.perf_counter() - began,
            checkpoint=str(checkpoints.latest) if checkpoints.latest else None,
            checkpoint_bytes=sum(sizes.values()),
            position_bytes=sizes.get("data", 0) + sizes.get("counts", 0),
            best=self._best_result(),
            schedule_lag=totals.skipped if self._parts.plan.has_schedule else 0,
        )
        with self._writing_log():
            self._log.log_end(summary, self._target)
        return summary

    def _best_result(self) -> str | None:
        """The best result of the evaluations of this call, and its step; None without any."""
        sign = BETTER[self._trainer.saving.best_is]
        ranked = sorted((sign * value, step) for step, value in self._results.items())
        if not ranked:
            return None
        value, step = ranked[0]
        return f"{self._trainer.saving.best_metric} {sign * value:.4f} at step {step}"

    def _progress(self) -> tuple[int, pathlib.Path | None]:
        """Returns the number of attempted steps, and the newest checkpoint or None."""
        return Totals.from_state(self._parts.state).attempted, self._parts.checkpoints.latest

    def _run(self) -> None:
        trainer = self._trainer
        if self._watch and not self._parts.checkpoints.latest:
            self._save()  # so that there is always one to go back to
        self._check_graph()
        while self._step < self._target and not self._stopping():
            with self._saved_if_it_raises():
                trainer.on_loop_begin(self._step)
            before = self._step
            self._take_steps()
            self._between(before)
        if self._step < self._target:
            self._end_early()
        self._parts.checkpoints.wait()

    def _check_graph(self) -> None:
        """Traces the step, and refuses what could not be taken up again exactly."""
        traced = hasattr(self._parts.run_steps, "get_concrete_function")
        if traced and self._step < self._target and not tf.config.functions_run_eagerly():
            arguments = (self._position.iterator, tf.constant(1))
            check_no_stateful_ops(self._parts.run_steps.get_concrete_function(*arguments).graph)

    def _take_steps(self) -> None:
        """Takes one inner loop, which ends early if somebody asks to stop."""
        trainer, before = self._trainer, self._step
        periods = [action.every_steps for action in trainer.actions]
        marks = self._profile.ends if self._profile else ()
        stops = [self._eval_interval, trainer.saving.checkpoint_interval, *periods]
        end = next_stop(before, self._target, trainer.steps_per_loop, stops, marks)
        iterator = self._position.iterator
        if self._profile:
            self._profile.before(before)
        try:
            report, batch = self._parts.run_steps(iterator, tf.constant(end - before))
        except tf.errors.OpError as error:
            self._explain(error)
            raise
        taken = int(report.step.shape[0])
        self._step = before + taken
        if self._profile and self._profile.after(self._step):
            self._log.say(f"profiled, for TensorBoard: {trainer.model_dir / 'plugins/profile'}")
        self._log.add(report, self._step, compiling=before == self._start)
        self._position.taken += taken
        if self._parts.recorder:  # then the loop ends early where there is something to record
            keep_overflow(self._parts.recorder, report, batch, iterator.element_spec)
        if self._parts.recorder or self._step < end:  # maybe it must not go on
            self._look()

    def _explain(self, error: tf.errors.OpError) -> None:
        """Raises DataError for an error of the data; notes at others where the run stood."""
        done = Totals.from_state(self._parts.state).attempted
        self._position.taken += done + 1 - self._step  # with the batch of the step that raised
        self._parts.checkpoints.wait()
        latest, exact = self._parts.checkpoints.latest, self._position.resume_mode == "exact"
        explain(error, done, self._target, latest, exact=exact)

    def _between(self, before: int) -> None:
        """Does what is due after an inner loop. Saving is the last of it, or it would miss some."""
        trainer, step = self._trainer, self._step
        last = step == self._target
        log_now = last or crossed(trainer.log_interval, before, step)
        evaluate_now = last or crossed(self._eval_interval, before, step)
        save_now = last or crossed(trainer.saving.checkpoint_interval, before, step) or self._late()
        due = [action for action in trainer.actions if action.is_due(before, step)]
        if log_now or evaluate_now or save_now or due:
            self._look()
        if self._offence and self._watch:
            self._recover(self._offence, self._watch)
            return
        if log_now and self._log.pending:
            with self._saved_if_it_raises():
                self._write_log()
        if evaluate_now and self._evaluate:
            with self._log.console.status("evaluating ..."), self._saved_if_it_raises():
                self._validate(self._evaluate())
        with self._saved_if_it_raises():
            for action in due:
                action(trainer)
            trainer.on_loop_end(step)
        if save_now:
            self._save()

    def _stopping(self) -> bool:
        return strategies.any_worker(self._trainer.stop_asked, self._trainer.strategy)

    def _late(self) -> bool:
        """Returns whether so many seconds have gone since the last checkpoint as may."""
        secs = self._trainer.saving.checkpoint_secs
        late = secs is not None and time.monotonic() - self._saved >= secs
        return secs is not None and strategies.any_worker(late, self._trainer.strategy)

    def _validate(self, results: dict[str, float] | None) -> None:
        """Takes the results of an evaluation; None if it was stopped on the way."""
        if results is None:
            return
        with self._writing_log():
            self._log.log_evaluation(self._step, results)
        self._results[self._step] = results[self._trainer.saving.best_metric]
        if self._best and self._best.consider(self._step, results, self._export):
            self._log.say(f"kept in {self._trainer.model_dir / 'best'}")

    def _end_early(self) -> None:
        """Reads and writes what is left, and saves."""
        self._look()
        if self._offence and self._watch:
            self._recover(self._offence, self._watch)
        with self._saved_if_it_raises():
            if self._log.pending:
                self._write_log()
        self._save()
        self._log.say(f"stopped at step {self._step} of {self._target}, as asked")

    def _look(self) -> None:
        """Reads what has happened since the last time, and looks whether the run has diverged.

        Raises:
            TrainingStuckError: if the run must not go on.
        """
        with self._writing_log():
            steps = self._log.read()
        if steps is None:
            return
        record = self._parts.recorder.latest if self._parts.recorder else None
        try:
            check_not_stuck(
                steps, self._trainer.skip_policy, self._parts.plan.variable_names, record
            )
        except TrainingStuckError:
            self._write_log()
            raise
        if self._watch and not self._offence:
            self._offence = self._watch.detect(steps)

    def _recover(self, offence: Detection, watch: LossWatch) -> None:
        """Takes the run back to before an offence."""
        divergence, checkpoints = self._trainer.divergence, self._parts.checkpoints
        self._offence = None
        if self._log.pending:
            self._write_log()
        tries = watch.recoveries + 1
        with self._trainer.strategy.scope():
            path = checkpoints.restore(before=offence.first)
        if tries > divergence.max_recoveries or path is None:
            raise diverged_error(offence, watch.recoveries, path)
        self._step = Totals.from_state(self._parts.state).attempted
        self._position.read(path, checkpoints.facts["batches_taken"])
        left_out = offence.last - self._step if divergence.skip_data else 0
        self._position.drop(left_out)
        if checkpoints.facts["divergence"]:
            watch.set_state(checkpoints.facts["divergence"])
        watch.recoveries = tries
        # The same numbers and batches would come to the same end.
        self._parts.state.random_seed.assign_add(1)
        told = {"what": offence.what, "restored": self._step, "batches_left_out": left_out}
        with self._writing_log():
            self._log.log_event("recovery", offence.last, told)
        self._log.say(f"diverged: {offence.what}; back to step {self._step}")
        self._trainer.on_recovery(offence.last, self._step)
        self._save(anew=True)  # or a run that is killed now would not know that it was here

    def _write_log(self) -> None:
        """Prints and writes what has happened since the last time."""
        metrics = self._trainer.metrics
        values = {name: float(metric.result()) for name, metric in metrics.items()}
        with self._writing_log():
            self._log.flush(self._target, Totals.from_state(self._parts.state), values)
        for metric in metrics.values():
            metric.reset_state()

    def _save(self, *, anew: bool = False) -> None:
        """Saves, unless there is a checkpoint of this step already."""
        if self._saved_at == self._step and not anew:
            return
        facts = self._facts() | {
            "batches_taken": self._position.taken,
            "scale": float(self._parts.state.loss_scaler.loss_scale.numpy()),
            "actions": [action.state() for action in self._trainer.actions],
            "divergence": self._watch.state() if self._watch else None,
        }
        self._parts.checkpoints.save(self._step, facts, self._position)
        self._saved_at, self._saved = self._step, time.monotonic()

    def _facts(self) -> dict[str, Any]:
        """Returns what `run.json` says of this run that does not change on the way."""
        trainer, data = self._trainer, self._position.data
        return {
            "versions": versions(),
            "precision": trainer.precision.name,
            "loss_scale": repr(trainer.rule),
            "seed": trainer.seed,
            "num_replicas": trainer.strategy.num_replicas_in_sync,
            "num_microbatches": trainer.num_microbatches,
            "strategy": type(trainer.strategy).__name__,
            "jit_compile": trainer.jit_compile,
            "global_batch": data.global_batch,
            "data": f"{data.dataset.element_spec}, {data.steps_per_epoch} steps an epoch",
            "pipeline": self._position.pipeline,
            "data_resume": self._position.resume_mode,
        }

    @contextlib.contextmanager
    def _saved_if_it_raises(self) -> Iterator[None]:
        """Within, where no step is under way, an exception is passed on when all is saved."""
        try:
            yield
        except Exception as error:
            self._look()
            if self._offence:
                how = ", which is not saved: the run has diverged"
            else:
                self._save()
                how = ", which is saved" if self._trainer.model_dir else ""
            error.add_note(f"raised at step {self._step}{how}")
            raise

    @contextlib.contextmanager
    def _writing_log(self) -> Iterator[None]:
        """Within, what the file system refuses is a CheckpointError that says so."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(
                f"`model_dir` must have room for the log and let it be written; got "
                f"{self._trainer.model_dir}: {reason_of(str(error))}. What a run has done stands "
                "there. Make room and run the same command again."
            ) from error
