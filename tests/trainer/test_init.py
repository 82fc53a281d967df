"""`import trainer`: every public name is there, and nothing is loaded before it is used."""

import subprocess
import sys

import pytest

import trainer

LOADED = """
import sys
import {module}
print(*sorted(name for name in sys.modules if name.startswith(("trainer.", "rich", "absl.flags"))))
"""


def loaded_by(module):
    """Names of the modules of ours, of rich, and absl's flags, that importing a module loads."""
    result = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("name", trainer.__all__)
def test_every_public_name_is_imported_on_first_use(name):
    """The table of modules and `__all__` agree, and each name is what its module defines."""
    assert getattr(trainer, name).__name__ == name
    assert name in dir(trainer)


def test_an_unknown_name_is_an_attribute_error():
    """As for any module."""
    with pytest.raises(AttributeError, match=r"module 'trainer' has no attribute 'Trainr'"):
        trainer.Trainr  # noqa: B018


@pytest.mark.slow
def test_the_step_alone_loads_no_shell():
    """`trainer.step` loads the step and what it rests on: no log, no checkpoints, no data."""
    found = {name for name in loaded_by("trainer.step") if name.startswith("trainer.")}

    assert {name.split(".")[1] for name in found} == {"base", "keras_compat", "step"}


@pytest.mark.slow
def test_the_package_alone_loads_only_its_start():
    """`import trainer` loads nothing but the checks at its start."""
    found = {name for name in loaded_by("trainer") if name.startswith("trainer.")}

    assert found == {
        "trainer.base",
        "trainer.base.at_import",
    }
