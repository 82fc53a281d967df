"""A plugin of pytest for `.ci/mutate`, which makes a run with `--full` shorter.

Random searches are as long as in the default run, and slow tests are left out. The environment's
DEFAULT_RUN names a test file that has passed in the default run. Of this file, only the tests that
the default run skips are run; that includes all cases of which the default run takes a sample.
"""

import os

import pytest
from hypothesis import settings

SLOW = pytest.StashKey[bool]()


@pytest.hookimpl(trylast=True)  # after tests/conftest.py
def pytest_configure() -> None:
    """Loads the profile of the default run."""
    settings.load_profile("default")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Notes which tests are slow before conftest.py marks the cases that a sample leaves out."""
    item.stash[SLOW] = item.get_closest_marker("slow") is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out what is slow, and what has passed before."""
    left_out = [item for item in items if not is_taken(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def is_taken(item: pytest.Item) -> bool:
    """Returns whether a test is to be run."""
    mirrors = item.nodeid.startswith(os.environ["DEFAULT_RUN"])
    if item.get_closest_marker("slow"):
        of_many_replicas = "replicas" in getattr(item, "fixturenames", ())
        return mirrors and not item.stash[SLOW] and not of_many_replicas
    return not mirrors or item.get_closest_marker("thorough") is not None
