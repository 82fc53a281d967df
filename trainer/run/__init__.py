"""A run from its parts to its end."""
