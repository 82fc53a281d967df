"""`KerasCallbacks`: runs callbacks of Keras with the calls and the logs that they expect."""

import copy
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import logging

from trainer.callbacks.callback import Callback
from trainer.callbacks.monitored import resolve_mode
from trainer.step.averages import average_weights

# Classes of Keras that cannot work with a trainer, and what to use instead.
REFUSED = {
    "BackupAndRestore": "pass model_dir= to Trainer",
    "OrbaxCheckpoint": "pass model_dir= to Trainer",  # since Keras 3.13
    "SwapEMAWeights": "the trainer evaluates with the average by itself",
    "TerminateOnNaN": 'pass Skips(on_nonfinite_loss="raise") to Trainer',
    "CallbackList": "pass the callbacks that are in it",
}
# Hooks that Keras calls for every batch of an evaluation, which is one graph call here.
NEVER_CALLED = ("on_test_batch_begin", "on_test_batch_end")
BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
# Attributes of Keras's callbacks that are not what they remember. `min_delta` changes its sign when
# the first value is compared.
NOT_REMEMBERED = ("_model", "params", "model", "validation_data", "min_delta", "mode")


class KerasCallbacks(Callback):
    """Runs Keras's own callbacks and users' subclasses of `keras.callbacks.Callback`.

    They get the calls of `fit`: `set_params` and `set_model`, then `on_train_begin`,
    `on_epoch_begin`, `on_train_batch_begin` and `on_train_batch_end`, `on_test_begin` and
    `on_test_end`, `on_epoch_end` and `on_train_end`, with epochs counted from 0. Logs have Keras's
    names: "loss" and the metrics, means over the epoch, and the same with "val_" if an evaluation
    took place at the end of that epoch. The losses are those of the trainer: without
    `model.losses`, and over applied steps.

    With KerasCallbacks, log lines end where epochs end, and `log_interval` has no effect.
    `eval_interval=None` evaluates after each epoch; a number must be a multiple of an epoch's
    steps, or divide them. `on_train_batch_begin` and `on_train_batch_end` are called once per inner
    loop, as with Keras's `steps_per_execution`: for each batch, pass steps_per_loop=1. While
    `train` runs, `model.optimizer` is the trainer's optimizer, a learning rate that is assigned
    takes effect, and `model.stop_training = True` ends the run.

    Checkpoints save what the callbacks remember: those of their attributes that training has
    changed and that are numbers, strings, arrays, or lists and dicts of these. A resumed run, and a
    later call of `train`, go on with them.

    Args:
        callbacks: a list of `keras.callbacks.Callback`. BackupAndRestore, OrbaxCheckpoint,
            SwapEMAWeights, TerminateOnNaN and CallbackList cannot work here and are refused. So are
            ModelCheckpoint and EarlyStopping that keep the best of an evaluation, if the run
            evaluates the average of its weights (`ema_momentum`).

    Example:
        >>> import keras, numpy as np
        >>> from trainer import Trainer
        >>> from trainer.callbacks import KerasCallbacks
        >>> history = keras.callbacks.History()
        >>> x = np.ones([8, 1], np.float32)
        >>> line = Trainer(
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...     optimizer="sgd", loss_fn="mse", verbose=False,
        ...     callbacks=[KerasCallbacks([history])])
        >>> summary = line.train((x, x), epochs=3, global_batch=4, eval_data=(x, x))
        >>> history.epoch, sorted(history.history)
        ([0, 1, 2], ['loss', 'val_loss'])
    """

    per_epoch = True
    needs_training = True

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Checks and stores the callbacks."""
        for callback in callbacks:
            name = type(callback).__name__
            for refused, remedy in REFUSED.items():
                if isinstance(callback, getattr(keras.callbacks, refused, ())):
                    raise ValueError(f"`callbacks` must not hold {name}: {remedy}")
            of_keras = type(callback).__module__.startswith("keras.")
            for hook in NEVER_CALLED:
                # A LambdaCallback has a user's functions as attributes.
                if hook in vars(callback) or (overrides(callback, hook) and not of_keras):
                    raise ValueError(f"`callbacks` must not use {hook}; got {name}")
        self.callbacks = list(callbacks)
        self._hears_of_batches = any(
            overrides(callback, hook) for callback in self.callbacks for hook in BATCH_HOOKS
        )
        self._as_made = [dict(remembered(callback)) for callback in self.callbacks]
        self._loaded: dict[str, Any] | None = None  # a state that waits for on_train_begin
        self._begun = self._stopped = False
        self._evaluated_at = -1  # no step
        self._list: Any = None  # a `keras.callbacks.CallbackList`
        self._steps_per_epoch, self._target = 1, 0
        self._began = self._epochs_before = 0  # see `set_epochs`
        self._forget_epoch()

    def _forget_epoch(self) -> None:
        """Begins the means of an epoch."""
        self._loss_sum = self._weight_sum = 0.0
        self._metrics: dict[str, float] = {}
        self._results: dict[str, float] = {}

    @property
    def _loss(self) -> float:
        """The mean loss of the epoch so far; NaN if no step was applied."""
        return self._loss_sum / self._weight_sum if self._weight_sum else float("nan")

    def monitored(self) -> Sequence[str]:
        """Returns the names that the callbacks monitor."""
        waiting = [
            callback
            for callback in self.callbacks
            if not isinstance(callback, keras.callbacks.ModelCheckpoint) or callback.save_best_only
        ]
        found = [getattr(callback, "monitor", None) for callback in waiting]
        return [name for name in found if isinstance(name, str)]

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether the reports are needed after each inner loop."""
        del before, step
        return self._hears_of_batches

    def set_epochs(self, length: int | None, began: int, before: int, target: int) -> None:
        """Notes where epochs begin. `train` has checked that their length is known."""
        self._steps_per_epoch, self._target = length or 1, target
        self._began, self._epochs_before = began, before

    def _epoch_at(self, step: int) -> tuple[int, int]:
        """Returns how many epochs have ended after `step` steps, and the batches since then."""
        passes, batches = divmod(step - self._began, self._steps_per_epoch)
        return self._epochs_before + passes, batches

    def on_train_begin(self) -> None:
        """Gives the callbacks the model, and restores what they remember of the run so far."""
        trainer = self.trainer
        model, optimizer = trainer.model, trainer.optimizer
        several = isinstance(optimizer, dict)
        averages = average_weights(optimizer.values() if several else [optimizer])
        for callback in self.callbacks:
            if averages and keeps_best(callback):
                raise ValueError(
                    f"`callbacks` must not hold {type(callback).__name__} for {callback.monitor}: "
                    "evaluations use the average of the weights; use Checkpoints(keep_best=)"
                )
        state = self._loaded or (self.state_dict() if self._begun else None)
        for callback in self.callbacks:
            if chooses_mode(callback):  # Keras looks for the metric in a model that is compiled
                callback.mode = resolve_mode(callback.monitor, "auto")
            if state and isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # it would begin its file anew
        # Not by assignment: Keras and TensorFlow would track the optimizer as a part of the model.
        object.__setattr__(model, "stop_training", False)
        if not several:
            object.__setattr__(model, "optimizer", optimizer)
        self._list = keras.callbacks.CallbackList(
            self.callbacks,
            model=model,
            verbose=1,
            epochs=self._epoch_at(self._target + self._steps_per_epoch - 1)[0],
            steps=self._steps_per_epoch,
        )
        self._call("on_train_begin")
        self._begun, self._loaded = True, None
        if state:
            self._restore_attributes(state)
        if self._stopped:
            logging.warning(
                "A Keras callback has set model.stop_training before, which has ended this run. To "
                "go on, leave that callback out."
            )
            trainer.stop()

    def on_loop_begin(self, step: int) -> None:
        """Begins an epoch where one begins, and a batch."""
        epoch, batch = self._epoch_at(step)
        if batch == 0:
            self._forget_epoch()
            self._call("on_epoch_begin", epoch)
        if self._hears_of_batches:
            self._call("on_train_batch_begin", batch)

    def take_reports(self, steps: Any) -> None:
        """Adds steps to the mean of the epoch, and ends a batch."""
        applied = np.asarray(steps.grads_finite)
        weights = np.asarray(steps.weight, np.float64)[applied]
        self._loss_sum += float(np.sum(np.asarray(steps.loss, np.float64)[applied] * weights))
        self._weight_sum += float(np.sum(weights))
        if self._hears_of_batches and self._list:
            metrics = self.trainer.metrics.items()
            logs = {name: float(metric.result()) for name, metric in metrics}
            last = self._epoch_at(int(steps.step[-1]) - 1)[1]
            self._call("on_train_batch_end", last, {"loss": self._loss} | logs)

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """Notes the metrics of the epoch."""
        del step
        self._metrics = {name: values[name] for name in self.trainer.metrics}

    def on_evaluate_begin(self, step: int) -> None:
        """Begins a test."""
        del step
        self._call("on_test_begin")

    def on_evaluate_end(self, step: int, results: dict[str, float]) -> None:
        """Ends a test, and notes its results for the end of the epoch."""
        self._evaluated_at = step
        self._results = {f"val_{name}": value for name, value in results.items()}
        self._call("on_test_end", dict(results))

    def on_epoch_end(self, epoch: int) -> None:
        """Ends an epoch. Results of an evaluation within it would be those of other weights."""
        if self._epoch_at(self._evaluated_at) != (epoch, 0):
            self._results = {}
        logs = {"loss": self._loss} | self._metrics | self._results
        self._call("on_epoch_end", epoch - 1, logs)

    def on_train_end(self, summary: Any) -> None:
        """Ends the run, and takes the optimizer off the model."""
        del summary
        self._call("on_train_end", {"loss": self._loss} | self._metrics | self._results)
        vars(self.trainer.model).pop("optimizer", None)
        self._list = None

    def _call(self, hook: str, *arguments: Any) -> None:
        """Calls a method of all callbacks, and ends the run if one of them asks for it."""
        getattr(self._list, hook)(*arguments)
        if self.trainer.model.stop_training and not self._stopped:
            self._stopped = True
            self.trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        """Returns what the callbacks remember, and the means of an epoch that has begun."""
        states = {
            key: {
                name: value
                for name, value in remembered(callback).items()
                if name not in made or not same(made[name], value)
            }
            for (key, callback), made in zip(self._keyed(), self._as_made, strict=True)
        }
        sums = [self._loss_sum, self._weight_sum]
        return {
            "callbacks": states,
            "sums": sums,
            "metrics": self._metrics,
            "stopped": self._stopped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, at once or after `on_train_begin`."""
        if self._list:
            self._reset()
            self._restore_attributes(state)
        else:
            self._loaded = state

    def _reset(self) -> None:
        """Sets the attributes that training has changed to what they were when it began."""
        for callback, made in zip(self.callbacks, self._as_made, strict=True):
            now = remembered(callback)  # without what is no longer plain, such as an open file
            for name in made.keys() & now.keys():
                if not same(now[name], made[name]):
                    setattr(callback, name, copy.deepcopy(made[name]))

    def _restore_attributes(self, state: dict[str, Any]) -> None:
        """Sets the attributes of callbacks to what `state_dict` returned."""
        for key, callback in self._keyed():
            for name, value in state["callbacks"].get(key, {}).items():
                setattr(callback, name, value)
        self._loss_sum, self._weight_sum = state["sums"]
        self._metrics = state["metrics"]
        self._stopped = state["stopped"]

    def _keyed(self) -> list[tuple[str, keras.callbacks.Callback]]:
        """Returns each callback with the name under which its state is saved."""
        names = [type(callback).__name__ for callback in self.callbacks]
        return [
            (f"{name}_{names[:place].count(name) + 1}", callback)
            for place, (name, callback) in enumerate(zip(names, self.callbacks, strict=True))
        ]


def keeps_best(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback keeps the weights that had the best result of an evaluation."""
    keeps = (isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only) or (
        isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
    )
    return bool(keeps and callback.monitor.startswith("val_"))


def overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Returns whether a callback has a method of its own, in its class or as an attribute."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(
        keras.callbacks.Callback, hook
    )


def chooses_mode(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback of Keras looks for a direction in which its metric is better."""
    waits = isinstance(callback, keras.callbacks.EarlyStopping) or (
        isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only
    )
    return waits and callback.mode == "auto"


def remembered(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the attributes of a callback that a checkpoint can hold."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(callback).items()
        if name not in NOT_REMEMBERED and is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Returns whether a checkpoint can hold a value: JSON types and NumPy arrays."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return isinstance(value, (str, int, float, type(None), np.number, np.bool_))


def same(one: Any, other: Any) -> bool:
    """Returns whether two plain values are equal. Values with an array in them never are."""
    try:
        return bool(one == other)
    except ValueError:
        return False
