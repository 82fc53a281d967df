"""The release: its archives hold what they must and nothing else, under one version."""

import importlib.machinery
import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("release", str(ROOT / ".ci" / "release"))
release = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", LOADER))
LOADER.exec_module(release)

TRACKED = [*release.NEEDED, "trainer/step/verdict.py", "tests/conftest.py", "pyproject.toml"]
INFO = "halfstep-0.1.0.dist-info"
IN_WHEEL = [f"{INFO}/{file}" for file in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")]


def test_the_version_of_this_commit_is_one():
    """`pyproject.toml`, `CITATION.cff` and the newest heading of the changelog have one version."""
    files = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    texts = [(ROOT / file).read_text() for file in files]

    assert release.faults_of_versions(*texts, rehearsal=True) == []


def contents(kind):
    """A sound archive's name and members."""
    folders = [file for file in TRACKED if file.split("/")[0] in release.PACKAGES]
    beside = IN_WHEEL if kind == "wheel" else [*release.BESIDE, "PKG-INFO"]
    name = {"wheel": "halfstep-0.1.0-py3-none-any.whl", "source": "halfstep-0.1.0.tar.gz"}[kind]
    return name, dict.fromkeys([*folders, *beside], b"x")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("private key", "-----BEGIN RSA " + "PRIVATE KEY-----"),
        ("token of GitHub", "ghp_" + "a" * 36),
        ("key of AWS", "AKIA" + "A" * 16),
        ("token of PyPI", "pypi-AgEI" + "c" * 40),
    ],
)
def test_a_secret_in_a_committed_file_is_found(kind, text):
    """What looks like a secret stops the release, in whichever file it is."""
    name, content = contents("wheel")
    content["trainer/step/verdict.py"] = b"# " + text.encode()

    assert release.faults_of_contents(name, content, TRACKED) == [
        f"{name} has what looks like a {kind} in trainer/step/verdict.py"
    ]


@pytest.mark.slow
def test_this_commit_can_be_released():
    """Two builds of this commit are equal and sound, and what indexes read of them is in order."""
    pytest.importorskip("build")
    pytest.importorskip("twine")
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "release", "--rehearsal", "--no-environment"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("PASSED") == 2
