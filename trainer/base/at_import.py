"""What `import trainer` checks first: the versions of its libraries."""

import contextlib
import importlib.metadata
import re

# The first version that works, and the first that was not tried. pyproject.toml has the same.
SUPPORTED = {"tensorflow": ("2.19", "2.22"), "keras": ("3.15", "3.16")}


def check_versions(found: dict[str, str]) -> None:
    """Raises ImportError unless each version is supported.

    Without this check, an import in `keras_compat.py` would fail on a name, or, worse, a private
    name would have another meaning.

    Args:
        found: versions such as "2.21.0-rc1", keyed by the name of the package.

    Example:
        >>> check_versions({"tensorflow": "2.21.1", "keras": "3.15.0"})
    """
    for package, version in found.items():
        first, end = SUPPORTED[package]
        if not numbers(first) <= numbers(version) < numbers(end):
            raise ImportError(
                f"halfstep needs {package}>={first},<{end}; got {package} {version}",
                name=package,
            )


def numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version; "4" counts as "4.0"."""
    found = [int(digits) for digits in re.findall(r"\d+", version)[:2]]
    return tuple(found + [0] * (2 - len(found)))


def installed() -> dict[str, str]:
    """Returns the version of TensorFlow, which this imports, and of Keras, which it does not.

    A build of Keras that has another name, such as a nightly one, is left out.
    """
    import tensorflow as tf  # noqa: PLC0415  # only after its output has been dealt with

    found: dict[str, str] = {"tensorflow": tf.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["keras"] = importlib.metadata.version("keras")
    return found
