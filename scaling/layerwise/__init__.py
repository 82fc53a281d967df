"""A loss scale for every layer of a chain."""
