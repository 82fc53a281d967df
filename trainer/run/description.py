"""One line that says where a run stands: the `repr` of a trainer."""

from typing import Any

import tensorflow as tf


def describe_trainer(trainer: Any, *, started: bool) -> str:
    """Returns one line about a trainer. Waits for the device.

    Args:
        trainer: the trainer, which may be unfinished if its constructor has raised an error.
        started: whether it has seen data.
    """
    known = vars(trainer)
    parts = []
    readable = started and tf.executing_eagerly()  # in the graph of a step, no variable is
    if started and not readable:
        parts.append("in a graph")
    elif started:
        totals = trainer.totals
        parts.append(f"at step {totals.attempted}, {totals.applied} applied, {totals}")
    else:
        parts.append("not started")
    if "precision" in known:
        parts.append(trainer.precision.name)
    if readable:
        parts.append(f"loss_scale {trainer.loss_scale:g}")
    if "strategy" in known:
        replicas = trainer.strategy.num_replicas_in_sync
        parts.append(f"{replicas} replica{'s' if replicas > 1 else ''}")
    if known.get("model_dir"):
        parts.append(f"model_dir {str(trainer.model_dir)!r}")
    return f"<{type(trainer).__name__}: {', '.join(parts)}>"
