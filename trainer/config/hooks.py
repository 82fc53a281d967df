"""The names and arguments of a trainer's hooks, and the check of those that a subclass defines."""

import inspect

from scaling.base.argument_checks import did_you_mean

# The hooks of `Task` with the arguments that the trainer passes.
HOOKS: dict[str, tuple[str, ...]] = {
    "on_train_begin": (),
    "on_loop_begin": ("step",),
    "on_log": ("step", "values"),
    "on_evaluate_end": ("step", "results"),
    "on_epoch_end": ("epoch",),
    "on_loop_end": ("step",),
    "on_recovery": ("step", "restored"),
    "on_train_end": ("summary",),
}

# The nearest hook for names of Keras and Lightning that are spelled too differently to be found.
KNOWN_ELSEWHERE = {
    "on_batch_begin": "on_loop_begin",
    "on_batch_end": "on_loop_end",
    "on_fit_end": "on_train_end",
    "on_fit_start": "on_train_begin",
    "on_test_end": "on_evaluate_end",
    "on_train_batch_begin": "on_loop_begin",
    "on_train_batch_end": "on_loop_end",
    "on_train_batch_start": "on_loop_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_start": "on_train_begin",
    "on_validation_end": "on_evaluate_end",
    "on_validation_epoch_end": "on_evaluate_end",
}


def check_hooks(cls: type) -> None:
    """Raises TypeError unless every `on_...` method of a class is a hook that can be called.

    A misspelled hook would never be called, and one with the wrong arguments would end a run at
    its first call, perhaps hours later.

    Args:
        cls: a subclass of `Task`.
    """
    for name in dir(cls):
        method = getattr(cls, name) if name.startswith("on_") else None
        if not callable(method):
            continue
        if name not in HOOKS:
            near = KNOWN_ELSEWHERE.get(name)
            others = f"The hooks are {', '.join(HOOKS)}."
            remedy = f"Did you mean {near!r}?" if near else did_you_mean(name, HOOKS, others)
            raise TypeError(
                f"`{name}` must be a hook of Trainer; got a method of {cls.__name__} with an "
                f"unknown name. The trainer would never call it. {remedy} A method that you call "
                "yourself needs a name that does not begin with on_."
            )
        # Of a plain function, the first argument is the trainer.
        bound = isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod))
        try:
            inspect.signature(method).bind(*([] if bound else [None]), *HOOKS[name])
        except TypeError:
            expected = ", ".join(["self", *HOOKS[name]])
            raise TypeError(
                f"`{name}` must take the arguments ({expected}); got a method of {cls.__name__} "
                f"with {inspect.signature(method)}. The trainer passes these by position. Define "
                f"it as def {name}({expected})."
            ) from None
