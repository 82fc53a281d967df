"""`EarlyStopping`: ends a run whose monitored number no longer improves."""

from typing import Any

import numpy as np
from absl import logging

from trainer.callbacks.monitored import Monitored
from trainer.callbacks.weights import read_weights, write_weights


class EarlyStopping(Monitored):
    """Ends a run when a number has not improved for a while.

    It uses the values of the run's own evaluations (`eval_data` and `eval_interval` of `train`) or
    log lines, so nothing is evaluated twice. A run that is resumed after it was stopped stops
    again at once, unless `patience` is larger now.

    Args:
        monitor: the name of an evaluation result after "val_", such as "val_loss", or of a number
            in log lines, such as "loss".
        min_delta: by how much a value must be better than the best one to count as better.
        patience: after how many values in a row without improvement the run ends: evaluations, or
            log lines. NaN is no improvement. 0 is like 1, as in Keras.
        mode: "min" or "max": whether the lowest or the highest value is best; "auto" decides by
            the name, and is refused if the name does not say.
        restore_best_weights: whether the model has the weights of the best value when `train`
            returns, whatever ended it. They are kept in memory and in checkpoints. The last
            weights are kept as well: checkpoints hold them, and a later call of `train` goes on
            from them, unless the weights were changed in between.

    Attributes:
        best: the best value; None before the first.
        best_step: the step of the best value.
        wait: how many values there have been since the best one.
        stopped_step: the step at which it ended the run; None if it did not.

    Example:
        >>> import keras, numpy as np
        >>> from trainer import Trainer
        >>> stopping = EarlyStopping(patience=2, min_delta=0.001)
        >>> x = np.ones([8, 1], np.float32)
        >>> line = Trainer(
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...     optimizer=lambda: keras.optimizers.SGD(0.1), loss_fn="mse", verbose=False,
        ...     callbacks=[stopping])
        >>> summary = line.train((x, x), 100, global_batch=8, eval_data=(x, x), eval_interval=1)
        >>> summary.step == stopping.stopped_step < 100
        True
    """

    needs_training = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        min_delta: float = 0,
        patience: int = 0,
        mode: str = "auto",
        restore_best_weights: bool = False,
    ) -> None:
        """Checks and stores the arguments."""
        super().__init__(monitor, mode, min_delta)
        self.patience = patience
        self.restore_best_weights = restore_best_weights
        self.wait = 0
        self.stopped_step: int | None = None
        self.best_weights: list[np.ndarray] | None = None
        self._last_weights: list[np.ndarray] | None = None  # those that were replaced

    @property
    def exhausted(self) -> bool:
        """Whether the number has not improved for too long."""
        return self.wait >= max(self.patience, 1)

    def on_train_begin(self) -> None:
        """Puts the last weights back, and ends the run if it was ended before."""
        # In reverse: each found what the one before it had restored, and took it for the last
        # weights.
        for callback in reversed(self.trainer.callbacks):
            if isinstance(callback, EarlyStopping):
                callback.put_last_weights_back()
        if self.exhausted:
            logging.warning("EarlyStopping has ended this run before; to go on, raise patience")
            self.trainer.stop()
        else:
            self.stopped_step = None

    def take_value(self, step: int, value: float) -> None:
        """Counts a value, and ends the run after too many without improvement."""
        if self.took_best(step, value):
            self.wait = 0
            if self.restore_best_weights:
                self.best_weights = read_weights(self.trainer)
            return
        self.wait += 1
        if self.exhausted:
            self.stopped_step = step
            logging.info(
                "EarlyStopping ends this run at step %s: %s was best, %s, at step %s",
                *(step, self.monitor, self.best, self.best_step),
            )
            self.trainer.stop()

    def on_train_end(self, summary: Any) -> None:
        """Puts the best weights into the model."""
        del summary
        if self.restore_best_weights and self.best_weights is not None:
            self._last_weights = read_weights(self.trainer)
            write_weights(self.trainer, self.best_weights)

    def put_last_weights_back(self) -> None:
        """Puts the last weights into the model, unless its weights were changed since then."""
        if self._last_weights is not None and self._is_restored():
            write_weights(self.trainer, self._last_weights)
        self._last_weights = None

    def _is_restored(self) -> bool:
        """Returns whether the model still has the best weights, bit for bit."""
        pairs = zip(read_weights(self.trainer), self.best_weights or [], strict=True)
        return all(now.tobytes() == best.tobytes() for now, best in pairs)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to act like one without interruption."""
        own = {"wait": self.wait, "stopped_step": self.stopped_step, "weights": self.best_weights}
        return super().state_dict() | own

    def continue_from(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned for the same number."""
        super().continue_from(state)
        self.wait, self.stopped_step = state["wait"], state["stopped_step"]
        self.best_weights = state["weights"]
