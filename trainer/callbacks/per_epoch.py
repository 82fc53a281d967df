"""Checks the intervals of a run whose callbacks hear of logs and evaluations where epochs end."""

from trainer.base.warn_once import warn_once
from trainer.config.groups import MonitorConfig
from trainer.monitor.callback import Callback


def check_per_epoch(
    callback: Callback, epoch: int, eval_interval: int | None, log_interval: int
) -> None:
    """Checks `eval_interval`, and warns of a `log_interval` that has no effect.

    Args:
        callback: a callback whose `per_epoch` is True.
        epoch: number of steps in an epoch.
        eval_interval: as for `train`.
        log_interval: as for `Trainer`.

    Raises:
        ValueError: if evaluations take place within epochs, and not at their ends.
    """
    name = type(callback).__name__
    if eval_interval and epoch % eval_interval and eval_interval % epoch:
        raise ValueError(
            f"`eval_interval` must be a multiple of the {epoch} steps of an epoch, or divide them, "
            f"with {name}; got {eval_interval}. Its callbacks get the results where an epoch ends, "
            "when the weights are no longer those that were evaluated. Pass "
            f"eval_interval={epoch}, or None to evaluate after each epoch."
        )
    if log_interval not in (MonitorConfig.log_interval, epoch):
        warn_once(
            f"log_interval={log_interval} has no effect with {name}: log lines end where epochs "
            f"end, after every {epoch} steps, so that metrics are means over an epoch as in Keras. "
            "Leave log_interval out."
        )
