"""L12 with SIGKILL: a run that is killed repeatedly ends with the bits of an undisturbed one."""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

import killed_run
import pytest

from trainer.checkpoint.folder import committed

SCRIPT = pathlib.Path(killed_run.__file__)
ROOT = SCRIPT.parents[1]
INTERVAL = killed_run.CHECKPOINT_INTERVAL


def start(model_dir, strategy, steps, out):
    """Starts the run, with the same command every time."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(model_dir), strategy, str(steps)],
        stdout=out,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def last_commit(model_dir):
    """The step of the newest committed checkpoint, or None."""
    steps = committed(model_dir, "ckpt") if model_dir.exists() else {}
    return max(steps, default=None)


def wait_until(condition, process, out):
    """Waits for a condition; fails if the process ends first or a minute has passed."""
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, pathlib.Path(out.name).read_text()
        assert time.monotonic() < end, pathlib.Path(out.name).read_text()
        time.sleep(0.0005)


def start_and_kill(model_dir, strategy, steps, out, how, wait):
    """Starts the run, kills it, and returns what was observed.

    Args:
        model_dir: the run's folder.
        strategy: the name of the strategy.
        steps: the target.
        out: an open file for the output.
        how: "anywhere" waits from the start; "after a commit" waits from the first commit;
            "in a save" also waits for the next save to begin.
        wait: seconds to wait.
    """
    before = last_commit(model_dir)
    process = start(model_dir, strategy, steps, out)
    try:
        if how != "anywhere":
            wait_until(lambda: last_commit(model_dir) != before, process, out)
        end = time.monotonic() + wait
        wait_until(lambda: time.monotonic() > end, process, out)
        if how == "in a save":
            wait_until(lambda: any(model_dir.glob("ckpt-*.tmp/*")), process, out)
    finally:
        process.kill()
        process.wait()
    return {
        "had": before,
        "left": last_commit(model_dir),
        "in_save": any(model_dir.glob("ckpt-*.tmp")),
        "pid": process.pid,
    }


def finish(model_dir, strategy, steps, out):
    """Runs to the end; returns the process id."""
    process = start(model_dir, strategy, steps, out)
    try:
        assert process.wait(timeout=300) == 0, pathlib.Path(out.name).read_text()
    finally:
        process.kill()
    return process.pid


def loops_of(model_dir):
    """The first steps of the inner loops, by process id."""
    found = {}
    for line in (model_dir / "loops.txt").read_text().splitlines():
        pid, step = map(int, line.split())
        found.setdefault(pid, []).append(step)
    return found


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        pytest.param("default", 1, marks=pytest.mark.thorough),
        pytest.param("default", 25, marks=pytest.mark.slow),
        pytest.param("mirrored", 25, marks=pytest.mark.slow),
        pytest.param("one program", 8, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path, strategy, kills, capsys):
    """L12: a run that is killed at random moments, also inside a save, and restarted with the same
    command ends with the bits of an undisturbed one: weights, slots, averages, statistics on every
    replica, scale and counters, data position, randomness and metrics. It resumes from the last
    committed step every time and executes at most target + kills x checkpoint interval steps.
    """
    steps = 100 * kills
    chance = random.Random(7)  # noqa: S311  # nothing to keep secret
    moments = ["in a save", "after a commit", "anywhere", "after a commit"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    with (tmp_path / "whole.txt").open("w+") as out:
        finish(whole, strategy, steps, out)
    seen = []
    with (tmp_path / "killed.txt").open("w+") as out:
        for number in range(kills):
            how = moments[number % len(moments)]
            wait = chance.uniform(4, 7) if how == "anywhere" else chance.uniform(0, 0.3)
            seen.append(start_and_kill(killed, strategy, steps, out, how, wait))
        left = last_commit(killed)
        last = finish(killed, strategy, steps, out)
        printed = pathlib.Path(out.name).read_text()

    expected, actual = [
        json.loads((folder / "final.json").read_text()) for folder in (whole, killed)
    ]
    differing = [name for name in expected if expected[name] != actual.get(name)]
    assert differing == []
    assert expected.keys() == actual.keys()
    assert len(expected) > 60

    loops = loops_of(killed)
    came_from = {loops[life["pid"]][0]: life["had"] for life in seen if life["pid"] in loops}
    assert all(first == (had or 0) for first, had in came_from.items())
    assert loops[last][0] == left
    logged = {int(step) for step in re.findall(r"going on from step (\d+) \(", printed)}
    assert {had for had in came_from.values() if had} | {left} <= logged
    executed = sum(max(begun) + killed_run.LOOP - min(begun) for begun in loops.values())
    assert executed <= steps + kills * INTERVAL
    after_commit = sum(life["left"] is not None for life in seen)
    in_save = sum(life["in_save"] for life in seen)
    with capsys.disabled():
        sys.stdout.write(
            f"{strategy}: {kills} kills, {after_commit} after the first commit, {in_save} in a save; "
            f"{executed} steps executed for {steps}; {len(expected)} digests, {len(differing)} differ\n"
        )
    assert after_commit >= 0.9 * kills
    assert in_save >= max(1, kills // 5)
