"""The trainer's settings: defaults, checks and texts."""
