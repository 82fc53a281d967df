"""What watches a run: signals, skips, divergence, lost workers, periodic actions."""
