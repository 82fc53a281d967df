"""The card and the tests of `strategies` are complete."""

import pathlib

import pytest

import strategies

PACKAGE = pathlib.Path(strategies.__file__).parent
MODULES = sorted(path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_row_and_a_test_file(module):
    """Every module has a row in the card's table and a test file of its name."""
    assert f"| `{module}` |" in (PACKAGE / "README.md").read_text()
    assert pathlib.Path(__file__).with_name(f"test_{module}").exists()
