"""A plugin of pytest: of `--full`, what the default run leaves out, with as few random examples.

The environment's DEFAULT_RUN names the tests, by commas, that have passed in the default run.
"""

import os

import pytest
from hypothesis import settings


@pytest.hookimpl(trylast=True)  # after tests/conftest.py
def pytest_configure() -> None:
    """Loads the profile of the default run."""
    settings.load_profile("default")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out what has passed before."""
    passed = tuple(os.environ["DEFAULT_RUN"].split(","))
    before = [
        item
        for item in items
        if item.nodeid.startswith(passed) and not item.get_closest_marker("thorough")
    ]
    config.hook.pytest_deselected(items=before)
    items[:] = [item for item in items if item not in before]
