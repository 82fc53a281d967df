"""The deprecation policy of docs/versions.md: what a deprecated name says, and when it is removed."""

import ast
import pathlib
import re
import tomllib
import warnings

import pytest
import typing_extensions

ROOT = pathlib.Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MESSAGE = re.compile(
    r"`[^`]+` is deprecated since halfstep (\d+)\.(\d+) and will be removed in (\d+)\.(\d+)\. "
    r"Use `[^`]+`.*\."
)
SOUND = (
    "`scaling.old` is deprecated since halfstep 0.2 and will be removed in 0.4. Use `scaling.new`."
)


def deprecations(source):
    """Yields each call in a file that deprecates something: the decorator, and warnings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            words = {ast.unparse(part).rpartition(".")[2] for part in (node.func, *node.args)}
            words |= {ast.unparse(part.value) for part in node.keywords}
            if "deprecated" in words or words & {"DeprecationWarning", "FutureWarning"}:
                yield node


def faults(source, version):
    """Returns what the policy does not allow in a file of this version, a line each."""
    found = []
    for node in deprecations(source):
        text = node.args[0] if node.args else None
        text = text.value if isinstance(text, ast.Constant) else ""
        said = MESSAGE.fullmatch(text)
        if said is None:
            found.append(f"line {node.lineno}: the message is not in the form of the policy")
            continue
        since, removed = [(int(said[at]), int(said[at + 1])) for at in (1, 3)]
        if removed[0] == since[0] and removed[1] < since[1] + 2:
            found.append(f"line {node.lineno}: removed before two minor releases have warned")
        if tuple(map(int, version.split(".")[:2])) >= removed:
            found.append(f"line {node.lineno}: should have been removed in {said[3]}.{said[4]}")
    if "warnings import deprecated" in source or "warnings.deprecated" in source:
        found.append("`warnings.deprecated` needs Python 3.13; use that of typing_extensions")
    return found


@pytest.mark.parametrize("package", ["scaling", "strategies", "trainer"])
def test_what_is_deprecated_follows_the_policy(package):
    """Every deprecation says since when, until when and what to use, and none outlives its date."""
    files = sorted((ROOT / package).rglob("*.py"))

    assert files
    assert {path: bad for path in files if (bad := faults(path.read_text(), VERSION))} == {}


@pytest.mark.parametrize(
    ("source", "version", "fault"),
    [
        (f'@deprecated("{SOUND}")\ndef old(): ...', "0.3.1", None),
        (f'@deprecated("{SOUND}")\ndef old(): ...', "0.4.0", "should have been removed in 0.4"),
        (f'@typing_extensions.deprecated("{SOUND}")\nclass A: ...', "1.0.0", "should have been"),
        (f'warnings.warn("{SOUND}", DeprecationWarning, stacklevel=2)', "0.3.0", None),
        (f'warnings.warn("{SOUND}", category=DeprecationWarning)', "0.4.0", "should have been"),
        ('@deprecated("Use new.")\ndef old(): ...', "0.1.0", "not in the form"),
        ("@deprecated(OLD)\ndef old(): ...", "0.1.0", "not in the form"),
        ('warnings.warn("gone soon", FutureWarning)', "0.1.0", "not in the form"),
        (f'@deprecated("{SOUND.replace("0.4", "0.3")}")\ndef old(): ...', "0.2.0", "two minor"),
        (f'@deprecated("{SOUND.replace("0.4", "1.0")}")\ndef old(): ...', "0.2.0", None),
        ("from warnings import deprecated", "0.1.0", "needs Python 3.13"),
        ('warnings.warn("a rounding mode is unknown", stacklevel=2)', "0.1.0", None),
    ],
)
def test_the_policy_can_be_broken(source, version, fault):
    """What breaks the policy is found, what follows it is not."""
    found = faults(source, version)

    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_a_deprecated_name_still_works_and_warns_where_it_is_used():
    """The decorator leaves the result alone; the warning has the whole message and the caller's line."""

    @typing_extensions.deprecated(SOUND)
    def old(scale):
        """Halves a scale."""
        return scale / 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = old(8.0)

    assert result == 4.0
    assert old.__doc__ == "Halves a scale."
    [warning] = caught
    assert (str(warning.message), warning.category) == (SOUND, DeprecationWarning)
    assert warning.filename == __file__
