"""What a run leaves so that it can be taken up again: begin with `saver.py`."""

from trainer.checkpoint.saver import CheckpointError, Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
