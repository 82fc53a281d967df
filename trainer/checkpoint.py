"""Saving a run and taking it up again, on `tf.train.Checkpoint`."""

import math
import pathlib

import tensorflow as tf

import scaling


class Checkpoints:
    """The checkpoints of a run: `model_dir/ckpt-<step>`. Without a directory it does nothing.

    Args:
        model_dir: where they are kept, or None.
        max_to_keep: how many of the newest stay.
        **items: what a checkpoint holds, by name; every variable must exist by now.
    """

    def __init__(
        self, model_dir: pathlib.Path | None, max_to_keep: int, **items: tf.Module
    ) -> None:
        """Looks for checkpoints; restores none yet."""
        self._manager = None
        if model_dir is not None:
            self._manager = tf.train.CheckpointManager(
                tf.train.Checkpoint(**items), str(model_dir), max_to_keep, checkpoint_name="ckpt"
            )

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint, or None."""
        return self._manager.latest_checkpoint if self._manager else None

    def restore(self) -> str | None:
        """Restores the latest checkpoint, if there is one. Call it in the strategy's scope.

        Returns:
            Its path, or None.

        Raises:
            ValueError: if it lacks a variable of this run, or holds one of another shape.
        """
        latest = self.latest
        if self._manager and latest:
            try:
                self._manager.checkpoint.restore(latest).assert_existing_objects_matched()
            except (AssertionError, ValueError) as error:
                raise ValueError(
                    "`model_dir` must be new, or that of a run with the same model, optimizer and "
                    f"loss-scale rule; got {latest}, which does not fit: "
                    f"{str(error).splitlines()[0]} Use another model_dir."
                ) from error
        return latest

    def save(self, step: int) -> str | None:
        """Saves everything; waits until it is written.

        Returns:
            The path of the checkpoint, or None without a directory.
        """
        if self._manager is None:
            return None
        return self._manager.save(checkpoint_number=step)


def check_restored_scale(rule: scaling.LossScaleRule, loss_scale: float, path: str) -> None:
    """Raises ValueError if a checkpoint's loss scale is one that the rule could not have."""
    low, high = 0.0, math.inf
    if isinstance(rule, scaling.DynamicLossScale):
        low, high = rule.min_scale, rule.max_scale
    elif isinstance(rule, (scaling.FixedLossScale, scaling.NoLossScale)):
        low = high = float(rule.initial_state().loss_scale)
    if not low <= loss_scale <= high:
        raise ValueError(
            f"`loss_scale` must be the rule that the run began with; got {rule!r} for a run whose "
            f"loss scale is {loss_scale:g} in {path}. A rule goes on from the saved scale. Use the "
            "rule of that run, or another model_dir."
        )
