"""Warnings that are logged once per process, however often a step is traced."""

import functools

from absl import logging


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, unless this process has logged the same message before."""
    logging.warning("%s", message)
