"""The names and arguments of a trainer's hooks, and the check of those that a class defines."""

import inspect
from typing import Any

import keras

from scaling.base.argument_checks import shown
from trainer.callbacks.action import Action
from trainer.callbacks.callback import Callback

# The hooks of `Task` with the arguments that the trainer passes.
HOOKS: dict[str, tuple[str, ...]] = {
    "on_train_begin": (),
    "on_loop_begin": ("step",),
    "on_log": ("step", "values"),
    "on_evaluate_begin": ("step",),
    "on_evaluate_end": ("step", "results"),
    "on_epoch_end": ("epoch",),
    "on_loop_end": ("step",),
    "on_recovery": ("step", "restored"),
    "on_train_end": ("summary",),
}


def check_hooks(cls: type) -> None:
    """Raises TypeError unless every `on_...` method of a class is a hook that can be called.

    A misspelled hook would never be called, and one with the wrong arguments would end a run at
    its first call, perhaps hours later.

    Args:
        cls: a subclass of `Task` or of `Callback`.
    """
    for name in dir(cls):
        method = getattr(cls, name) if name.startswith("on_") else None
        if not callable(method):
            continue
        if name not in HOOKS:
            raise TypeError(
                f"`{name}` of {cls.__name__} must be one of the hooks {', '.join(HOOKS)}; nothing "
                "calls another method whose name begins with on_"
            )
        # Of a plain function, the first argument is the trainer.
        bound = isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod))
        try:
            inspect.signature(method).bind(*([] if bound else [None]), *HOOKS[name])
        except TypeError:
            expected = ", ".join(["self", *HOOKS[name]])
            raise TypeError(
                f"`{name}` of {cls.__name__} must take the arguments ({expected}); got "
                f"{inspect.signature(method)}"
            ) from None


def check_callbacks(name: str, callbacks: Any) -> None:
    """Raises TypeError unless `callbacks` holds `Callback` and `Action` alone, with known hooks."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                f"`{name}` must hold trainer.Callback and trainer.Action; wrap "
                f"{type(callback).__name__} in trainer.callbacks.KerasCallbacks"
            )
        if not isinstance(callback, Callback | Action):
            raise TypeError(
                f"`{name}` must hold trainer.Callback and trainer.Action; got {shown(callback)}"
            )
        check_hooks(type(callback))
    if len({id(callback) for callback in callbacks}) < len(callbacks):
        raise ValueError(f"`{name}` must not hold a callback twice; got {shown(callbacks)}")
