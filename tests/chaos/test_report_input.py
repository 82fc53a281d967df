"""Runs that nobody has written as they are, for the report and the simulator.

Each case is one of `malformed_runs`. The programs must end with status 0, or with status 1 and an
error of ours: no traceback, within bounds of time and memory. What they write must be in its place
and nowhere else. Every page is then loaded in a browser, once as it is, and once without its
Content-Security-Policy, so that escaping alone must hold: nothing in it may run, and it may fetch
nothing. Without the extra `browser`, only that part is skipped.

To see one case again: a case depends on its number alone.
"""

import collections
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
from chaos import malformed_runs, programs_in_forks

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 30  # of the CPU, for one program; most take less than one
MEGABYTES = 1500  # of which 300 are TensorFlow's
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
REPORT, SIMULATE = "trainer.report", "scaling.simulate"
FLOAT8 = "scaling.simulate --float8_rules=delayed:history_length=16,current"
WRITTEN = {REPORT: "report/report.html", SIMULATE: "scales.png", FLOAT8: "float8_scales.png"}
PART = 50  # cases that share a process and a browser


@functools.cache
def reports_can_be_made():
    """Whether the extra `browser` is installed and a browser starts."""
    blank = pathlib.Path(tempfile.mkdtemp()) / "blank.html"
    blank.write_text("<title>blank</title>")
    return bool(browse([blank]))


def browse(pages):
    """Returns what a browser shows of each page, keyed by path; {} without a browser."""
    wanted = {"width": 800, "dark": False, "pause": 0.05, "pages": {str(p): "" for p in pages}}
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "browser.py"), json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": ""},
    )
    lines = result.stdout.splitlines()
    if "started" not in lines:
        return {}
    assert result.returncode == 0, result.stderr[-2000:]
    return {pathlib.Path(path): seen for path, seen in json.loads(lines[-1]).items()}


def faults_in_browser(page, seen):
    """Returns what a page did, or could do, that a report must not."""
    found = [f"requested {url}" for url in seen["requested"] if url != f"file://{page}"]
    found += [f"broken image: {alt[:60]}" for alt in seen["broken"]]
    if seen["owned"] != "undefined":
        found.append("executed")
    if not seen["title"].endswith(": report of a run"):
        found.append(f"title: {seen['title']}")
    return found + [f"active: {name}" for name in seen["active"]]


