"""Saves a run with everything that is needed to resume it, and resumes it."""

import contextlib
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import strategies
from trainer.callbacks.callback import keys_of
from trainer.callbacks.divergence import LossWatch
from trainer.checkpoint.contents import ARRAYS, joined, read_arrays, split, write_arrays
from trainer.data.iterator_state import BETWEEN_CALLS, OF_A_PASS, DataPosition
from trainer.fingerprint import (
    Fingerprint,
    check_resumable,
    diff,
    entries,
    replaced,
    select,
    text_of_rule,
    versions,
)
from trainer.keras_compat import learning_rate_setting
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals
from trainer.run.declared import optimizers_at
from trainer.run.parts import Parts
from trainer.run.slots import facts_of, optimizers_of
from trainer.run.stop_signals import StopSignals

if TYPE_CHECKING:
    from trainer.trainer import Trainer

OF_DATA = "global_batch", "data"  # parts of a fingerprint
# What the log and the trackers record of what makes a run the same; `run.json` has all of it.
RECORDED = (
    "optimizer",
    "loss",
    "global_clipnorm",
    "clipnorm",
    "clipvalue",
    "ema_momentum",
    "on_overflow",
)


class RunSaver:
    """Saves a run, and resumes it from a checkpoint.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        position: the position in the training data.
        watch: the loss watch, which detects divergence, or None.
        log: the run's log, whose unfinished interval is saved; None if there is none.
        signals: the stop signals, after which saving may take its time; None if there are none.
    """

    def __init__(
        self,
        trainer: "Trainer",
        parts: Parts,
        position: DataPosition,
        watch: LossWatch | None,
        log: RunLog | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        """Notes the step of the restored checkpoint, if there is one, and the time."""
        self._trainer = trainer
        self._parts = parts
        self._position = position
        self._watch = watch
        self._log = log
        self._signals = signals
        self._saved_step = parts.checkpoints.facts.get("step")
        self._saved_time = time.monotonic()
        self.evaluation_due = False  # an evaluation of the current step has begun and not ended

    def is_evaluation_due(self, step: int) -> bool:
        """Returns whether the newest checkpoint is of `step`, whose evaluation was interrupted."""
        facts = self._parts.checkpoints.facts
        return facts.get("step") == step and bool(facts.get("evaluation_due"))

    def resume(self, log: RunLog, target: int) -> None:
        """Continues from the restored checkpoint, if there is one.

        The variables have already been restored. This restores the position in the data and the
        state of the loss watch and the callbacks, and rewinds the log to the checkpoint's step.

        A program that calls `train` several times, and is started again, repeats calls whose steps
        have all been taken. A checkpoint of a later step was written by a later call, maybe with
        other data and settings: the next call with steps to take resumes it, from the beginning.

        Args:
            log: the run's log.
            target: the step at which this call of `train` ends.

        Raises:
            ValueError: if the checkpoint comes from a run with different settings.
        """
        checkpoints, trainer, state = self._parts.checkpoints, self._trainer, self._parts.state
        if state.halted.numpy():  # set in an earlier call of `train`, which raised an error
            state.halted.assign(value=False)
            state.consecutive_skips.assign(0)
        if checkpoints.resumed or not checkpoints.latest:
            return
        saved = dict(checkpoints.facts)
        step = Totals.from_state(state).attempted
        ours = self._position.facts()
        other = any(name in ours and saved.get(name) != ours[name] for name in OF_A_PASS)
        checkpoints.deferred = step > target or (step == target and other)
        if checkpoints.deferred:
            log.rewind(step, trainer.model_dir)
            return
        was, now = saved["fingerprint"], self.declared()
        begins = "data" not in saved  # a run of `train_on_batch` alone has no place in data
        if saved.get(BETWEEN_CALLS) and BETWEEN_CALLS not in self._position.counts():
            # `train_on_batch` has written it: the call of `train` before it had ended.
            ours = select(now, *OF_DATA)
            if diff(select(was, *OF_DATA), ours):
                begins = True
                was = replaced(was, ours, *OF_DATA)
                log.say("the data of this call is another, and is read from its beginning")
        allowed = trainer.checkpoints.allow_changes
        changed = check_resumable(was, now, allowed, checkpoints.latest)
        self._take_changes(was, now, changed)
        if begins:
            self._position.begin_late(saved)
        elif {"seed", *OF_DATA} & changed:
            self._position.begin_instead(saved)
        else:
            self._position.go_to(checkpoints.latest, saved)
        if self._watch and saved["divergence"]:
            self._watch.set_state(saved["divergence"])
        unknown = self.restore_callbacks()
        checkpoints.resumed = True
        log.rewind(step, trainer.model_dir, self.saved_interval())
        log.say(f"going on from step {step} ({checkpoints.latest})")
        if unknown:
            log.say(f"without a saved state, so from their beginning: {', '.join(unknown)}")

    def saved_interval(self) -> Mapping[str, np.ndarray] | None:
        """Returns what `RunLog.unfinished` returned when the newest checkpoint was written."""
        checkpoints = self._parts.checkpoints
        if not (checkpoints.latest and checkpoints.facts["interval"]):
            return None
        interval: dict[str, np.ndarray] = joined(
            checkpoints.facts["interval"], read_arrays(checkpoints.latest / ARRAYS)
        )
        return interval

    def restore_callbacks(self) -> list[str]:
        """Restores the states of callbacks from the newest checkpoint.

        Returns:
            The names of those for which the checkpoint has none.
        """
        checkpoints, keyed = self._parts.checkpoints, keys_of(self._trainer.callbacks)
        saved = checkpoints.facts.get("callbacks", {})
        arrays = read_arrays(checkpoints.latest / ARRAYS) if checkpoints.latest else {}
        for key, callback in keyed.items():
            if key in saved:
                callback.load_state_dict(joined(saved[key], arrays))
        return [key for key in keyed if key not in saved]

    def save(self, step: int, *, again: bool = False) -> None:
        """Saves the run, unless there is already a checkpoint of this step.

        Args:
            step: the step that the run has reached.
            again: whether to replace a checkpoint of this step.
        """
        if self._saved_step == step and not again:
            return
        arrays: dict[str, np.ndarray] = {}
        states = {
            key: split(callback.state_dict(), arrays)
            for key, callback in keys_of(self._trainer.callbacks).items()
        }
        facts = self.facts() | {
            "fingerprint": self.declared(),
            **self._position.counts(),
            "scale": float(self._parts.state.loss_scaler.loss_scale.numpy()),
            "divergence": self._watch.state() if self._watch else None,
            "evaluation_due": self.evaluation_due,
            "callbacks": states,
            "interval": split(self._log.unfinished(), arrays) if self._log else None,
            **facts_of(self._parts.slots, self._trainer),
        }

        self.wait()
        with contextlib.ExitStack() as saving:

            def write(folder: str) -> None:
                self._position.write(folder)  # which may wait for data
                saving.enter_context(self._unhurried())
                write_arrays(f"{folder}/{ARRAYS}", arrays)

            if not self._trainer.is_chief:  # it waits for the chief
                saving.enter_context(self._unhurried())
            self._parts.checkpoints.save(step, facts, write)
        self._saved_step, self._saved_time = step, time.monotonic()

    def wait(self) -> None:
        """Waits until the current checkpoint is on disk."""
        with self._unhurried():
            self._parts.checkpoints.wait()

    def _unhurried(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a stop signal does not end the process."""
        return self._signals.saving() if self._signals else contextlib.nullcontext()

    def _take_changes(self, was: Fingerprint, now: Fingerprint, changed: Collection[str]) -> None:
        """Puts changes into effect where the restored values would hide them.

        Args:
            was: what the checkpoint has recorded.
            now: what this run declares.
            changed: the first parts of the places that differ.
        """
        trainer, state = self._trainer, self._parts.state
        # Learning rates that the program has changed are set; others stay as they were saved.
        for name, optimizer in optimizers_at(optimizers_of(trainer)).items():
            place, rate = f"{name}.learning_rate", learning_rate_setting(optimizer)
            if isinstance(rate, keras.Variable) and was.get(place) != now.get(place):
                with trainer.strategy.scope():
                    optimizer.learning_rate = float(now[place])
        if "metrics" in changed:
            for metric in self._parts.metrics.train.values():
                metric.reset_state()
        if "seed" in changed and trainer.seed is not None:
            state.random_seed.assign(trainer.seed)

    def is_late(self) -> bool:
        """Returns whether `interval_secs` have passed on any worker since the last checkpoint."""
        secs = self._trainer.checkpoints.interval_secs
        late = secs is not None and time.monotonic() - self._saved_time >= secs
        return secs is not None and strategies.any_worker(late, self._trainer.strategy)

    def declared(self) -> Fingerprint:
        """Returns what `run.json` records of what the run declares."""
        compiled = entries("jit_compile", self._trainer.jit_compile)
        return self._parts.declared | compiled | self._position.declared()

    def facts(self) -> dict[str, Any]:
        """Returns the entries of `run.json` that are read before fingerprints are compared."""
        trainer = self._trainer
        return {
            "loss_scale": text_of_rule(trainer.rule),
            "num_replicas": trainer.strategy.num_replicas_in_sync,
            "jit_compile": trainer.jit_compile,
            **self._position.facts(),
        }

    def settings(self) -> dict[str, Any]:
        """Returns the settings of the run, for the log and the trackers, as JSON types."""
        trainer, declared = self._trainer, self.declared()
        content = {at: text for at, text in declared.items() if at.startswith("data.content")}
        return {
            "versions": versions(),
            "precision": trainer.precision.name,
            "seed": trainer.seed,
            "num_microbatches": trainer.num_microbatches,
            "strategy": type(trainer.strategy).__name__,
            "best_metric": trainer.checkpoints.best_metric,
            "best_is": trainer.checkpoints.best_is,
            **self.facts(),
            **select(declared, *RECORDED),
            **content,
        }
