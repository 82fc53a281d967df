"""What a trainer holds: where the search for the variables of its run begins."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.run.parts import Parts

if TYPE_CHECKING:
    from trainer.trainer import Trainer

# Attributes of a trainer that hold what is reached by another name, is used only to build it, or
# belongs to its last call: a checkpoint must not depend on which calls were before.
OWN = frozenset(
    [
        "_failed",
        "_given_metrics",
        "_given_model",
        "_given_optimizer",
        "_loop",
        "_online",
        "_parts",
        "_position",
        "_setup",
        "_trained_on",
    ]
)
BUILDERS = frozenset(["build_model", "build_optimizer", "build_metrics"])


def roots_of(trainer: "Trainer") -> dict[str, Any]:
    """Returns what a trainer reaches first, keyed by name, for `step.reach`.

    These are its attributes, the attributes of its class, and its methods, whose closures may hold
    variables too. Methods that build the model, the optimizer and the metrics are left out.
    """
    roots = {name: value for name, value in vars(trainer).items() if name not in OWN}
    for cls in type(trainer).__mro__:
        for name, value in vars(cls).items():
            if name not in BUILDERS:
                roots.setdefault(f"{cls.__name__}.{name}", value)
    return roots


def roots_of_run(trainer: "Trainer", parts: Parts) -> Mapping[str, Any]:
    """Returns `roots_of` a trainer that has started, and those parts that have variables."""
    own = {"model": trainer.model, "optimizer": trainer.optimizer}
    return own | {"state": parts.state, "metrics": parts.metrics} | roots_of(trainer)
