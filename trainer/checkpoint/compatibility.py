"""Compares a run with the checkpoint it resumes from: some settings must be the same."""

import importlib.metadata
import pathlib
import platform
from collections.abc import Sequence

from absl import logging

from trainer.base.argument_checks import check_choice
from trainer.checkpoint.folder import Facts

# The entries of `run.json` to compare, with the argument of `Trainer` or `train` that sets each.
ARGUMENTS = {
    "precision": "precision",
    "loss_scale": "loss_scale",
    "seed": "seed",
    "num_replicas": "strategy",
    "global_batch": "train_data",
    "data": "train_data",
}

# What a run continues with when one of these entries has changed.
EFFECTS = {
    "precision": "another precision",
    "loss_scale": "another loss-scale rule, from its initial scale",
    "seed": "other random numbers, and its data from the beginning",
    "num_replicas": "different shares of each batch on the replicas, and its metrics from zero",
    "global_batch": "other batches, from the beginning of the data",
    "data": "other data, from the beginning",
}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute a step."""
    packages = ("halfstep", "tensorflow", "keras", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return found | {"python": platform.python_version()}


def check_allow_changes(names: Sequence[str]) -> None:
    """Raises TypeError or ValueError unless `names` is a valid `allow_changes`."""
    if isinstance(names, str):
        raise TypeError(
            f"`allow_changes` must be a sequence of names; got {names!r}. Each name is a setting "
            f"that may differ from the checkpoint. Pass ({names!r},)."
        )
    for name in names:
        check_choice("allow_changes", name, tuple(ARGUMENTS))


def check_same(saved: Facts, ours: Facts, allowed: Sequence[str], path: pathlib.Path) -> list[str]:
    """Compares the settings of a run with those in a checkpoint.

    Args:
        saved: contents of the checkpoint's `run.json`.
        ours: the same entries for this run.
        allowed: names of the entries that may differ.
        path: path of the checkpoint.

    Returns:
        Names of the entries that differ, all of them allowed.

    Raises:
        ValueError: if an entry differs that is not in `allowed`.
    """
    changed = [name for name in ARGUMENTS if saved.get(name) != ours[name]]
    for name in changed:
        if name not in allowed:
            raise ValueError(
                f"`{ARGUMENTS[name]}` must be the same as in {path} to resume from it; got {name} "
                f"{ours[name]!r}, and the checkpoint has {saved.get(name)!r}. The run would "
                f"continue with {EFFECTS[name]}. Use another model_dir, or pass "
                f"allow_changes={(*allowed, name)!r}."
            )
        logging.warning(
            "%s was %r in %s and is %r now, as allow_changes permits. The run continues with %s.",
            name,
            saved.get(name),
            path,
            ours[name],
            EFFECTS[name],
        )
    warn_about_versions(saved.get("versions", {}), path)
    return changed


def warn_about_versions(saved: dict[str, str], path: pathlib.Path) -> None:
    """Logs a warning if a checkpoint was written with other versions."""
    now = versions()
    differences = ", ".join(
        f"{name} {was} (now {now.get(name)})" for name, was in saved.items() if now.get(name) != was
    )
    if differences:
        logging.warning(
            "%s was written with %s. Results may not be identical bit for bit.", path, differences
        )
