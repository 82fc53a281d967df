"""Parameter servers, whose workers do not wait for each other."""

import io
import json
import os
import pathlib
import re
import signal
import sys
import threading
import time

import blocked_run
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
        "--checkpoints.interval=100",
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


def digits_in(launched, tmp_path):
    """Starts a long run of two workers and a server, and returns when it has a checkpoint."""
    job, thread, codes = launched(
        ROOT / "examples" / "digits.py",
        "--strategy=parameter_server",
        f"--model_dir={tmp_path / 'run'}",
        "--checkpoints.interval=40",
        "--steps_per_loop=20",
        "--steps=100000",
    )
    wait_until((tmp_path / "run" / "ckpt-40").exists, job)
    return job, thread, codes


def newest_step(tmp_path):
    """Returns the step of the newest checkpoint."""
    return max(int(path.name[5:]) for path in (tmp_path / "run").glob("ckpt-*[0-9]"))


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True])
def test_a_stop_signal_saves(launched, tmp_path, to_all):
    """A signal to the launcher, and one that a scheduler sends to every process of the job, end it
    with 75 and with the last step saved. No process is left.
    """
    job, thread, codes = digits_in(launched, tmp_path)
    send = job.signal_all if to_all else job.ask_to_stop
    send(signal.SIGTERM)
    thread.join(60)
    assert codes == [75], printed(job)
    (stopped,) = re.findall(r"stopped at step (\d+) of 100000, as asked", printed(job))
    assert newest_step(tmp_path) == int(stopped)
    assert all(process.poll() is not None for process in job.processes.values())


@pytest.mark.slow
@pytest.mark.parametrize("victim", [Task("ps", 0), Task("worker", 1), Task("chief", 0)])
def test_a_stopped_process_is_named(launched, tmp_path, victim):
    """A process that no longer answers is named within a minute, and the job ends with 75. Started
    again, it continues.
    """
    job, thread, codes = digits_in(launched, tmp_path)
    began = time.monotonic()
    job.processes[victim].send_signal(signal.SIGSTOP)
    said = {"chief": r"The chief at 127\.0\.0\.1:\d+ has not answered for 40 s"}
    pattern = said.get(
        victim.kind, rf"Lost {victim} \(127\.0\.0\.1:\d+\) after step \d+: it no longer"
    )
    wait_until(lambda: re.search(pattern, printed(job)), job, 60)
    print(f"{victim} named after {time.monotonic() - began:.0f} s")  # noqa: T201
    thread.join(60)
    assert codes == [75], printed(job)
    assert all(process.poll() is not None for process in job.processes.values())


@pytest.mark.slow
def test_a_killed_server_is_named(launched, tmp_path):
    """The chief names the server and the checkpoint to continue from, by TensorFlow's error or, if
    TensorFlow hangs, by its own watch.
    """
    job, thread, codes = digits_in(launched, tmp_path)
    job.processes[Task("ps", 0)].kill()
    thread.join(60)
    assert codes == [128 + signal.SIGKILL], printed(job)
    assert "ps 0 failed first: it was killed by SIGKILL." in printed(job)
    named = r"Lost ps 0 \(127\.0\.0\.1:\d+\) after step \d+[.:]"
    assert re.search(named, printed(job)), printed(job)
    assert "to continue from" in printed(job)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["python data", "hook"])
def test_a_blocked_chief_ends(launched, tmp_path, where):
    """The job ends some time after the signal, though the chief waits for ever."""
    path = tmp_path / "run"
    command = (TESTS / "blocked_run.py", path, where, 2.0, "parameter_server")
    job, thread, codes = launched(*command)
    wait_until((path / "blocked").exists, job)
    time.sleep(1.0)  # the data is read ahead
    job.ask_to_stop(signal.SIGTERM)
    thread.join(60)
    assert codes == [75], printed(job)
    assert newest_step(tmp_path) == blocked_run.INTERVAL
    assert all(process.poll() is not None for process in job.processes.values())


@pytest.mark.slow
def test_an_error_is_not_raised_again(launched, tmp_path):
    """The coordinator keeps the errors of steps that were scheduled; the next run has none of them. A
    loss that is NaN ends the run with the inner loop that holds it, and so do two skips in a row,
    though good steps follow in the same loop.
    """
    job, thread, codes = launched(TESTS / "server_errors.py", tmp_path)
    thread.join(200)
    assert codes == [0], printed(job)
    found = json.loads((tmp_path / "result.json").read_text())

    assert "finite numbers in part 0 of the batch" in found["data"]
    assert found["after"] == 4
    assert "the loss was not finite at step 2" in found["stuck"]
    assert found["attempted"] == 2
    assert "2 steps in a row were skipped by step 3" in found["skips"]
    assert found["skipped"] == 2
    assert 3 <= found["taken"] <= 3 + 1 + 2 * 2  # two per worker are scheduled ahead
