"""Calls users' functions with AutoGraph, so that their `if` and `for` may depend on tensors.

By default AutoGraph rewrites everything that a `tf.function` calls. The library's own functions do
not need AutoGraph, and rewriting them took longer than tracing them. So they are traced with
AutoGraph off (`without_autograph`), and `call_user` turns it on again for a user's function.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# AutoGraph converts whatever a converted function calls, so converting `_call` is enough.
call_user = tf.autograph.to_graph(_call)


def without_autograph(function: Function) -> Function:
    """Returns a function that AutoGraph does not rewrite. Use it as a decorator."""
    plain: Function = tf.autograph.experimental.do_not_convert(function)
    return plain
