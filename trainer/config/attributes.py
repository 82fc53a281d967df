"""Which attributes of a trainer may be assigned, and what the others say.

What the step is built from is fixed: an assignment would be ignored, or would break the step in the
middle. What a trainer reads anew in every call of `train` is checked like the argument of the same
name. All other names belong to the user's subclass.
"""

from typing import Any

from trainer.base.argument_checks import check_count

# Read anew in every call of `train`.
CHANGEABLE = ("steps_per_loop", "log_interval", "actions")

# Attributes that the constructor makes from arguments, with the names of these. Other arguments
# that it keeps under their own names, `_settings`, are fixed too.
FIXED = {
    "rule": "loss_scale",
    "strategy_name": "strategy",
    "is_chief": "strategy",
    "compile_mode_open": "jit_compile",
    "style": "verbose",
}

# Attributes that a trainer computes, with what to do instead of assigning to them.
COMPUTED = {
    "metrics": "Pass metrics= to the constructor, or override build_metrics().",
    "totals": "They are read from the run's state.",
    "loss_scale": "Pass loss_scale= to a new trainer.",
}

# Arguments of which a trainer has no attribute.
ARGUMENTS_ONLY = {"loss_fn", "verbose"}

RENAME = "If this is an attribute of your own subclass, give it another name."

# Attributes that may be replaced until the trainer is built, with what to do afterwards.
MODEL = (
    "Its optimizer, its step and its checkpoints belong to the variables of the model it was built "
    "with. Make a new trainer with model=, or copy weights into this model: "
    "trainer.model.set_weights(other.get_weights())."
)
OPTIMIZER = (
    "Its step and its checkpoints belong to the variables of the optimizer it was built with. For "
    "another learning rate, assign trainer.optimizer.learning_rate. For another optimizer, make a "
    "new trainer: Trainer(model=lambda: trainer.model, strategy=trainer.strategy, optimizer=..., "
    "...)."
)


REPLACEABLE = {"model": MODEL, "optimizer": OPTIMIZER}


def check_assignment(trainer: Any, name: str, value: object, base: type) -> None:
    """Raises an error unless an attribute of a trainer may be assigned.

    Args:
        trainer: a trainer. While its constructor runs, anything may be assigned.
        name: the name of the attribute.
        value: the value to be assigned.
        base: the class `Trainer`. A subclass with a constructor of its own may keep arguments under
            their names, as long as `Trainer` has no attribute of that name.

    Raises:
        AttributeError: if the attribute is fixed.
        TypeError, ValueError: if it may change, but not to this value.
    """
    if "_started" not in vars(trainer):
        return
    if name in CHANGEABLE:
        if name != "actions":
            check_count(name, value)
    elif remedy := remedy_for(trainer, name, value, base):
        shown = repr(value)
        raise AttributeError(
            f"`{name}` must not be assigned to a trainer that exists; got "
            f"{shown if len(shown) <= 60 else f'a {type(value).__name__}'}. The trainer has been "
            f"set up with another value, and would not notice. {remedy}"
        )


def remedy_for(trainer: Any, name: str, value: object, base: type) -> str | None:
    """Returns what to do instead of an assignment; None if the attribute may be assigned."""
    known, kind = vars(trainer), type(trainer)
    inherited = getattr(kind, name, None) is getattr(base, name, None)
    if name in REPLACEABLE:
        replaced = known["_started"] and known.get(name) is not value
        return REPLACEABLE[name] if replaced else None
    if name in FIXED or name in known["_settings"]:
        remedy = f"Pass {FIXED.get(name, name)}= to a new trainer. {RENAME}"
        return None if is_equal(known.get(name), value) else remedy
    if name in COMPUTED:
        return f"{COMPUTED[name]} {RENAME}" if inherited else None
    if name in ARGUMENTS_ONLY and name not in known and inherited:
        constructors = [getattr(each, "__init__") for each in (kind, base)]  # noqa: B009  # for mypy
        return f"Pass {name}= to a new trainer." if len({*constructors}) == 1 else None
    return None


def is_equal(one: object, other: object) -> bool:
    """Returns whether two values are the same; arrays and the like are not compared."""
    if one is other:
        return True
    plain = (str, int, float, bool, tuple, type(None))
    return type(one) is type(other) and isinstance(one, plain) and one == other


def assign(trainer: Any, name: str, value: object) -> None:
    """Assigns an attribute of a trainer that is fixed for users."""
    object.__setattr__(trainer, name, value)
