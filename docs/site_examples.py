"""A griffe extension that shows the examples in docstrings as code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames `Example:` to `Examples:`, the only name that the docstring parser recognizes."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Edits the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
