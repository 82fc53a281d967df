"""The nightly run: its parts together are all of it, and its summary says what happened."""

import importlib.machinery
import importlib.util
import pathlib
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("nightly_parts", str(ROOT / ".ci" / "nightly_parts"))
nightly = importlib.util.module_from_spec(importlib.util.spec_from_loader("nightly_parts", LOADER))
LOADER.exec_module(nightly)


def selects(part, path):
    """Returns whether a part runs a test file."""
    ignored = [each.removeprefix("--ignore=") for each in part.tests if each.startswith("--")]
    inside = [path == each or path.startswith(f"{each}/") for each in part.tests]
    return any(inside) and not any(path == each or path.startswith(f"{each}/") for each in ignored)


def test_every_test_file_is_in_one_part():
    """No slow test is left out, and none runs twice. Coverage is measured with tests that are not
    slow.
    """
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    options = set(nightly.BY_NIGHT)
    slow = {name: part for name, part in nightly.PARTS.items() if options <= set(part.options)}
    assert files
    for path in files:
        found = {name for name, part in slow.items() if selects(part, path)}
        assert len(found) == 1, (path, found)
    assert set(nightly.PARTS) - set(slow) == {"coverage", "release"}


def test_the_workflow_runs_every_part():
    """Each part is a job of its own, with time for its limit and for the installation. All parts
    together take three hours.
    """
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    job = workflow["jobs"]["nightly"]

    assert job["strategy"]["matrix"]["part"] == list(nightly.PARTS)
    assert not job["strategy"]["fail-fast"]
    limits = [part.minutes for part in nightly.PARTS.values()]
    assert sum(limits) <= 3 * 60
    assert max(limits) + 15 <= job["timeout-minutes"]
    # It needs the internet, so it is not a part.
    assert workflow["jobs"]["audit"]["steps"][-1]["run"] == "bash .ci/audit"


@pytest.mark.parametrize(
    ("program", "minutes", "status"),
    [("pass", 1, 0), ("raise SystemExit(3)", 1, 3), (None, 1 / 60, None)],
)
def test_a_part_ends_within_its_limit(program, minutes, status, tmp_path, monkeypatch):
    """A part that needs longer is ended, with the processes that it started."""
    pid = tmp_path / "pid"
    waits = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    part = nightly.Part(minutes, options=("program",))
    monkeypatch.setattr(nightly, "PARTS", {"laws": part})
    command = [sys.executable, "-c", program or waits]
    monkeypatch.setattr(nightly, "command_of", lambda *_: command)
    found, _ = nightly.run("laws", tmp_path / "report.xml", tmp_path / "output")

    assert found == status
    if pid.exists():
        for _ in range(500):  # until the kernel has ended the child
            if not running(int(pid.read_text())):
                break
            time.sleep(0.01)
        assert not running(int(pid.read_text()))


def running(pid):
    """Returns whether a process runs."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
