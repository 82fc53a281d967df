"""A plugin of pytest: `--full` runs more tests, but random searches only to their usual length."""

import pytest
from hypothesis import settings


@pytest.hookimpl(trylast=True)  # after tests/conftest.py
def pytest_configure() -> None:
    """Loads the profile of the default run."""
    settings.load_profile("default")
