"""The audit of installed packages, with a program in place of pip-audit."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
KNOWN = [{"name": "urllib3", "version": "1.24", "vulns": [{"id": "PYSEC-1", "fix_versions": []}]}]
SOUND = [
    {"name": "numpy", "version": "2.3", "vulns": []},
    {"name": "halfstep", "skip_reason": "not found"},
]
FOUND = [*SOUND, {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}]
SKIPPED = [{"name": "urllib3", "skip_reason": "Dependency not found on PyPI"}]
# It answers the look-up of a known vulnerability, and then that of the installed packages.
STAND_IN = """#!{python}
import json, sys
known, installed = {answers!r}
answer = known if any(x.startswith("--requirement=") for x in sys.argv) else installed
if answer is None:
    sys.exit("requests.exceptions.ConnectionError: no route")
print(json.dumps({{"dependencies": answer, "fixes": []}}))
print("No known vulnerabilities found", file=sys.stderr)
"""


def audit(folder, answers, *arguments):
    """Runs the audit with a stand-in. Returns its exit status and its output."""
    program = folder / "pip-audit"
    program.write_text(STAND_IN.format(python=sys.executable, answers=answers))
    program.chmod(0o755)
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "audit_packages", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PIP_AUDIT": str(program)},
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("answers", "status", "allowed", "last"),
    [
        ((KNOWN, SOUND), 0, 0, "1 packages looked up in pypi, 0 with a known vulnerability; 0 not"),
        ((KNOWN, FOUND), 1, 1, "2 packages looked up in pypi, 1 with a known vulnerability; 0 not"),
        ((KNOWN, SOUND + SKIPPED), 3, 3, "1 packages looked up in pypi, 0 with a known"),
        ((KNOWN, []), 3, 3, "0 packages looked up in pypi"),
        ((KNOWN, None), 4, 4, "pip-audit failed: requests.exceptions.ConnectionError: no route"),
        ((SKIPPED, SOUND), 3, 0, "NOT CHECKED: no database of vulnerabilities answers"),
        ((None, None), 3, 0, "NOT CHECKED: no database of vulnerabilities answers"),
        ((SOUND, SOUND), 3, 0, "NOT CHECKED: no database of vulnerabilities answers"),
    ],
)
def test_the_audit(tmp_path, answers, status, allowed, last):
    """A vulnerability always fails. Without an answer the audit fails unless that was allowed."""
    for arguments, expected in (((), status), (("--allow-unreachable",), allowed)):
        found, output = audit(tmp_path, answers, *arguments)

        assert found == expected, output
        assert output.splitlines()[-1].startswith(last)
        assert ("VULNERABLE: a 1: CVE-1, fixed in 2" in output) == (answers[1] == FOUND)


def test_the_audit_without_pip_audit(tmp_path):
    """That is no result."""
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "audit_packages", "--allow-unreachable"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PIP_AUDIT": str(tmp_path / "missing")},
    )

    assert ended.returncode == 4
    assert "Run pip install -e '.[audit]'." in ended.stderr
    assert json.dumps(ended.stdout) == '""'
