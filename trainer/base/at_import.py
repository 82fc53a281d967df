"""What `import trainer` checks first: the versions of its libraries."""

import contextlib
import importlib.metadata
import re
import warnings

# The oldest and the newest versions that were tried; see docs/versions.md. pyproject.toml has the
# oldest ones, too.
TRIED = {"tensorflow": ("2.19", "2.21"), "keras": ("3.10", "3.15")}


def check_versions(found: dict[str, str]) -> None:
    """Raises ImportError for a version that is too old; warns of one that was not tried yet.

    Without this check, an import in `keras_compat.py` would fail on a name, or, worse, a private
    name would have another meaning.

    Args:
        found: versions such as "2.21.0-rc1", keyed by the name of the package.

    Example:
        >>> check_versions({"tensorflow": "2.21.1", "keras": "3.15.0"})
    """
    for package, version in found.items():
        oldest, newest = TRIED[package]
        if numbers(version) < numbers(oldest):
            raise ImportError(
                f"halfstep needs {package}>={oldest}; got {package} {version}", name=package
            )
        if numbers(version) > numbers(newest):
            warnings.warn(
                f"halfstep was tried with {package} up to {newest}; got {package} {version}",
                stacklevel=3,
            )


def numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version; "4" counts as "4.0"."""
    found = [int(digits) for digits in re.findall(r"\d+", version)[:2]]
    return tuple(found + [0] * (2 - len(found)))


def installed() -> dict[str, str]:
    """Returns the version of TensorFlow, which this imports, and of Keras, which it does not.

    A build of Keras that has another name, other than its nightly one, is left out.
    """
    import tensorflow as tf  # noqa: PLC0415  # only after its output has been dealt with

    found: dict[str, str] = {"tensorflow": tf.__version__}
    for name in ("keras", "keras-nightly"):  # whoever installs the latter, too, means it
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["keras"] = importlib.metadata.version(name)
    return found
