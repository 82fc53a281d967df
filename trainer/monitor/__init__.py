"""Watches a run: periodic actions, stop signals, stuck and diverged runs, lost workers."""
