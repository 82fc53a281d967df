"""Follows a run that another process trains: what a trainer does to evaluate its checkpoints."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from trainer.base.argument_checks import check_writable
from trainer.callbacks.callback import Callback
from trainer.checkpoint.best import Best
from trainer.checkpoint.folder import committed, read_unchecked
from trainer.checkpoint.saver import PREFIX
from trainer.evaluation.continuous import FOLDER, Calls, Results
from trainer.log.console import RunConsole
from trainer.log.summary import Totals
from trainer.run.parts import Parts

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def calls_of(
    trainer: "Trainer",
    model_dir: pathlib.Path,
    *,
    start: Callable[[], Parts],
    evaluation: Callable[[], Callable[[], Results | None] | None],
    export: Callable[[pathlib.Path], None],
) -> Calls:
    """Returns what a trainer does for a `ContinuousEvaluation`. Begins when there is a checkpoint.

    Args:
        trainer: the trainer.
        model_dir: its folder.
        start: builds the trainer if needed, and returns its parts.
        evaluation: called once the trainer is built; returns a function that evaluates the model,
            which returns None if it was stopped.
        export: writes the evaluated model into a folder.
    """
    check_writable(model_dir / FOLDER)
    console = RunConsole(trainer.style)
    config = trainer.checkpoints
    best = None
    if config.keep_best:
        best = Best(model_dir / FOLDER, config.keep_best, config.best_metric, config.best_is)

    @functools.cache
    def started() -> Parts:
        adopt_compile_mode(trainer, model_dir)
        return start()

    @functools.cache
    def evaluator() -> Callable[[], Results | None]:
        return evaluation() or (lambda: None)

    @functools.cache
    def listening() -> list[Any]:
        return [trainer, *callbacks_without_training(trainer.callbacks, console.say)]

    def restore(path: pathlib.Path) -> bool:
        parts = started()
        evaluator()  # checks the names of its results
        with trainer.strategy.scope():
            return parts.checkpoints.restore_live(path)

    def evaluate() -> Results | None:
        tell(listening(), "on_evaluate_begin", Totals.from_state(started().state).attempted)
        return evaluator()()

    def done(step: int, results: Results) -> None:
        if best and best.consider(step, results, export):
            console.say(f"kept in {model_dir / FOLDER / 'best'}")
        tell(listening(), "on_evaluate_end", step, results)

    return Calls(restore, evaluate, lambda: trainer.stop_asked, done, console.say)


def tell(listeners: Sequence[Any], hook: str, *arguments: Any) -> None:
    """Calls a hook such as "on_evaluate_end" of each listener."""
    for listener in listeners:
        getattr(listener, hook)(*arguments)


def callbacks_without_training(
    callbacks: Sequence[Callback], say: Callable[[str], None]
) -> list[Callback]:
    """Returns the callbacks that do not act on training, and says which are left out."""
    left_out = [type(callback).__name__ for callback in callbacks if callback.needs_training]
    if left_out:
        say(f"not called, because they act on training: {', '.join(left_out)}")
    return [callback for callback in callbacks if not callback.needs_training]


def adopt_compile_mode(trainer: "Trainer", model_dir: pathlib.Path) -> None:
    """Makes a `tf.Module` compute as in the run, if the trainer leaves open what XLA compiles.

    A Keras model is evaluated in float32 without XLA, whatever the run's mode.
    """
    if not trainer.compile_mode_open or isinstance(trainer.model, keras.Layer):
        return
    for path in reversed(committed(model_dir, PREFIX).values()):
        facts = read_unchecked(path)
        if "jit_compile" in facts:
            trainer.jit_compile = facts["jit_compile"]
            return
