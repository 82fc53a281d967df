"""What an import says about other modules of our packages' names, and about other versions."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tomllib

import keras
import pytest
import tensorflow as tf

from trainer.base.at_import import SUPPORTED, check_siblings, check_versions, installed, numbers

ROOT = pathlib.Path(__file__).parents[3]


def test_the_bounds_are_those_of_the_package():
    """What an import accepts is what `pyproject.toml` lets pip install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    for package, (first, end) in SUPPORTED.items():
        assert f"{package}>={first},<{end}" in project["dependencies"]


@pytest.mark.parametrize(
    ("package", "version", "accepted"),
    [
        ("tensorflow", "2.18.1", False),
        ("tensorflow", "2.9.1", False),
        ("tensorflow", "2.19.0", True),
        ("tensorflow", "2.21.0", True),
        ("tensorflow", "2.21.0-rc1", True),
        ("tensorflow", "2.22.0-dev20260301", False),
        ("tensorflow", "3.0.0", False),
        ("keras", "3.14.1", False),
        ("keras", "3.15.0", True),
        ("keras", "3.15.1", True),
        ("keras", "3.16.0", False),
        ("keras", "4.0.0", False),
    ],
)
def test_bounds(package, version, accepted):
    """The first bound is accepted, the second is not; numbers are compared as numbers."""
    first, end = SUPPORTED[package]
    if accepted:
        check_versions({package: version})
        return
    with pytest.raises(ImportError) as refused:
        check_versions({package: version})

    assert f"{package}>={first},<{end}; got {package} {version}" in str(refused.value)
    assert refused.value.name == package


def test_numbers():
    """Two numbers are read of any version."""
    assert [numbers(text) for text in ("4", "2.21", "2.21.0-rc1")] == [(4, 0), (2, 21), (2, 21)]


def test_keras_of_another_name(monkeypatch):
    """A nightly build is another distribution; nothing is known about its version then."""
    assert installed() == {"tensorflow": tf.__version__, "keras": keras.__version__}

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert installed() == {"tensorflow": tf.__version__}


@pytest.mark.parametrize("package", ["tensorflow", "keras"])
def test_an_import_with_another_version(package, tmp_path):
    """`import trainer` ends with this error, not with a name that Keras lacks."""
    (tmp_path / "tensorflow.py").write_text(
        f"__version__ = '{'2.18.1' if package == 'tensorflow' else '2.21.0'}'\n"
        "class config: list_physical_devices = list\n"
    )
    (tmp_path / "keras-3.14.1.dist-info").mkdir()
    (tmp_path / "keras-3.14.1.dist-info" / "METADATA").write_text("Name: keras\nVersion: 3.14.1\n")
    got = {"tensorflow": "2.18.1", "keras": "3.14.1"}[package]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", "import trainer"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    first, end = SUPPORTED[package]

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: halfstep needs {package}>={first},<{end}; got {package} {got}"
    )


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
    assert f"`import {name}` finds {tmp_path / name}.py" in result.stderr.splitlines()[-1]
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
