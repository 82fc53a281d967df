"""Two workers, as two processes on this machine."""

import json
import os
import pathlib
import subprocess
import sys

from strategies.launch import free_ports

ROOT = pathlib.Path(__file__).parents[2]

WORKER = """
import json, os
import tensorflow as tf
import strategies
strategy = tf.distribute.MultiWorkerMirroredStrategy()
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
asked = [[False, False], [False, True], [True, False], [True, True]]
print([strategies.any_worker(flags[index], strategy) for flags in asked])
"""


def test_one_worker_that_asks_is_heard_by_all():
    """A decision to stop is taken by all workers together, whichever of them has asked."""
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
    assert [out.strip() for out, _ in found] == ["[False, True, True, True]"] * 2
