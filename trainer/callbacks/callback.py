"""`Callback`: an object that hears of logs, evaluations and epochs, and is saved with the run."""

import weakref
from collections.abc import Sequence
from typing import Any


class Listener:
    """Something that is called between a run's inner loops.

    `OuterLoop` has one list of listeners. Log lines, evaluations, checkpoints and the profiler are
    listeners like a user's callbacks.
    """

    # Whether the reports of all steps are read from the device before `after` is called, so that a
    # run that is stuck or has diverged ends, or goes back, first.
    reads = True
    # Whether the run is saved if `after` raises an error. Not if it may have left half of a run.
    saves_on_error = True

    def before(self, step: int) -> None:
        """Called before each inner loop, after `step` steps."""

    def next_stop(self, step: int) -> int | None:
        """Returns the next step at which an inner loop must end; None if there is none."""
        del step
        return None

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether to call `after`, once an inner loop has gone from `before` to `step`."""
        stop = self.next_stop(before)
        return stop is not None and stop <= step

    def after(self, step: int) -> None:
        """Called after an inner loop if it is due, in the order of the list."""


class Callback(Listener):
    """An object with hooks, for `Trainer(callbacks=[...])`.

    Subclass it and override the hooks that you need. They are those of a trainer, with the same
    arguments, and are called right after the trainer's own, in the order of the list. Besides,
    `after(step)` is called at the steps that `next_stop` returns, after the log line and the
    evaluation of that step. `self.trainer` is the trainer; `self.trainer.stop()` ends the run.
    `trainer.callbacks` has callbacks that are ready to use.

    If a callback remembers something, override `state_dict` and `load_state_dict` as well:
    checkpoints save the state, and a resumed run then acts like one without interruption.

    Example:
        >>> import keras, numpy as np
        >>> from trainer import Callback, Trainer
        >>> class StopBelow(Callback):
        ...     def __init__(self, loss):
        ...         self.loss = loss
        ...
        ...     def on_log(self, step, values):
        ...         if values["loss"] < self.loss:
        ...             self.trainer.stop()
        >>> x = np.ones([8, 1], np.float32)
        >>> line = Trainer(
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...     optimizer=lambda: keras.optimizers.SGD(0.1), loss_fn="mse", verbose=False,
        ...     log_interval=1, callbacks=[StopBelow(0.1)])
        >>> line.train((x, x), steps=100, global_batch=8).step < 100
        True
    """

    # Whether log lines end where epochs end, and nowhere else, and whether evaluations take place
    # there if the run has no `eval_interval`.
    per_epoch = False
    # Whether it acts on training itself, so that `evaluate_continuously`, which does not train,
    # leaves it out.
    needs_training = False
    _owner: Any = None  # a weak reference: a trainer is freed as soon as nobody else holds it

    @property
    def trainer(self) -> Any:
        """The trainer that the callback was passed to.

        Raises:
            RuntimeError: if there is none.
        """
        trainer = self._owner() if self._owner else None
        if trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no trainer; pass Trainer(callbacks=[...])"
            )
        return trainer

    def set_trainer(self, trainer: Any) -> None:
        """Called by `Trainer(callbacks=...)`.

        Raises:
            ValueError: if the callback belongs to another trainer. Its state would be that of the
                other run.
            TypeError: if one of its methods looks like a hook and is none.
        """
        check_hooks(type(self))
        if self._owner is not None:
            raise ValueError(
                f"`callbacks` must be new for each trainer; got a used {type(self).__name__}"
            )
        self._owner = weakref.ref(trainer)

    @property
    def key(self) -> str:
        """The name under which checkpoints save the state."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Returns what the callback remembers, for checkpoints.

        Returns:
            JSON types and NumPy arrays, by name.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Called before `on_train_begin`."""

    def monitored(self) -> Sequence[str]:
        """Returns the names of the numbers that the callback waits for, such as "val_loss"."""
        return ()

    def take_reports(self, steps: Any) -> None:
        """Called with each `StepReport` that is read, of shape (steps,), before any other hook."""

    def set_epochs(self, length: int | None, began: int, before: int, target: int) -> None:
        """Called by `train` once the run is restored, and after a rollback.

        Args:
            length: the number of steps in a pass over the training data; None if it is not known.
            began: the step at which the first pass over that data began: 0 unless the run was
                trained on other data before.
            before: the number of passes over other data before that.
            target: the step to reach.
        """

    def on_train_begin(self) -> None:
        """Called by `train` before the first step, once everything is built and restored."""

    def on_loop_begin(self, step: int) -> None:
        """Called before each inner loop, after `step` steps."""

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """Called after each log line, with its numbers by name."""

    def on_evaluate_begin(self, step: int) -> None:
        """Called before each evaluation of `train` and of `evaluate_continuously`."""

    def on_evaluate_end(self, step: int, results: dict[str, float]) -> None:
        """Called after each evaluation of `train` and of `evaluate_continuously`.

        Args:
            step: the number of steps so far.
            results: "loss" and the metrics, keyed by name.
        """

    def on_epoch_end(self, epoch: int) -> None:
        """Called when the run has gone through the training data `epoch` times."""

    def on_loop_end(self, step: int) -> None:
        """Called after each inner loop, its log line, evaluation and `after`, and before saving."""

    def on_recovery(self, step: int, restored: int) -> None:
        """Called when a run that diverged by `step` has been rolled back to step `restored`."""

    def on_train_end(self, summary: Any) -> None:
        """Called by `train` with the `TrainSummary` that it returns."""

    def overrides(self, hook: str) -> bool:
        """Returns whether the callback has a hook of its own, such as "on_log"."""
        return getattr(type(self), hook) is not getattr(Callback, hook)


def keys_of(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Returns callbacks by the names under which their states are saved.

    Example:
        >>> list(keys_of([Callback(), Callback()]))
        ['Callback', 'Callback_2']
    """
    keyed: dict[str, Callback] = {}
    for callback in callbacks:
        same = sum(each.key == callback.key for each in keyed.values())
        keyed[f"{callback.key}_{same + 1}" if same else callback.key] = callback
    return keyed


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_hooks(cls: type) -> None:
    """Raises TypeError for a method of a trainer or a callback that no hook would ever call."""
    for name in dir(cls):
        if name.startswith("on_") and name not in HOOKS and callable(getattr(cls, name)):
            raise TypeError(f"`{name}` of {cls.__name__} must be one of {', '.join(HOOKS)}")
