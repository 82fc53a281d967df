"""Skipped steps, recorded and run again: `python -m trainer.replay`."""
