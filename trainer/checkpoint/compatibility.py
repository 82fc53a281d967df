"""What `run.json` says of a run, and what must be the same to go on exactly."""

import importlib.metadata
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from absl import logging

from trainer.base.argument_checks import check_choice

# What is compared, and the argument that says it.
ARGUMENTS = {
    "precision": "precision",
    "loss_scale": "loss_scale",
    "seed": "seed",
    "num_replicas": "strategy",
    "global_batch": "train_data",
    "data": "train_data",
}

REASONS = {
    "precision": "The run would go on computing in another way.",
    "loss_scale": "The run would go on under another rule.",
    "seed": "The run would go on with other random numbers and, of arrays, other batches.",
    "num_replicas": "The run would go on with other shares of a batch on each replica.",
    "global_batch": "The run would go on with other batches.",
    "data": "The run would go on with other batches.",
}


def versions() -> dict[str, str]:
    """Returns the versions of what computes."""
    packages = ("halfstep", "tensorflow", "keras", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return found | {"python": platform.python_version()}


def check_changeable(names: Sequence[str]) -> None:
    """Raises ValueError unless all of some names may be given as `allow_changes`."""
    if isinstance(names, str):
        raise TypeError(
            f"`allow_changes` must be a sequence of names; got {names!r}. Each is something that "
            f"may differ from the checkpoint. Pass ({names!r},)."
        )
    for name in names:
        check_choice("allow_changes", name, tuple(ARGUMENTS))


def check_same(
    saved: dict[str, Any], ours: dict[str, Any], allowed: Sequence[str], path: pathlib.Path
) -> list[str]:
    """Compares a run with the one that left a checkpoint.

    Args:
        saved: what the checkpoint's `run.json` says.
        ours: what it would say of this run.
        allowed: what may differ.
        path: of the checkpoint.

    Returns:
        What differs, all of it allowed.

    Raises:
        ValueError: if something else differs: it gives the place and both values.
    """
    changed = [name for name in ARGUMENTS if saved.get(name) != ours[name]]
    for name in changed:
        if name not in allowed:
            raise ValueError(
                f"`{ARGUMENTS[name]}` must be that of the run in {path} to go on with it; got "
                f"{name} {ours[name]!r} for {saved.get(name)!r} there. {REASONS[name]} Use another "
                f'model_dir, or pass allow_changes=("{name}",).'
            )
        logging.warning(
            "%s was %r in %s and is %r now, as allow_changes permits. %s",
            name,
            saved.get(name),
            path,
            ours[name],
            REASONS[name],
        )
    warn_of_versions(saved.get("versions", {}), path)
    return changed


def warn_of_versions(saved: dict[str, str], path: pathlib.Path) -> None:
    """Says so, if other versions may end in other bits."""
    now = versions()
    others = {name: was for name, was in saved.items() if now.get(name) != was}
    if others:
        told = ", ".join(f"{name} {was}, now {now.get(name)}" for name, was in others.items())
        logging.warning("%s was written with %s: the bits may differ.", path, told)
