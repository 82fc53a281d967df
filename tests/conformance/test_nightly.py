"""The nightly run: its parts together are all of it, and its summary says what happened."""

import datetime as dt
import importlib.machinery
import importlib.util
import os
import pathlib
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("nightly_parts", str(ROOT / ".ci" / "nightly_parts"))
nightly = importlib.util.module_from_spec(importlib.util.spec_from_loader("nightly_parts", LOADER))
LOADER.exec_module(nightly)

LIMIT = nightly.PARTS["laws"].minutes
TODAY = dt.datetime.now(dt.UTC).date().isoformat()
REPORT = """<testsuites><testsuite>
<testcase classname="tests.laws.test_a" name="test_sound"/>
<testcase classname="tests.laws.test_a" name="test_other"/>
<testcase classname="tests.laws.test_a" name="test_left_out"><skipped message="jax
 is missing"/></testcase>
<testcase classname="tests.laws.test_a" name="test_broken[3]"><failure message="1 != 2"/></testcase>
<testcase classname="tests.laws.test_a" name="test_no_fixture"><error message="no"/></testcase>
</testsuite></testsuites>"""


def selects(part, path):
    """Returns whether a part runs a test file."""
    ignored = [each.removeprefix("--ignore=") for each in part.tests if each.startswith("--")]
    inside = [path == each or path.startswith(f"{each}/") for each in part.tests]
    return any(inside) and not any(path == each or path.startswith(f"{each}/") for each in ignored)


def test_every_test_file_is_in_one_part():
    """No slow test is left out, and none runs twice; the catalogue's groups are one. Coverage is
    measured with tests that are not slow.
    """
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    options = set(nightly.BY_NIGHT)
    slow = {name: part for name, part in nightly.PARTS.items() if options <= set(part.options)}
    assert files
    for path in files:
        found = {name.split("-")[0] for name, part in slow.items() if selects(part, path)}
        assert len(found) == 1, (path, found)
    assert set(nightly.PARTS) - set(slow) == {"coverage", "release"}


def test_every_night_ends_within_ninety_minutes():
    """By the limits of its parts, with time to install everything; each part is in a night."""
    for night in range(1, nightly.NIGHTS + 1):
        assert sum(part.minutes for part in nightly.PARTS.values() if part.night == night) <= 90
    assert {part.night for part in nightly.PARTS.values()} == set(range(1, nightly.NIGHTS + 1))


def test_six_nights_are_all(monkeypatch):
    """The parts of six nights in a row are all parts, and the seventh begins again."""

    class Clock(dt.datetime):
        day = 24

        @classmethod
        def now(cls, zone):
            return cls(2026, 11, cls.day, 23, tzinfo=zone)

    monkeypatch.setattr(nightly.dt, "datetime", Clock)
    nights = []
    for day in range(24, 31):
        Clock.day = day
        nights.append(nightly.tonight())

    assert sorted(part for night in nights[:6] for part in night) == sorted(nightly.PARTS)
    assert nights[6] == nights[0]


def test_the_groups_of_the_catalogue_are_all():
    """Each group of the catalogue is a part, under its number."""
    options = [part.options for name, part in nightly.PARTS.items() if name.startswith("catalogue")]

    assert [each[-2:] for each in options] == [
        ("--splits=7", f"--group={group}") for group in range(1, 8)
    ]


def test_the_workflow_runs_every_part():
    """Each part is a job of its own, with time for its limit and for the installation."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    job = workflow["jobs"]["nightly"]

    assert job["strategy"]["matrix"]["part"] == list(nightly.PARTS)
    assert not job["strategy"]["fail-fast"]
    limits = [part.minutes for part in nightly.PARTS.values()]
    assert max(limits) + 15 <= job["timeout-minutes"]
    # It needs the internet, so it is not a part.
    assert workflow["jobs"]["audit"]["steps"][-1]["run"] == "bash .ci/audit"


def test_what_is_committed_is_a_summary():
    """tests/NIGHTLY.md is what the script writes, for the parts that there are."""
    text = nightly.PAGE.read_text()

    assert nightly.page(nightly.read(text)) == text


def test_the_counts_of_a_part(tmp_path):
    """Tests are counted by outcome, skips by reason; failed tests are named."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    results = nightly.counts_of(report)

    assert nightly.lines_of("laws", 1, 150.0, results) == (
        f"| laws | 1 | FAILED | 2 | 1 | 2 | 2.5 | {LIMIT} | {TODAY} |",
        [
            "- laws: 1 skipped: jax is missing",
            "- laws: FAILED: laws.test_a::test_broken[3]",
            "- laws: FAILED: laws.test_a::test_no_fixture",
        ],
    )
    nothing = nightly.counts_of(tmp_path / "missing.xml")
    assert nightly.lines_of("laws", None, 1800.0, nothing)[0] == (
        f"| laws | 1 | ended at its limit | 0 | 0 | 0 | 30.0 | {LIMIT} | {TODAY} |"
    )


def test_a_night_is_whole_if_its_parts_ended_by_themselves():
    """A part that failed was run; one that was ended at its limit was not run whole."""
    step = "| step | 1 | {} | 5 | 0 | 1 | 3.0 | 10 | 2026-11-25 |"
    night = [name for name, part in nightly.PARTS.items() if part.night == 1]
    rows = {name: (step.format("passed").replace("step", name), []) for name in night}

    for verdict, said in (
        ("FAILED", "took 9 minutes"),
        ("ended at its limit", "was not run whole"),
    ):
        rows["step"] = step.format(verdict), []
        assert f"Night 1 {said}." in nightly.page(rows)


def test_a_part_keeps_the_rows_of_the_others():
    """A part that runs again replaces its own row and lines; parts that never ran say so."""
    failed = "| laws | 1 | FAILED | 2 | 1 | 2 | 2.5 | 40 | 2026-11-25 |"
    first = (failed, ["- laws: FAILED: laws.test_a::test_b"])
    passed = "| chaos | 2 | passed | 9 | 0 | 0 | 1.0 | 25 | 2026-11-25 |"
    second = (passed, ["- chaos: 1 skipped: no disk"])
    text = nightly.page({"laws": first, "chaos": second})

    assert nightly.read(text) == {"laws": first, "chaos": second}
    limit = nightly.PARTS["step"].minutes
    assert f"| step | 4 | not run in this form |  |  |  |  | {limit} |  |" in text
    assert "Night 1 was not run whole." in text
    again = ("| laws | 1 | passed | 4 | 1 | 0 | 2.5 | 40 | 2026-11-26 |", [])
    text = nightly.page(nightly.read(text) | {"laws": again})
    assert nightly.read(text) == {"laws": again, "chaos": second}


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
    part = nightly.Part(1, minutes, options=("program",))
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


def test_the_minutes_of_a_night():
    """They are added up once all parts of the night were run."""
    rows = ["| a | 1 | passed | 1 | 0 | 0 | 2.5 | 9 | 2026-11-25 |"] * 2
    rows += ["| b | 2 | passed | 1 | 0 | 0 | 4.0 | 9 | 2026-11-25 |"]
    rows += [nightly.row_of("c", [2, nightly.NOT_RUN, "", "", "", "", 9, ""])]

    assert list(nightly.totals(rows))[:2] == [
        "Night 1 took 5 minutes.",
        "Night 2 was not run whole.",
    ]


def test_an_unknown_part():
    """The error lists the parts."""
    ended = subprocess.run(
        [sys.executable, ROOT / ".ci" / "nightly_parts", "law"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ,
    )

    assert ended.returncode == 1
    assert ended.stderr.startswith("no part is called law; there are laws, processes, ")
