"""A run's log: progress on the console, and files for other programs."""
