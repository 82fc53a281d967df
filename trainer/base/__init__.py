"""Helpers that the other packages of `trainer` use."""
