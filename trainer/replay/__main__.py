"""Runs a recorded overflow again, from the command line.

    python -m trainer.replay RUN/overflows/step-00000120 --trainer=my_module:MyTrainer

`--trainer` names a `Trainer` class, or a function that returns a trainer; it is called with
the settings of the record. Nothing else is imported: a record names no code.
"""

import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import app, flags

import strategies
from trainer.replay.recorder import read_record


def load(name: str) -> Any:
    """Returns what "module:attribute" names, which is imported.

    Raises:
        ValueError: if it is not of this form, or there is no such thing.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`--trainer` must be module:Class; got {name!r}: {error}. The class is imported and "
            "called with the record's settings. Give for instance --trainer=digits:Digits."
        ) from error


def main(argv: Sequence[str]) -> None:
    """Runs the record that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("Give the folder of one record.")
    path = pathlib.Path(argv[1])
    arguments = dict(read_record(path)[0].setting)
    del arguments["rule"]  # which is compared
    replicas = arguments.pop("num_replicas")
    if arguments["strategy"] is None:  # it was an object, and the trainer must make its own
        del arguments["strategy"]
    if replicas > 1 and not tf.config.list_physical_devices("GPU"):
        strategies.split_cpu(replicas)
    trainer = load(flags.FLAGS.trainer)(verbose=False, **arguments)
    print(trainer.replay(path))


if __name__ == "__main__":
    sys.path.insert(0, "")
    flags.DEFINE_string("trainer", None, "module:Class of the trainer that the run had.")
    flags.mark_flag_as_required("trainer")
    app.run(main)
