"""The launcher: processes that find each other, and none left when one of them fails."""

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
    """A job of processes that run a few lines of Python."""
    command = [sys.executable, "-u", "-c", textwrap.dedent(program)]
    return Job(command, workers, servers, io.StringIO())


def lines(job):
    """What it has printed."""
    return job._out.getvalue().splitlines()


def test_every_process_knows_all_and_itself():
    """Through TF_CONFIG; its lines stand whole under its name."""
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


def test_when_one_fails_the_others_are_ended():
    """Its exit code is the job's, and the last line names it."""
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
        "worker 1 failed first, with exit code 7; the others were ended",
    ]
    assert all(process.poll() is not None for process in job.processes.values())


def test_who_was_killed_counts_as_the_first_to_fail():
    """Those that have lost it fail within a moment."""
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


def test_a_process_that_will_not_end_is_killed(monkeypatch):
    """After the time it has to save."""
    monkeypatch.setattr(launch, "GRACE", 0.5)
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


@pytest.mark.parametrize("victim", ["worker", "ps"])
def test_a_worker_can_be_replaced_and_a_server_cannot(tmp_path, monkeypatch, victim):
    """A server has the only copy of its parameters. The chief says when all is over."""
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("VICTIM", victim)
    program = """
        import json, os, pathlib, signal, sys, time
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        begun = pathlib.Path(os.environ["HERE"]) / f"{task['type']}-{task['index']}"
        again = begun.exists()
        begun.touch()
        if task["type"] == os.environ["VICTIM"] and task["index"] == 0 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 if task["type"] == "chief" else 100)
    """
    job = job_of(program, 2, 1)
    code = job.run()

    if victim == "worker":
        assert code == 0
        assert lines(job) == ["worker 0 killed by SIGKILL; it is started again"]
    else:
        assert code == 128 + signal.SIGKILL
        assert lines(job) == ["ps 0 failed first, killed by SIGKILL; the others were ended"]
    assert all(process.poll() is not None for process in job.processes.values())


def test_as_a_command(tmp_path):
    """It runs a script with its flags, passes a signal on to all, and leaves nobody behind."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "def end(number, frame):\n"
        "    print('asked by', number)\n"
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
        rest = process.stdout.read().splitlines()
        code = process.wait(30)
    killer.cancel()

    assert sorted(line.partition("]")[0] for line in first) == ["[worker 0", "[worker 1"]
    assert all(line.endswith("['--flag=1', '--workers=9']\n") for line in first)
    assert sorted(rest[:2]) == ["[worker 0] asked by 15", "[worker 1] asked by 15"]
    assert code == 75
    for line in first:
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[2]), 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--workers=0", "script.py"], "--workers must be at least 1; got 0"),
        (["--ps=-1", "script.py"], "--ps must be at least 0; got -1"),
        (["nowhere.py"], "SCRIPT must be a file; there is no 'nowhere.py'"),
    ],
)
def test_what_it_refuses(capsys, arguments, told):
    """Before anything is started."""
    with pytest.raises(SystemExit) as ended:
        launch.main(arguments)

    assert ended.value.code == 2
    assert told in capsys.readouterr().err
