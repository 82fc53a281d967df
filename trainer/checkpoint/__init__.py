"""Checkpoints: saves a run and restores it. Begin reading with `saver.py`."""

from trainer.checkpoint.saver import CheckpointError, CheckpointSaver

__all__ = ["CheckpointError", "CheckpointSaver"]
