"""The release: its archives hold what they must and nothing else, under one version."""

import importlib.machinery
import importlib.util
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("release", str(ROOT / ".ci" / "release"))
release = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", LOADER))
LOADER.exec_module(release)

TRACKED = [*release.NEEDED, "trainer/step/judge.py", "tests/conftest.py", "pyproject.toml"]
INFO = "halfstep-0.1.0.dist-info"
IN_WHEEL = [f"{INFO}/{file}" for file in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")]
PROJECT = '[project]\nversion = "0.2.0"\n'
CITATION = "cff-version: 1.2.0\nversion: 0.2.0\n"
CHANGELOG = "# Changelog\n\n## 0.2.0 - 2026-11-24\n\n## 0.1.0 - 2026-01-01\n"


def test_the_version_of_this_commit_is_one():
    """`pyproject.toml`, `CITATION.cff` and the newest heading of the changelog have one version."""
    files = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    texts = [(ROOT / file).read_text() for file in files]

    assert release.faults_of_versions(*texts, rehearsal=True) == []


@pytest.mark.parametrize(
    ("project", "citation", "changelog", "fault"),
    [
        (PROJECT, CITATION, CHANGELOG, None),
        (PROJECT, "version: 0.1.0\n", CHANGELOG, "0.2.0, CITATION.cff has 0.1.0"),
        (PROJECT, CITATION, "## 0.1.0 - 2026-01-01\n", "0.2.0, CHANGELOG.md has 0.1.0"),
        (PROJECT, CITATION, "## 0.2.0 - unreleased\n", "no date for 0.2.0, but 'unreleased'"),
    ],
)
def test_versions_that_differ(project, citation, changelog, fault):
    """A file that was forgotten is named, with both versions; a release needs a date."""
    found = release.faults_of_versions(project, citation, changelog, rehearsal=False)

    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def contents(kind):
    """A sound archive's name and members."""
    rooms = [file for file in TRACKED if file.split("/")[0] in release.ROOMS]
    beside = IN_WHEEL if kind == "wheel" else [*release.BESIDE, "PKG-INFO"]
    name = {"wheel": "halfstep-0.1.0-py3-none-any.whl", "source": "halfstep-0.1.0.tar.gz"}[kind]
    return name, dict.fromkeys([*rooms, *beside], b"x")


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_contents_are_compared_with_what_is_committed(kind):
    """Each archive has every committed file of the packages and no other; neither has tests."""
    name, content = contents(kind)
    assert release.faults_of_contents(name, content, TRACKED) == []

    for needed in release.NEEDED:
        less = {file: data for file, data in content.items() if file != needed}
        assert release.faults_of_contents(name, less, TRACKED) == [f"{name} lacks {needed}"]
        # Nor is it enough that a file is missing from the repository as well.
        left = [file for file in TRACKED if file != needed]
        assert release.faults_of_contents(name, less, left) == [f"{name} lacks {needed}"]
    for stray in ("tests/conftest.py", "trainer/.env", "trainer/step/notes.txt"):
        found = release.faults_of_contents(name, content | {stray: b""}, TRACKED)
        assert found == [f"{name} should not have {stray}"]


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
    content["trainer/step/judge.py"] = b"# " + text.encode()

    assert release.faults_of_contents(name, content, TRACKED) == [
        f"{name} has what looks like a {kind} in trainer/step/judge.py"
    ]


def test_two_builds_that_differ(tmp_path):
    """Two builds are equal in every byte; if not, the members that differ are named."""
    pairs = []
    for number, text in enumerate(["a", "a", "b"]):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "halfstep-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo("trainer/__init__.py"), text)
        pairs.append(path)
    with zipfile.ZipFile(tmp_path / "0" / "aged.whl", "w") as archive:
        archive.writestr(zipfile.ZipInfo("trainer/__init__.py", (2001, 1, 1, 0, 0, 0)), "a")
    aged = (tmp_path / "0" / "aged.whl").rename(tmp_path / pairs[0].name)
    said = f"{aged.name} is not reproducible: two builds differ in "

    assert release.faults_of_pair(pairs[0], pairs[1]) == []
    assert release.faults_of_pair(pairs[0], pairs[2]) == [said + "trainer/__init__.py"]
    assert release.faults_of_pair(pairs[0], aged) == [said + "times, modes or order of its members"]


def test_members_of_both_kinds_of_archives(tmp_path):
    """Members are read by their names; those of a source archive without its folder."""
    (tmp_path / "pyproject.toml").write_text("x")
    with tarfile.open(tmp_path / "h-1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "pyproject.toml", "h-1/pyproject.toml")
    with zipfile.ZipFile(tmp_path / "h-1-py3-none-any.whl", "w") as archive:
        archive.writestr("trainer/__init__.py", "y")

    assert release.members(tmp_path / "h-1.tar.gz") == {"pyproject.toml": b"x"}
    assert release.members(tmp_path / "h-1-py3-none-any.whl") == {"trainer/__init__.py": b"y"}


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
