"""A griffe extension that shows the defaults of settings, not how their fields are made."""

from typing import Any

import griffe

# The groups of settings, by their places in the package.
GROUPS = (
    "callbacks.monitoring.Monitoring",
    "checkpoint.settings.Checkpoints",
    "losses.settings.Losses",
    "step.settings.Skips",
    "step.settings.Updates",
)


class Defaults(griffe.Extension):
    """Replaces `count(10)`, the value of a field in the source, by the field's default."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Edits the fields of the groups, once the whole package is loaded."""
        if pkg.name != "trainer":
            return
        for group in GROUPS:
            for member in pkg[group].members.values():
                if member.is_attribute:
                    member.value = default_of(member.value)


def default_of(value: griffe.Expr | str | None) -> str:
    """Returns the default of a field: the first argument of `count(10)`, or the value itself."""
    if not isinstance(value, griffe.ExprCall):
        return str(value)
    first = value.arguments[0]
    return str(first.value if isinstance(first, griffe.ExprKeyword) else first)
