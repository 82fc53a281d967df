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

from trainer.base.at_import import TRIED, check_versions, installed

ROOT = pathlib.Path(__file__).parents[3]


def test_the_bounds_are_those_of_the_package():
    """`pyproject.toml` lets pip install the oldest versions that were tried, and any newer ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    for package, (oldest, _) in TRIED.items():
        assert f"{package}>={oldest}" in project["dependencies"]


@pytest.mark.parametrize("package", TRIED)
def test_versions_that_were_tried(package):
    """From the oldest to the newest, with all patches of these, there is nothing to say."""
    for version in TRIED[package]:
        check_versions({package: version})
        check_versions({package: f"{version}.9-rc1"})


@pytest.mark.parametrize(
    ("package", "version"),
    [("tensorflow", "2.9.1"), ("tensorflow", "1.99"), ("keras", "3.9.2"), ("keras", "2.15.0")],
)
def test_an_older_version_is_refused(package, version):
    """By name; numbers are compared as numbers, not as texts."""
    with pytest.raises(ImportError, match=f"{package}>={TRIED[package][0]}; got") as refused:
        check_versions({package: version})

    assert refused.value.name == package


@pytest.mark.parametrize(
    ("package", "version"),
    [("tensorflow", "2.99.0-dev20260301"), ("keras", "3.99.0"), ("keras", "4.0.0")],
)
def test_a_newer_version_is_named(package, version):
    """It is used, after one warning."""
    with pytest.warns(UserWarning, match=f"{package} up to .*; got {package} {version}") as warned:
        check_versions({package: version})

    assert len(warned) == 1


def test_keras_of_another_name(monkeypatch):
    """A nightly build is known by its own name; of other builds nothing is known."""
    assert installed() == {"tensorflow": tf.__version__, "keras": keras.__version__}

    def version(name):
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    known = {"keras-nightly": "3.16.0.dev1"}
    assert installed()["keras"] == "3.16.0.dev1"
    known = {}
    assert "keras" not in installed()


@pytest.mark.parametrize(
    ("tensorflow", "keras_version", "said"),
    [
        ("2.9.1", "3.15.1", "ImportError: halfstep needs tensorflow>="),
        ("2.21.0", "3.9.2", "ImportError: halfstep needs keras>="),
        pytest.param(None, "3.99.0", "UserWarning: halfstep was tried", marks=pytest.mark.thorough),
    ],
)
def test_an_import_with_another_version(tensorflow, keras_version, said, tmp_path):
    """`import trainer` names it, and does not end with a name that Keras lacks."""
    if tensorflow:
        (tmp_path / "tensorflow.py").write_text(
            f"__version__ = '{tensorflow}'\nclass config: list_physical_devices = list\n"
        )
    folder = tmp_path / f"keras-{keras_version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: keras\nVersion: {keras_version}\n")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", "import trainer"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )

    assert ended.returncode == said.startswith("ImportError")
    assert sum(said in line for line in ended.stderr.splitlines()) == 1
