"""Measures which setting of `jit_compile` is fastest, and prints it.

    python -m trainer.tune my_module:make --steps=50

`make` is a function of `jit_compile` that returns a new trainer and the arguments of its `train`,
without `steps`:

    def make(jit_compile):
        return Digits(jit_compile=jit_compile, verbose=False), {"train_data": data}

Each mode compiles in a call of its own. Then all have turns, round after round.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.step.xla import COMPILE_MODES
from trainer.trainer import Trainer

Make = Callable[..., tuple[Trainer, dict[str, Any]]]


def measure(make: Make, steps: int, rounds: int) -> dict[bool | str, float]:
    """Returns the median seconds per step in each compile mode; of "auto", too.

    A mode that raises an error is left out, and the first line of the error printed.

    Args:
        make: see the module's docstring.
        steps: number of steps in a turn.
        rounds: number of turns of each mode.
    """
    known: dict[bool | str, tuple[Trainer, dict[str, Any]]] = {}
    for mode in ("auto", *COMPILE_MODES):
        try:
            trainer, arguments = make(jit_compile=mode)
            trainer.train(**arguments, steps=steps)  # traces and compiles
        except (ValueError, tf.errors.OpError) as error:
            print(f"{mode!r} is not possible: {str(error).partition(chr(10))[0]}")
        else:
            known[mode] = trainer, arguments
    secs: dict[bool | str, list[float]] = {mode: [] for mode in known}
    for turn in range(2, rounds + 2):
        for mode, (trainer, arguments) in known.items():
            began = time.perf_counter()
            trainer.train(**arguments, steps=turn * steps)
            secs[mode].append((time.perf_counter() - began) / steps)
    return {mode: statistics.median(turns) for mode, turns in secs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the modes, and prints their times and the fastest one."""
    parser = argparse.ArgumentParser("python -m trainer.tune")
    parser.add_argument("make", help="a function, as my_module:make")
    parser.add_argument("--steps", type=int, default=50, help="number of steps in a turn")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each mode")
    given = parser.parse_args(arguments)
    module, _, name = given.make.partition(":")
    sys.path.insert(0, "")
    secs = measure(getattr(importlib.import_module(module), name), given.steps, given.rounds)
    best = min(secs, key=secs.__getitem__)
    for mode, each in secs.items():
        print(f"jit_compile={mode!r}: {1e3 * each:.3g} ms, {each / secs[best]:.2f} of the best")
    print(f"fastest: jit_compile={best!r}")


if __name__ == "__main__":
    main()
