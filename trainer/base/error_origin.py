"""Whose code raised an error."""

import traceback


def raising_package(error: BaseException) -> str:
    """Returns the top-level package of the line that raised an error, such as "keras".

    Example:
        >>> import json
        >>> try:
        ...     json.loads("{")
        ... except ValueError as error:
        ...     print(raising_package(error))
        json
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).split(".")[0]
