"""Saves a run with everything that is needed to resume it, and resumes it."""

import time
from typing import Any

import strategies
from trainer.checkpoint.compatibility import check_same, versions
from trainer.data.iterator_state import DataPosition
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals
from trainer.monitor.divergence import LossWatch
from trainer.run.protocol import Parts, RunnableTrainer


class RunSaver:
    """Saves a run, and resumes it from a checkpoint.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        position: the position in the training data.
        watch: the loss watch, which detects divergence, or None.
    """

    def __init__(
        self,
        trainer: RunnableTrainer,
        parts: Parts,
        position: DataPosition,
        watch: LossWatch | None,
    ) -> None:
        """Notes the step of the restored checkpoint, if there is one, and the time."""
        self._trainer = trainer
        self._parts = parts
        self._position = position
        self._watch = watch
        self._saved_step = parts.checkpoints.facts.get("step")
        self._saved_time = time.monotonic()

    def resume(self, log: RunLog) -> None:
        """Continues from the restored checkpoint, if there is one.

        The variables have already been restored. This restores the position in the data and the
        state of the loss watch and the actions, and rewinds the log to the checkpoint's step.

        Args:
            log: the run's log.

        Raises:
            ValueError: if the checkpoint comes from a run with different settings.
        """
        checkpoints, trainer, state = self._parts.checkpoints, self._trainer, self._parts.state
        if state.halted.numpy():  # set in an earlier call of `train`, which raised an error
            state.halted.assign(value=False)
            state.consecutive_skips.assign(0)
        if checkpoints.resumed or not checkpoints.latest:
            return
        saved, ours = dict(checkpoints.facts), self.facts()
        # Compare the descriptions of the pipelines only if both runs have the same `data_resume`:
        # not every value of it makes a run describe its pipeline.
        if saved["data_resume"] == ours["data_resume"]:
            for facts in (saved, ours):
                facts["data"] += facts["pipeline"]
        allowed = trainer.checkpoint_config.allow_changes
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
        step = Totals.from_state(state).attempted
        log.rewind(step, trainer.model_dir)
        log.say(f"going on from step {step} ({checkpoints.latest})")

    def save(self, step: int, *, again: bool = False) -> None:
        """Saves the run, unless there is already a checkpoint of this step.

        Args:
            step: the step that the run has reached.
            again: whether to replace a checkpoint of this step.
        """
        if self._saved_step == step and not again:
            return
        facts = self.facts() | {
            "batches_taken": self._position.taken,
            "scale": float(self._parts.state.loss_scaler.loss_scale.numpy()),
            "actions": [action.state() for action in self._trainer.actions],
            "divergence": self._watch.state() if self._watch else None,
        }
        self._parts.checkpoints.save(step, facts, self._position)
        self._saved_step, self._saved_time = step, time.monotonic()

    def is_late(self) -> bool:
        """Returns whether `checkpoint_secs` have passed on any worker since the last checkpoint."""
        secs = self._trainer.checkpoint_config.checkpoint_secs
        late = secs is not None and time.monotonic() - self._saved_time >= secs
        return secs is not None and strategies.any_worker(late, self._trainer.strategy)

    def facts(self) -> dict[str, Any]:
        """Returns the entries of `run.json` that do not change during training."""
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
