"""What an import says when it meets another module with the name of one of our packages."""

import os
import pathlib
import subprocess
import sys

import pytest

from trainer.base.sibling_packages import check_siblings

ROOT = pathlib.Path(__file__).parents[3]


def test_our_own_packages_are_accepted():
    """In this checkout each name leads to our package."""
    check_siblings(ROOT)


@pytest.mark.parametrize("name", ["scaling", "strategies"])
def test_another_module_of_the_name_is_an_error_that_names_it(name, tmp_path):
    """A user's own scaling.py beside the script comes first; `import trainer` says which file it is,
    before TensorFlow is imported.
    """
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "script.py").write_text("import trainer\n")
    result = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: `import {name}` finds {tmp_path / name}.py, not halfstep's package in "
        f"{ROOT / name}. halfstep cannot work with another module of that name. Rename the other "
        "file or folder, or start Python with -P, which leaves out the script's folder."
    )
    assert "tensorflow" not in result.stderr


def test_a_tree_of_linked_files_is_accepted(tmp_path, monkeypatch):
    """Strict editable installs and build systems link each file: the folder counts, not the file's
    origin.
    """
    for name in ("scaling", "strategies"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").symlink_to(ROOT / name / "__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("scaling", "strategies"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    check_siblings(tmp_path)
