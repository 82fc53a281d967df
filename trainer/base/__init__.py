"""Helpers that every other room of `trainer` uses."""
