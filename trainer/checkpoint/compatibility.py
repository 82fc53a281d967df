"""Compares a run with the checkpoint it resumes from: some settings must be the same."""

import functools
import importlib.metadata
import pathlib
import platform
import re
from collections.abc import Collection, Mapping, Sequence

from absl import logging

from trainer.checkpoint.folder import Facts
from trainer.checkpoint.run_facts import Difference, differences
from trainer.data.fingerprint import first_change

# The entries of `run.json` to compare, with the argument of `Trainer` or `train` that sets each.
ARGUMENTS = {
    "precision": "precision",
    "loss_scale": "loss_scale",
    "seed": "seed",
    "num_replicas": "strategy",
    "global_batch": "train_data",
    "data": "train_data",
    "num_microbatches": "num_microbatches",
    "model": "model",
    "optimizer": "optimizer",
    "loss": "loss_fn",
    "global_clipnorm": "global_clipnorm",
    "clipnorm": "clipnorm",
    "clipvalue": "clipvalue",
    "ema_momentum": "ema_momentum",
    "alternate_optimizers": "alternate_optimizers",
    "updates_per_step": "updates_per_step",
}

# What a run continues with when one of these entries has changed.
EFFECTS = {
    "precision": "another precision",
    "loss_scale": "another loss-scale rule, from its initial scale",
    "seed": "other random numbers, and its data from the beginning",
    "num_replicas": "different shares of each batch on the replicas, and its metrics from zero",
    "global_batch": "other batches, from the beginning of the data",
    "data": "other data, from the beginning",
    "num_microbatches": "other random numbers in each part of a batch, and other rounding",
    "model": "the same weights in another model",
    "optimizer": "the state of the saved optimizer in another one",
    "loss": "another loss",
    "global_clipnorm": "another bound on its gradients",
    "clipnorm": "another bound on its gradients",
    "clipvalue": "another bound on its gradients",
    "ema_momentum": "another average of the weights",
    "alternate_optimizers": "another order of updates",
    "updates_per_step": "another number of updates in each step",
}

# Entries that may change, with what a warning says about it. They either matter only for steps
# that are skipped from here on, or change nothing but rounding or what is logged.
LOGGED = {
    "jit_compile": "Results may differ by rounding.",
    "reduce_dtype": "Sums of gradients over replicas are rounded in another way from here on.",
    "reduce_bucket_bytes": "Sums of gradients over replicas may differ by rounding.",
    "metrics": "The training metrics begin at zero.",
    "on_overflow": "It holds for steps from here on.",
    "max_retries": "It holds for steps from here on.",
    "on_nonfinite_loss": "It holds for steps from here on.",
    "max_consecutive": "It holds for steps from here on.",
    "on_stuck": "It holds for steps from here on.",
    "attribute_causes": "It holds for steps from here on.",
}
OF_SEVERAL_REPLICAS = ("reduce_dtype", "reduce_bucket_bytes")  # one replica does not record them


