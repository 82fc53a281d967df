"""What blocks a run for ever is left some time after SIGTERM, with the last step saved."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import blocked_run
import numpy as np
import pytest
import tensorflow as tf
from blocked_run import BLOCKS, STEP
from jobs import workers

from trainer.checkpoint import folder
from trainer.data.batches import batches
from trainer.data.iterator_state import COUNTED, DataPosition
from trainer.run import stop_signals
from trainer.run.leaving import Leaving, LeftError, place_of

SCRIPT = pathlib.Path(blocked_run.__file__)
ROOT = SCRIPT.parents[1]
# What is tried in CI, and by night. The runs of a group start together.
IN_CI = ("hook",)
BY_NIGHT = tuple(where for where in BLOCKS if where not in IN_CI)
GROUPS = IN_CI, BY_NIGHT[:5], BY_NIGHT[5:]
STOP_SECS = 2.0
# Here the data is read ahead: the steps before may not be over when the file says "blocked".
READ_AHEAD = ("python data", "counted pipeline", "pipeline")
SAVED = {"evaluation": 6, "log": 9, "begin": 0, "end": blocked_run.STEPS}  # elsewhere `STEP`


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Returns the folder and the process of a run; starts its whole group, which takes long."""
    processes = {}

    def start(where):
        path = tmp_path_factory.mktemp("blocked") / "run"
        with (path.parent / "printed.txt").open("w") as printed:
            processes[where] = (
                path,
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(path), where, str(STOP_SECS)],
                    env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                ),
            )

    def process_of(where):
        if where not in processes:
            [group] = [each for each in GROUPS if where in each]
            for each in group:
                start(each)
        return processes[where]

    yield process_of
    for _, process in processes.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the bits and the log of a run that is never blocked; keyed by its data."""
    found = {}

    def run(where):
        kind = {"first batch": "python data"}.get(where, where if where in READ_AHEAD else "hook")
        if kind not in found:
            path = tmp_path_factory.mktemp("undisturbed") / "run"
            (path.parent / "go").touch()
            found[kind] = blocked_run.train(path, where), log_of(path)
        return found[kind]

    return run


def log_of(model_dir):
    """The lines of the log about steps and evaluations, without times."""
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if "second" not in name and "wait" not in name}
        for line in lines
        if line["split"] in {"train", "validation"}
    ]


def wait_until_blocked(path, process):
    """Waits until a run is blocked; fails if it ends first, or after three minutes."""
    end = time.monotonic() + 180
    while not (path / "blocked").exists():
        printed = (path.parent / "printed.txt").read_text()
        assert process.poll() is None, printed
        assert time.monotonic() < end, printed
        time.sleep(0.01)


@pytest.mark.parametrize(
    "where",
    [
        *[pytest.param(where, marks=pytest.mark.thorough) for where in IN_CI],
        *[pytest.param(where, marks=pytest.mark.slow) for where in BY_NIGHT],
    ],
)
def test_a_blocked_run_is_left_and_resumed(started, undisturbed, where):
    """L22: one SIGTERM ends the process with 75. The same command then ends with the bits and the log of
    a run that was never blocked.
    """
    path, process = started(where)
    wait_until_blocked(path, process)
    time.sleep(1.0 if where in READ_AHEAD else 0.0)
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=120) == stop_signals.EXIT_CODE, (
        path.parent / "printed.txt"
    ).read_text()
    if where not in ("first batch", *READ_AHEAD):
        assert max(folder.committed(path, "ckpt")) == SAVED.get(where, STEP)
    (path.parent / "go").touch()
    bits, log = undisturbed(where)
    assert blocked_run.train(path, where) == bits
    assert log_of(path) == log


@pytest.mark.slow
@pytest.mark.parametrize(("where", "saved"), [("python data", 5), ("hook", STEP)])
def test_blocked_workers_end(tmp_path, where, saved):
    """L22: the last of two workers is blocked and the other waits for it. They save together what a hook
    blocks, and end without saving where data does not come. The same command then ends with the log
    of a job that was never blocked.
    """

    def job(folder):
        strategy = "multi_worker_mirrored"
        return workers(tmp_path, 2, "blocked_run.py", folder / "run", where, STOP_SECS, strategy)

    blocked, undisturbed = tmp_path / "blocked", tmp_path / "undisturbed"
    blocked.mkdir()
    undisturbed.mkdir()
    with job(blocked) as started:
        started.wait_until((blocked / "run" / "blocked").exists)
        time.sleep(1.0)
        began = time.monotonic()
        for process in started.processes:
            process.send_signal(signal.SIGTERM)
        codes = started.wait()
        print(f"{where}: ended after {time.monotonic() - began:.1f} s")  # noqa: T201
        assert set(codes) == {stop_signals.EXIT_CODE}, started.output()
    assert max(folder.committed(blocked / "run", "ckpt")) == saved
    for path in (blocked, undisturbed):
        (path / "go").touch()
        with job(path) as started:
            assert started.wait() == [0, 0], started.output()
    assert log_of(blocked / "run") == log_of(undisturbed / "run")


def test_a_position_that_cannot_be_read_is_counted(tmp_path):
    """The state of a pipeline that waits for data is given up, and the batches are counted."""

    def position(go):
        pipeline = blocked_run.late_pipeline(str(go), 9)
        return DataPosition(batches(pipeline, "train_data", tf.distribute.get_strategy()), "exact")

    blocked = position(tmp_path / "go")
    slopes = [next(blocked.iterator)["slope"].numpy() for _ in range(8)]
    blocked.give_up()
    (tmp_path / "saved").mkdir()
    blocked.write(str(tmp_path / "saved"))
    assert [each.name for each in (tmp_path / "saved").iterdir()] == [COUNTED]

    (tmp_path / "go").touch()
    resumed = position(tmp_path / "go")
    resumed.read(tmp_path / "saved", 7)
    np.testing.assert_array_equal(next(resumed.iterator)["slope"], slopes[7])
    resumed.give_up()
    resumed.write(str(tmp_path / "saved"))  # not blocked: the state is read in spite of it
    assert resumed.taken == 7


def test_code_that_is_left_is_named(capsys):
    """An exception leaves code of the user; whoever called it goes on."""
    leaving = Leaving(stop_signals.StopSignals(list))

    def left():
        raise LeftError(f"left{place_of(sys._getframe())}")

    leaving.call(left)
    assert capsys.readouterr().err.startswith(f"left, at {__file__}:")
