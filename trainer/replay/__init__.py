"""Records skipped steps and replays them: `python -m trainer.replay`."""
