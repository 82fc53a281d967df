"""A separate loss scale for every layer of a chain."""
