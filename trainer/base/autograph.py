"""The user's functions, in which Python's `if` and `for` may depend on tensors.

AutoGraph rewrites them, as it does whatever a `tf.function` calls. Our own functions need no
rewriting, and it took longer than tracing them; so they are traced without it, and it begins
again where the user's begin.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# What is called in a function that was rewritten is rewritten itself.
call_user = tf.autograph.to_graph(_call)

not_rewritten = tf.autograph.experimental.do_not_convert
