"""A griffe extension that shows the values of defaults in `Trainer`, not the fields' names."""

from typing import Any

import griffe

# Modules whose classes hold defaults, in the order in which one refers to the next.
HOMES = ("config.groups", "config.checkpoints", "config.skips", "step.clip")


class Defaults(griffe.Extension):
    """Replaces defaults like `RunConfig.steps_per_loop` by the value that the field has."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Edits the signature of `Trainer.__init__`, once the whole package is loaded."""
        if pkg.name != "trainer":
            return
        for parameter in pkg["trainer.Trainer.__init__"].parameters:
            for module in HOMES:
                owner, _, field = str(parameter.default).partition(".")
                if owner in pkg[module].members and field in pkg[module][owner].members:
                    parameter.default = default_of(pkg[module][owner][field].value)


def default_of(value: griffe.Expr | str | None) -> str:
    """Returns the default of a field: the first argument of `count(10)`, or the value itself."""
    if not isinstance(value, griffe.ExprCall):
        return str(value)
    first = value.arguments[0]
    return str(first.value if isinstance(first, griffe.ExprKeyword) else first)
