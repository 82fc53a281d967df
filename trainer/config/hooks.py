"""The names and arguments of a trainer's hooks, and the check of those that a class defines."""

import inspect
from typing import Any

import keras

from scaling.base.argument_checks import shown
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
    """Raises TypeError unless `callbacks` is a list or tuple of `Callback` with known hooks."""
    found = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in found:
        if isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                f"`{name}` must be a list of trainer.Callback; got a {type(callback).__name__}, "
                "which is a callback of Keras. It expects the calls and the logs of fit. Use "
                f"{name}=[KerasCallbacks([...])] from trainer.callbacks, which gives it both."
            )
        if found is not callbacks or not isinstance(callback, Callback):
            raise TypeError(
                f"`{name}` must be a list of trainer.Callback; got {shown(callback)}. A callback "
                "has hooks such as on_log(step, values). Pass objects whose class derives "
                "from it; to call a function every few steps, pass "
                "actions=[Action(call, every_steps=100)]."
            )
        check_hooks(type(callback))
    if len({id(callback) for callback in found}) < len(found):
        raise ValueError(
            f"`{name}` must not hold a callback twice; got "
            f"{', '.join(type(callback).__name__ for callback in found)}. Each hook would be "
            "called twice. Leave one of them out."
        )
