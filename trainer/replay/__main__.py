"""Replays a recorded overflow from the command line.

    python -m trainer.replay RUN/overflows/step-00000120 --trainer=my_module:MyTrainer

`--trainer` names a `Trainer` class, or a function that returns a trainer; it is called with the
settings in the record. Records contain no code: only the module in `--trainer` is imported.
"""

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import app, flags

import strategies
from trainer.replay.recorder import read_record
from trainer.step.updates import Updates


def load(name: str) -> Callable[..., Any]:
    """Imports "module:attribute" and returns the attribute."""
    module, _, attribute = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return loaded


def main(argv: Sequence[str]) -> None:
    """Replays the record named on the command line and prints the result."""
    if len(argv) != 2:
        raise app.UsageError("Pass the folder of one record, model_dir/overflows/step-*.")
    path = pathlib.Path(argv[1])
    arguments = dict(read_record(path)[0].setting)
    for name in ("rule", "computation"):  # no arguments; `Trainer.replay` checks them
        arguments.pop(name, None)
    replicas = arguments.pop("num_replicas")
    # None if the trainer was given a strategy as an object, or a rule of a class of its own, which
    # records do not store. The trainer must then create its own.
    for name in ("strategy", "loss_scale"):
        if arguments[name] is None:
            del arguments[name]
    grouped = {field.name for field in dataclasses.fields(Updates)} & arguments.keys()
    updates = Updates(**{name: arguments.pop(name) for name in grouped})
    if updates != Updates():
        arguments["updates"] = updates
    if replicas > 1 and not tf.config.list_physical_devices("GPU"):
        strategies.split_cpu(replicas)
    trainer = load(flags.FLAGS.trainer)(verbose=False, **arguments)
    print(trainer.replay(path))


if __name__ == "__main__":
    sys.path.insert(0, "")
    flags.DEFINE_string(
        "trainer", None, "Class of the trainer that recorded the overflow, as module:Class."
    )
    flags.mark_flag_as_required("trainer")
    app.run(main)