@functools.cache
def versions() -> Mapping[str, str]:
    """Returns the versions of Python and of the packages that compute a step."""
    packages = ("halfstep", "tensorflow", "keras", "numpy")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def version(package: str) -> str:
    """Returns the version of a package, or that it is not installed: a clone on PYTHONPATH."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check_same(saved: Facts, ours: Facts, allowed: Sequence[str], path: pathlib.Path) -> list[str]:
    """Compares the settings of a run with those in a checkpoint.

    Args:
        saved: contents of the checkpoint's `run.json`.
        ours: the same entries for this run.
        allowed: names of the entries that may differ.
        path: path of the checkpoint.

    Returns:
        Names of the entries that differ: those that are allowed, and those of `LOGGED`.

    Raises:
        ValueError: if an entry differs that is not in `allowed`.
    """
    warn_about_what_is_unknown(saved, ours, path)
    before, now = (facts | facts.get("identity", {}) for facts in (saved, ours))
    same_keras = same_package(saved, ours, "keras")
    changed: dict[str, list[Difference]] = {}
    for name in ARGUMENTS:
        ignored = ignored_keys(saved, ours, "precision" in changed)
        old, new = before, now
        if name == "data" and "global_batch" in changed:
            old, new = without_sizes(before), without_sizes(now)
        found = changes_of(name, old, new, ignored, keep_new=same_keras)
        if found:
            changed[name] = found
    refused = {name: found for name, found in changed.items() if name not in allowed}
    if refused:
        raise not_the_same(refused, (*allowed, *refused), path)
    for name, found in changed.items():
        logging.warning(
            "%s, as allow_changes permits. The run continues with %s.",
            "; ".join(
                f"{place_of(name, each)} was {each.was!r} in {path} and is {each.now!r} now"
                for each in found
            ),
            EFFECTS[name],
        )
    logged = warn_about_logged(before, now, path)
    warn_about_versions(saved.get("versions", {}), path)
    return [*changed, *logged]


def not_the_same(
    refused: Mapping[str, Sequence[Difference]], allowed: tuple[str, ...], path: pathlib.Path
) -> ValueError:
    """Returns the error for entries that differ and may not.

    Args:
        refused: how each of them differs, by name.
        allowed: what `allow_changes` would have to be.
        path: path of the checkpoint.
    """
    arguments = dict.fromkeys(f"`{ARGUMENTS[name]}`" for name in refused)
    got = "; ".join(
        f"{place_of(name, each)} {each.now!r}, and the checkpoint has {each.was!r}"
        for name, found in refused.items()
        for each in found
    )
    effects = "; with ".join(dict.fromkeys(EFFECTS[name] for name in refused))
    return ValueError(
        f"{' and '.join(arguments)} must be the same as in {path} to resume from it; got {got}. "
        f"The run would continue with {effects}. Use another model_dir, or pass "
        f"allow_changes={allowed!r}."
    )


def place_of(name: str, difference: Difference) -> str:
    """Returns the name of an entry, and where in it the difference is."""
    if difference.place.startswith(f"{name} ("):  # one optimizer, which is called "optimizer"
        return difference.place
    return f"{name} {difference.place}" if difference.place else name


def changes_of(
    name: str, before: Facts, now: Facts, ignored: Collection[str], *, keep_new: bool
) -> list[Difference]:
    """Returns how one entry differs; nothing if one of the two runs has not recorded it.

    Args:
        name: the name of the entry.
        before: the checkpoint's entries.
        now: the entries of this run.
        ignored: keys within an entry that are not compared.
        keep_new: whether to count what only one of the two descriptions has. Another version of
            Keras may describe more of an object.
    """
    if name not in before or name not in now:
        return []
    found = differences(before[name], now[name], ignored)
    if not keep_new and name in ("model", "optimizer", "loss", "metrics"):
        found = [each for each in found if each.was is not None and each.now is not None]
    if name == "data" and not found:
        found = changed_content(before, now)
    return found


def without_sizes(facts: Facts) -> Facts:
    """Returns facts whose data does not tell what another global batch changes.

    That is the first dimension of a batch, the number of batches, and the numbers in the
    description of a pipeline.
    """
    if "data" not in facts:
        return facts
    text = re.sub(r"shape=\((\d+|None)", "shape=(", facts["data"])
    text = re.sub(r"(\d+|None) steps an epoch", "steps an epoch", text)
    return {**facts, "data": re.sub(r"(Dataset\w*)\([\d, -]*\)", r"\1()", text)}


def changed_content(before: Facts, now: Facts) -> list[Difference]:
    """Returns the first difference between the fingerprints of the data, in a list."""
    was, ours = before.get("content"), now.get("content")
    if was is None or ours is None:
        return []
    change = first_change(was, ours)
    return [Difference(f"component {change[0]}", *change[1:])] if change else []


def ignored_keys(saved: Facts, ours: Facts, other_precision: bool) -> list[str]:
    """Returns the keys within descriptions that two runs cannot be compared by."""
    bytecode = [] if same_package(saved, ours, "python") else ["code"]
    return [*bytecode, *(["dtype"] if other_precision else [])]


def same_package(saved: Facts, ours: Facts, name: str) -> bool:
    """Returns whether two runs have the same version of a package."""
    was, now = (facts.get("versions", {}).get(name) for facts in (saved, ours))
    return bool(was == now)


def warn_about_what_is_unknown(saved: Facts, ours: Facts, path: pathlib.Path) -> None:
    """Logs a warning that names what an older checkpoint has not recorded."""
    was, now = saved.get("identity", {}), ours.get("identity", {})
    if was.get("version") != now.get("version"):
        saved["identity"] = was = {}
    one_replica = saved.get("num_replicas") == 1
    not_recorded = {"version", *(OF_SEVERAL_REPLICAS if one_replica else ())}
    unknown = [name for name in now if name not in was and name not in not_recorded]
    unknown += ["content of the data"] * (not was and "content" in ours)
    if unknown:
        logging.warning(
            "%s was written by an older version of halfstep, which did not record %s. The run "
            "resumes without comparing them.",
            path,
            ", ".join(unknown),
        )


def warn_about_model(saved: Facts, ours: Facts, path: pathlib.Path) -> None:
    """Logs a warning if another model is to be evaluated with the weights in a checkpoint.

    Args:
        saved: contents of the checkpoint's `run.json`.
        ours: the entries "identity" and "versions" of this run.
        path: path of the checkpoint.
    """
    before, now = saved.get("identity", {}), ours["identity"]
    if before.get("version") != now["version"]:
        return
    ignored = ignored_keys(saved, ours, other_precision=True)
    found = changes_of("model", before, now, ignored, keep_new=same_package(saved, ours, "keras"))
    if found:
        logging.warning(
            "The model is not the one that was trained in %s: %s is %r now and was %r. It is "
            "evaluated as it is now.",
            path,
            place_of("model", found[0]),
            found[0].now,
            found[0].was,
        )


def warn_about_logged(before: Facts, now: Facts, path: pathlib.Path) -> list[str]:
    """Logs a warning for each entry of `LOGGED` that has changed; returns their names."""
    changed = []
    for name, effect in LOGGED.items():
        found = changes_of(name, before, now, (), keep_new=True)
        if found:
            changed.append(name)
            values = place_of(name, found[0]), found[0].was, path, found[0].now, effect
            logging.warning("%s was %r in %s and is %r now. %s", *values)
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
