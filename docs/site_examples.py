"""Shows the examples of docstrings as code, whose section the parser knows by another name."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Our docstrings say `Example:`; the parser knows `Examples:`, and takes ours for a remark."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with every function, class and module, and what is in them."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