def run_programs(folder, cases):
    """Runs the programs on all cases. Returns (number, damage, run, module, outcome) for each."""
    jobs, names, permissions = [], [], {}
    for number in cases:
        damage, run = malformed_runs.write(folder, number)
        locked = run / (run / "locked").read_text() if (run / "locked").exists() else None
        if locked:
            permissions[locked] = locked.stat().st_mode
            locked.chmod(0)
        for program, argument in (
            (REPORT, run),
            (SIMULATE, run / "metrics.jsonl"),
            (FLOAT8, run / "metrics.jsonl"),
        ):
            module, *options = program.split()
            arguments = [os.fsencode(each).hex() for each in (argument, *options)]
            jobs.append({"module": module, "arguments": arguments, "unprivileged": bool(locked)})
            names.append((number, damage, run, program))
    (folder / "jobs").write_text(json.dumps(jobs))
    subprocess.run(
        [
            sys.executable,
            programs_in_forks.__file__,
            str(folder / "jobs"),
            str(folder / "outcomes"),
        ],
        check=True,
        timeout=60 + programs_in_forks.PATIENCE * len(jobs),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    for path, mode in permissions.items():
        path.chmod(mode)
    outcomes = json.loads((folder / "outcomes").read_text())
    return [(*name, outcome) for name, outcome in zip(names, outcomes, strict=True)]


def judge(run, module, outcome):
    """Returns the kind of an outcome, and what is wrong with it or ""."""
    status, stderr = outcome["status"], outcome["stderr"]
    if outcome["seconds"] > SECONDS or outcome["megabytes"] > MEGABYTES:
        return "too much", f"{outcome['seconds']} s, {outcome['megabytes']} MB"
    if "Traceback" in stderr or status not in {0, 1}:
        return "traceback", f"status {status}: {stderr[-500:]}"
    if status == 1:  # the value, why it is wrong, and what to do, and no code for the terminal
        clear = len(re.findall(r"\. |\.$", stderr.strip())) >= 3 and "[Errno" not in stderr
        clear &= "\x1b" not in stderr and len(stderr) < 5000
        return ("error", "") if clear else ("unclear", stderr[-500:])
    written = run / WRITTEN[module]
    if written.is_symlink() or not written.is_file() or "\x1b" in outcome["stdout"]:
        return "wrong page", outcome["stdout"][-200:]
    return "page", ""


def check(folder, cases, record_property):
    """Asserts that all cases end as they must. Prints how many ended in which way."""
    wrong, pages, counts, seconds, megabytes = [], {}, collections.Counter(), [], []
    for number, damage, run, module, outcome in run_programs(folder, cases):
        kind, why = judge(run, module, outcome)
        seconds.append(outcome["seconds"])
        megabytes.append(outcome["megabytes"])
        counts[damage, module, kind] += 1
        if why:
            wrong.append(f"{number} {damage} {module}: {kind}: {why}")
        if kind == "page" and module == REPORT:
            pages |= dict.fromkeys(copies(run, folder / "pages" / str(number)), (number, damage))
        for victim in run.parent.glob(f"{run.name}.victim*"):
            files = victim.rglob("*") if victim.is_dir() else [victim]
            if [path for path in files if path.read_text() != "precious"]:
                wrong.append(f"{number} {damage} {module}: another file was changed")
    seen = browse(pages) if reports_can_be_made() and pages else {}
    for page, shown in seen.items():
        found = faults_in_browser(page, shown)
        counts[pages[page][1], "browser", "executed" if found else "nothing ran"] += 1
        wrong += [f"{pages[page]} {page.name}: {fault}" for fault in found]
    for key, count in sorted(counts.items()):
        print(*key, count)  # noqa: T201
    print(f"programs: {sum(seconds):.0f} s, at most {max(seconds)} s and {max(megabytes)} MB")  # noqa: T201
    record_property("outcomes", {" ".join(key): count for key, count in counts.items()})
    assert not wrong, "\n".join(wrong)


def copies(run, place):
    """Returns two copies of a report at a plain path: as it is, and without its policy."""
    page = (run / "report" / "report.html").read_text()
    assert len(POLICY.findall(page)) == 1
    place.mkdir(parents=True)
    (place / "whole.html").write_text(page)
    (place / "bare.html").write_text(POLICY.sub("", page))
    return [place / "whole.html", place / "bare.html"]


@pytest.mark.slow
def test_a_malformed_run(tmp_path, record_property):
    """Of the kind that holds text for a browser to run."""
    kinds = [damage.__name__ for damage in malformed_runs.DAMAGES]
    check(tmp_path, [kinds.index("hostile")], record_property)


@pytest.mark.slow
def test_a_malformed_run_of_each_kind(tmp_path, record_property):
    """Two of each."""
    check(tmp_path, range(22, 22 + 2 * len(malformed_runs.DAMAGES)), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_malformed_runs(tmp_path, record_property, part):
    """Five hundred, of 22 kinds."""
    check(tmp_path, range(1000 + PART * part, 1000 + PART * (part + 1)), record_property)


PAGE = "<!DOCTYPE html><html><head><title>a: report of a run</title></head><body>{}</body></html>"
HARMLESS = (
    "",
    "&lt;script&gt;window.owned=1&lt;/script&gt;",
    "{{ 7 * 7 }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "__proto__",
    "../../../etc/passwd",
)


@pytest.mark.thorough
def test_the_browser_catches_what_a_page_does(tmp_path):
    """Every payload that a page holds as it is, is found; as text, none is."""
    if not reports_can_be_made():
        pytest.skip("no browser (extra `browser`)")
    pages = {}
    for number, payload in enumerate(malformed_runs.PAYLOADS):
        if "<" in payload and payload not in HARMLESS and not payload.startswith("\u202e"):
            pages[tmp_path / f"{number}.html"] = PAGE.format(payload)
        harmless = payload.replace("&", "&amp;").replace("<", "&lt;")
        pages[tmp_path / f"{number}-text.html"] = PAGE.format(harmless)
    for page, text in pages.items():
        page.write_text(text, errors="replace")
    found = {page.stem: faults_in_browser(page, seen) for page, seen in browse(pages).items()}

    assert len(found) > 35
    assert {name for name, faults in found.items() if not faults} == {
        name for name in found if name.endswith("-text")
    }
    every = " ".join(fault for faults in found.values() for fault in faults)
    for fault in ("executed", "title: owned", "requested https://example.com/", "active: script"):
        assert fault in every
