"""Tests that public names are listed and documented, and that the examples in docstrings run."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import scaling
import scaling.float8
import strategies
import trainer
import trainer.step

FOLDERS = [scaling, scaling.float8, strategies, trainer, trainer.step]
MODULES = [
    importlib.import_module(found.name)
    for package in (scaling, strategies, trainer)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
PUBLIC = [(folder, name) for folder in FOLDERS for name in folder.__all__]

# Names without an example of their own, and the name whose example uses them.
WITHOUT_EXAMPLE = {
    "AimTracker": "Tracker",
    "Capabilities": "capabilities",
    "CheckpointError": "Trainer",
    "DataError": "Trainer",
    "BatchResult": "Trainer",
    "DivergedError": "Trainer",
    "Share": "take",
    "own_share": "shares",
    "DryRun": "Trainer",
    "MLflowTracker": "Tracker",
    "Overfit": "Trainer",
    "StepReport": "Trainer",
    "Totals": "Trainer",
    "TrainSummary": "Trainer",
    "TrainingStuckError": "Trainer",
    "WorkerLostError": "Trainer",
    "StepPlan": "plan_step",
    "TrackedRun": "Tracker",
    "TrainState": "plan_step",
    "WandbTracker": "Tracker",
    "attempt_step": "plan_step",
}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.__name__)
def test_all_lists_what_a_package_offers(folder):
    """`__all__` is sorted and lists exactly the public names that the package offers."""
    offered = {
        name
        for name in dir(folder)
        if not name.startswith("_") and not inspect.ismodule(getattr(folder, name))
    }

    assert sorted(folder.__all__) == folder.__all__
    assert set(folder.__all__) == offered


@pytest.mark.parametrize(
    ("folder", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value)
)
def test_public_names_are_documented(folder, name):
    """Every public name has a docstring, and an example of its own or in another's docstring."""
    value = getattr(folder, name)
    has_example = ">>>" in (inspect.getdoc(value) or "")

    assert inspect.getdoc(value)
    assert has_example != (name in WITHOUT_EXAMPLE), f"{name}: example {has_example}"


@pytest.mark.parametrize(
    "module",
    [  # the examples of `trainer` train
        pytest.param(
            module,
            id=module.__name__,
            marks=pytest.mark.thorough if module.__name__.startswith("trainer.") else (),
        )
        for module in MODULES
    ],
)
def test_examples_in_docstrings_run(module):
    """Every example in a docstring prints what it shows."""
    failures, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)

    assert failures == 0
