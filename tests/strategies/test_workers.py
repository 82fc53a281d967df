"""Two workers agree, as two processes on this machine."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import strategies
from strategies.launch import free_ports

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]

WORKER = """
import dataclasses, json, os
import strategies
strategy = strategies.create("multi_worker_mirrored")
assert strategies.create("multi_worker_mirrored") is strategy
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
cases = [[False, False], [False, True], [True, False], [True, True]]
print([strategies.any_worker(flags[index], strategy) for flags in cases])
print(strategies.from_chief(7 + index, strategy))
print(json.dumps(dataclasses.asdict(strategies.capabilities(strategy))))
"""


@pytest.fixture(scope="module")
def printed():
    """Runs two workers; returns the lines that each has printed."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
                ),
            },
        )
        for index in range(2)
    ]
    try:
        found = [worker.communicate(timeout=120) for worker in started]
    finally:
        for worker in started:
            worker.kill()

    assert [worker.returncode for worker in started] == [0, 0], found
    return [out.splitlines() for out, _ in found]


def test_the_flag_of_one_worker_reaches_all(printed):
    """All workers get True from `any_worker` if one or more of them passed True."""
    assert [lines[0] for lines in printed] == ["[False, True, True, True]"] * 2


def test_the_number_of_the_chief_reaches_all(printed):
    """All workers get the number that the chief passed to `from_chief`."""
    assert [lines[1] for lines in printed] == ["7", "7"]


def test_only_the_first_worker_is_the_chief(printed):
    """The capabilities of two workers differ only in which of them is the chief."""
    found = [strategies.Capabilities(**json.loads(lines[2])) for lines in printed]

    assert found == [
        strategies.Capabilities(
            num_replicas=2,
            asynchronous=False,
            multi_worker=True,
            decides_in_replica=False,
            is_chief=chief,
            on_cpu=True,
            one_shape=True,
        )
        for chief in (True, False)
    ]
