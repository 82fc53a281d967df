"""`ReduceLROnPlateau`: a smaller learning rate when the monitored number no longer improves."""

from typing import Any

from trainer.callbacks.monitored import Monitored
from trainer.callbacks.weights import optimizers_of


class ReduceLROnPlateau(Monitored):
    """Multiplies the learning rate by a factor when a number has not improved for a while.

    With several optimizers, each one's learning rate is multiplied. The learning rates themselves
    are in checkpoints, and so are the counts.

    Args:
        monitor: as for `EarlyStopping`.
        factor: what the learning rate is multiplied by, between 0 and 1.
        patience: after how many values in a row without improvement; 0 is like 1, as in Keras.
        mode: as for `EarlyStopping`.
        min_delta: by how much a value must be better than the best one to count as better.
        cooldown: how many values the cooldown after a reduction takes. All but the last of them are
            not counted, as in Keras, so 1 is like 0.
        min_lr: the learning rate is not made smaller than this.

    Raises:
        ValueError: for an argument that is not allowed.
    """

    needs_training = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        """Checks and stores the arguments."""
        super().__init__(monitor, mode, min_delta)
        if not 0 < factor < 1:
            raise ValueError(f"`factor` must be between 0 and 1; got {factor}")
        self.factor = factor
        self.patience = patience
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.wait = self.cooldown_counter = 0

    def take_value(self, step: int, value: float) -> None:
        """Counts a value, and reduces the learning rates after too many without improvement."""
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.took_best(step, value):
            self.wait = 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self.patience and self._reduce():
                self.wait, self.cooldown_counter = 0, self.cooldown

    def _reduce(self) -> bool:
        """Reduces the learning rates that are above the minimum; returns whether there are any."""
        above = [
            (optimizer, rate)
            for optimizer in optimizers_of(self.trainer)
            if (rate := float(optimizer.learning_rate.numpy())) > self.min_lr
        ]
        for optimizer, rate in above:
            optimizer.learning_rate = max(rate * self.factor, self.min_lr)
        return bool(above)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the counts."""
        counts = {"wait": self.wait, "cooldown_counter": self.cooldown_counter}
        return super().state_dict() | counts

    def continue_from(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned for the same number."""
        super().continue_from(state)
        self.wait, self.cooldown_counter = state["wait"], state["cooldown_counter"]
