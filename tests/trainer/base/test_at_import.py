"""What an import says about other versions of TensorFlow and Keras."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import keras
import pytest
import tensorflow as tf

from trainer.base.at_import import SUPPORTED, check_versions, installed

ROOT = pathlib.Path(__file__).parents[3]


def test_the_bounds_are_those_of_the_package():
    """What an import accepts is what `pyproject.toml` lets pip install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    for package, (first, end) in SUPPORTED.items():
        assert f"{package}>={first},<{end}" in project["dependencies"]


@pytest.mark.parametrize(
    ("package", "version", "accepted"),
    [
        ("tensorflow", "2.9.1", False),
        ("tensorflow", "2.19.0", True),
        ("tensorflow", "2.21.0-rc1", True),
        ("tensorflow", "2.22.0-dev20260301", False),
        ("keras", "3.14.1", False),
        ("keras", "3.15", True),
        ("keras", "4", False),
    ],
)
def test_bounds(package, version, accepted):
    """The first bound is accepted, the second is not; numbers are compared as numbers."""
    if accepted:
        check_versions({package: version})
        return
    with pytest.raises(ImportError, match=package):
        check_versions({package: version})


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

    assert ended.returncode == 1
    assert re.match(f"ImportError: .*{package} {got}$", ended.stderr.splitlines()[-1])
