"""The launcher starts processes that find each other, and leaves none behind."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from strategies import launch
from strategies.launch import Job, Task

ROOT = pathlib.Path(__file__).parents[2]


def job_of(program, workers=2, servers=0):
    """Returns a job whose processes run a few lines of Python."""
    command = [sys.executable, "-u", "-c", textwrap.dedent(program)]
    return Job(command, workers, servers, io.StringIO())


def lines(job):
    """Returns the lines that a job has printed."""
    return job._out.getvalue().splitlines()


def test_every_process_gets_its_tf_config():
    """TF_CONFIG has all processes and says which one this is; each line starts with its task."""
    job = job_of("import os; print(os.environ['TF_CONFIG']); print('a line\\nand another')", 3)
    assert job.run() == 0
    found = lines(job)

    configs = [json.loads(line.partition("] ")[2]) for line in found if "cluster" in line]
    assert [line.partition("]")[0] for line in sorted(found)][::3] == [
        "[worker 0",
        "[worker 1",
        "[worker 2",
    ]
    assert len(found) == 9
    assert {json.dumps(config["cluster"]) for config in configs} == {json.dumps(job.cluster)}
    assert sorted(config["task"]["index"] for config in configs) == [0, 1, 2]
    assert len(set(job.cluster["worker"])) == 3


def test_when_one_fails_the_others_are_stopped():
    """The exit code of the process that failed is the job's, and the last line names it."""
    program = """
        import json, os, sys, time
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            print("oh")
            sys.exit(7)
        time.sleep(100)
    """
    job = job_of(program, 3)
    began = time.monotonic()

    assert job.run() == 7
    assert time.monotonic() - began < 20
    assert lines(job) == [
        "[worker 1] oh",
        "worker 1 failed first: it exited with code 7. The other processes were stopped.",
    ]
    assert all(process.poll() is not None for process in job.processes.values())


def test_a_killed_process_counts_as_the_first_to_fail():
    """A killed process is named even if another, which lost it, has failed as well."""
    program = """
        import json, os, pathlib, signal, sys, time
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(1)
    """
    job = job_of(program)
    for task in job.tasks:
        job.start(task)
    for process in job.processes.values():
        process.wait()

    assert job._wait() == Task("worker", 1)


@pytest.mark.thorough
def test_a_process_that_will_not_end_is_killed(monkeypatch):
    """A process that ignores SIGTERM is killed after the time it has for saving."""
    monkeypatch.setattr(launch, "GRACE_SECS", 0.5)
    program = """
        import json, os, signal, sys, time
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if index == 0:
            time.sleep(1)
            sys.exit(3)
        time.sleep(100)
    """
    job = job_of(program)

    assert job.run() == 3
    assert job.processes[Task("worker", 1)].returncode == -signal.SIGKILL


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["worker", "ps"])
def test_a_worker_can_be_replaced_and_a_server_cannot(tmp_path, monkeypatch, victim):
    """A killed worker is restarted until the chief ends; a killed server ends the job, because it
    had the only copy of its parameters.
    """
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("VICTIM", victim)
    program = """
        import json, os, pathlib, signal, sys, time
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        started = pathlib.Path(os.environ["HERE"]) / f"{task['type']}-{task['index']}"
        restarted = started.exists()
        started.touch()
        if task["type"] == os.environ["VICTIM"] and task["index"] == 0 and not restarted:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 if task["type"] == "chief" else 100)
    """
    job = job_of(program, 2, 1)
    code = job.run()

    if victim == "worker":
        assert code == 0
        assert lines(job) == ["worker 0 was killed by SIGKILL. Restarting it."]
    else:
        assert code == 128 + signal.SIGKILL
        assert lines(job) == [
            "ps 0 failed first: it was killed by SIGKILL. The other processes were stopped."
        ]
    assert all(process.poll() is not None for process in job.processes.values())


@pytest.mark.slow
def test_as_a_command(tmp_path):
    """The command runs a script with its flags, forwards signals and leaves no process behind."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "def end(number, frame):\n"
        "    print('got signal', number)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print(os.getpid(), sys.argv[1:])\n"
        "time.sleep(100)\n"
    )
    command = ["-m", "strategies.launch", "--workers=2", str(script), "--flag=1", "--workers=9"]
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    killer = threading.Timer(60, process.kill)
    killer.start()
    with process:
        first = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        remaining = process.stdout.read().splitlines()
        code = process.wait(30)
    killer.cancel()

    assert sorted(line.partition("]")[0] for line in first) == ["[worker 0", "[worker 1"]
    assert all(line.endswith("['--flag=1', '--workers=9']\n") for line in first)
    assert sorted(remaining[:2]) == ["[worker 0] got signal 15", "[worker 1] got signal 15"]
    assert code == 75
    for line in first:
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[2]), 0)


@pytest.mark.slow
def test_nobody_reads_the_output_and_a_real_time_signal_ends_a_worker(tmp_path):
    """A job whose output is read no more, as by `head`, ends with the code of its workers. Text that
    the output's encoding lacks is escaped.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib, time\n"
        "print('\u00fc' if json.loads(os.environ['TF_CONFIG'])['task']['index'] else 'u')\n"
        "while not pathlib.Path('closed').exists():\n"
        "    time.sleep(0.05)\n"
        "for _ in range(100):\n"
        "    print('x' * 1000)\n"
        "os.kill(os.getpid(), 40)\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:backslashreplace"}
    process = subprocess.Popen(
        [sys.executable, "-m", "strategies.launch", "--workers=2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | environment,
    )
    killer = threading.Timer(60, process.kill)
    killer.start()
    first = [process.stdout.readline() for _ in range(2)]
    process.stdout.close()
    (tmp_path / "closed").touch()
    errors = process.stderr.read()
    code = process.wait(30)
    killer.cancel()
    process.stderr.close()

    assert sorted(first) == ["[worker 0] u\n", "[worker 1] \\xfc\n"]
    assert code == 128 + 40
    assert "Error" not in errors
