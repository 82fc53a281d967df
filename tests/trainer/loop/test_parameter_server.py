"""Parameter servers, whose workers do not wait for each other."""

import io
import json
import os
import pathlib
import re
import sys
import threading
import time

import pytest
import worker_run

from strategies.launch import Job, Task

TESTS = pathlib.Path(__file__).parents[2]
ROOT = TESTS.parent


@pytest.fixture
def launched(monkeypatch):
    """Starts jobs of two workers and a parameter server, which end with the test."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{TESTS}")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    jobs = []

    def start(*command):
        job = Job(
            [sys.executable, "-u", *map(str, command)], workers=2, servers=1, out=io.StringIO()
        )
        codes = []
        thread = threading.Thread(target=lambda: codes.append(job.run()))
        thread.start()
        jobs.append(job)
        return job, thread, codes

    yield start
    for job in jobs:
        for process in job.processes.values():
            process.kill()
            process.wait()


def printed(job):
    """Returns what a job has printed so far."""
    return job._out.getvalue()


def wait_until(condition, job, seconds=120):
    """Waits for a condition; fails after a timeout."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, printed(job)
        time.sleep(0.05)


@pytest.mark.slow
def test_no_update_is_lost(launched, tmp_path, full):
    """L1 to L3, L10: `iterations` equals the number of applied updates although workers count at the
    same time, and an overflow skips only the update of its own worker.
    """
    steps = 1000 if full else 60
    job, thread, codes = launched(TESTS / "server_run.py", tmp_path, steps)
    thread.join(300)
    assert codes == [0], printed(job)
    result = json.loads((tmp_path / "result.json").read_text())
    print(result)  # noqa: T201

    assert result["step"] == result["steps_run"] == result["taken"] == steps
    assert result["iterations"] == result["applied"] == steps - result["skipped"]
    numbers = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    skipped = {line["step"] for line in numbers if line["split"] == "skip"}
    assert len(skipped) == result["skipped"]
    assert skipped >= set(range(worker_run.PLANTED, steps + 1, 10))
    assert result["finite"]
    assert 2.0**-14 <= result["loss_scale"] <= 2.0**24
    assert (tmp_path / "run" / f"ckpt-{steps}").exists()
    assert all(process.poll() is not None for process in job.processes.values())


@pytest.mark.slow
def test_a_killed_worker_is_restarted(launched, tmp_path):
    """Two workers and a parameter server learn the digits to at least 97% although one of the workers
    is killed during the run: the job continues, and every step is taken.
    """
    job, thread, codes = launched(
        ROOT / "examples" / "digits.py",
        "--strategy=parameter_server",
        f"--model_dir={tmp_path / 'run'}",
        "--checkpoint_interval=100",
        "--steps_per_loop=50",
    )
    wait_until((tmp_path / "run" / "ckpt-100").exists, job)
    victim = job.processes[Task("worker", 1)]
    victim.kill()
    wait_until(lambda: "worker 1 was killed by SIGKILL. Restarting it." in printed(job), job)
    thread.join(300)
    assert codes == [0], printed(job)
    lines = printed(job).splitlines()
    accuracy = float(re.search(r"held-out accuracy ([\d.]+)%", printed(job))[1])
    print(*lines[-2:], sep="\n")  # noqa: T201

    assert accuracy >= 97.0
    assert any("at step 600 after 600 steps" in line for line in lines)
    assert job.processes[Task("worker", 1)] is not victim
