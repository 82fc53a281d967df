"""The trainer's settings: their defaults, their checks and their help texts."""
