"""Protocols of several processes, searched state by state."""
