"""SIGTERM, SIGINT and `stop`: a run that is asked to stop saves and ends soon."""

import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import blocked_run
import pytest
import signalled_run
from blocked_run import BLOCKS
from helpers import Linear, slopes
from jobs import workers
from signalled_run import EVENTS, SLOW, bits, data, events, make, train

from trainer import Checkpoints
from trainer.checkpoint import folder
from trainer.run import stop_signals

pytestmark = pytest.mark.sampled

ROOT = pathlib.Path(signalled_run.__file__).parents[1]
STOPPED = (signal.SIGTERM, signal.SIGINT)
TARGET = 600  # more steps than any run takes before its signal
PHASES = ["training", "evaluating", "saving", "acting", "saving in a thread"]

WITHOUT_TENSORFLOW = """
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("signals", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
SLOW_TO_SAVE = """
module.GRACE_SECS = 0.2
with module.StopSignals(list) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    with stop.saving():
        time.sleep(1.0)
        print("saved", flush=True)
    time.sleep(60)
"""
SIGNALLED_TWICE = """
with module.StopSignals(list):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_handlers():
    """Installs handlers and a wakeup descriptor that must be in place again after the test.

    They also keep a late signal from ending the test process.
    """
    strays = []

    def stray(number, frame):
        del frame
        strays.append(number)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handlers = {each: signal.signal(each, stray) for each in STOPPED}
    wakeup = signal.set_wakeup_fd(writer.fileno())
    try:
        yield strays
        assert [signal.getsignal(each) for each in STOPPED] == [stray, stray]
        assert signal.set_wakeup_fd(wakeup) == writer.fileno()
        assert strays == []
    finally:
        signal.set_wakeup_fd(wakeup)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        reader.close()
        writer.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bits of a run without interruptions."""
    return finish(tmp_path_factory.mktemp("undisturbed"))


def wait_until(condition, process=None):
    """Waits for a condition; fails if the process ends first, or after two minutes."""
    end = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, "the process has ended"
        assert time.monotonic() < end, "timed out"
        time.sleep(0.001)


def in_phase(model_dir, phase):
    """Returns whether a run is in its slow phase, after its first steps."""
    if "sav" in phase:
        return any(model_dir.glob("ckpt-*.tmp/*"))
    lines = events(model_dir)
    loops = [place for place, line in enumerate(lines) if line.startswith("loop")]
    # Prefetched batches are trained on without delay, so the first steps are fast.
    enough = 8 if phase == "training" else 1
    return bool(loops) and lines[loops[0] :].count(phase) >= enough


def first_loop_step(model_dir):
    """Returns the step at which a run began its first inner loop."""
    return next(int(line.split()[1]) for line in events(model_dir) if line.startswith("loop"))


def newest_checkpoint(model_dir):
    """Returns the step of the newest checkpoint, after reading the manifests of all."""
    found = folder.committed(model_dir, "ckpt")
    for path in found.values():
        folder.read_manifest(path)
    return max(found)


@contextlib.contextmanager
def in_a_thread(function, *args):
    """Runs a function in a thread during the context; raises its exception at the end."""
    raised = []

    def guarded():
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for error in raised:
            raise error


def ask_in_phase(trainer, phase, wait, ask, seen):
    """Waits for a phase, records the step that the run has reached, and asks it to stop."""
    wait_until(lambda: in_phase(trainer.model_dir, phase))
    time.sleep(wait)
    if phase == "training":  # in the middle of a step
        count = events(trainer.model_dir).count(phase)
        wait_until(lambda: events(trainer.model_dir).count(phase) > count)
        time.sleep(SLOW[phase] / 3)
    seen.append(trainer.totals.attempted)
    ask()


def interrupted(trainer, phase, wait, number=signal.SIGTERM):
    """Sends a signal to this process while the trainer trains; returns the exception that train
    raised, and the step at the time of the signal.
    """
    seen = []
    (trainer.model_dir / EVENTS).unlink(missing_ok=True)
    send = (ask_in_phase, trainer, phase, wait, lambda: os.kill(os.getpid(), number), seen)
    with in_a_thread(*send), pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        train(trainer, phase, 10**6)
    return raised.value, seen[0]


def finish(model_dir):
    """Resumes a run in this process and trains to the target; returns its bits."""
    (model_dir / EVENTS).unlink(missing_ok=True)
    trainer = make(model_dir)
    train(trainer, "nothing", TARGET)
    return bits(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "replicas"), [("Ctrl-C", 1), ("stop", 1), ("stop", 2)])
def test_a_stopped_run_goes_on_in_the_same_process(tmp_path, mirrored, undisturbed, how, replicas):
    """After SIGINT, `train` saves and raises KeyboardInterrupt; after `stop` in another thread, it
    returns. Called again with the same target, it ends with the bits of an uninterrupted run.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = make(tmp_path, "training", strategy=strategy)
    batches, seen = trainer.slow_data(), []
    raised = pytest.raises(KeyboardInterrupt) if how == "Ctrl-C" else contextlib.nullcontext()

    def ask():
        os.kill(os.getpid(), signal.SIGINT) if how == "Ctrl-C" else trainer.stop()

    with in_a_thread(ask_in_phase, trainer, "training", 0.2, ask, seen), raised:
        trainer.train(batches, steps=TARGET)
    step = trainer.totals.attempted

    assert seen[0] <= step <= seen[0] + 2 < TARGET
    assert newest_checkpoint(tmp_path) == step
    trainer.hurry = True
    assert trainer.train(batches, steps=TARGET).steps_run == TARGET - step
    if replicas == 1:
        assert bits(trainer) == undisturbed
    assert folder.read_manifest(tmp_path / f"ckpt-{TARGET}")["batches_taken"] == TARGET


@pytest.mark.slow
@pytest.mark.parametrize("when", ["reading", "building", "beginning"])
def test_a_signal_before_the_first_step_ends_the_run_before_it(tmp_path, undisturbed, when):
    """A signal while the first batch is read, while the model is built or in `on_train_begin` ends the
    run before its first step, and the same command then starts it.
    """

    def strike():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

    class Struck(signalled_run.SignalledRun):
        def build_model(self):
            if when == "building":
                strike()
            return super().build_model()

        def on_train_begin(self):
            if when == "beginning":
                strike()

    struck = itertools.count()

    def strike_once():
        if when == "reading" and next(struck) == 0:
            strike()

    trainer = Struck(model_dir=tmp_path, checkpoints=Checkpoints(data_resume="skip"), verbose=False)
    with pytest.raises(SystemExit) as raised:
        trainer.train(data(strike_once), steps=5)

    assert raised.value.code == 75
    assert trainer.totals.attempted == 0
    assert (trainer.weight, newest_checkpoint(tmp_path), events(tmp_path)) == (1.0, 0, [])
    assert finish(tmp_path) == undisturbed


@pytest.mark.thorough
def test_stop_between_two_calls_does_not_stop_the_next():
    """A call of `stop` outside `train` has no effect."""
    trainer = Linear(verbose=False)
    trainer.stop()

    assert trainer.train(slopes(1.0, 2.0), steps=2, global_batch=2).step == 2
    trainer.stop()
    rescue = threading.Timer(20, trainer.stop)
    rescue.start()
    assert trainer.train(slopes(1.0, 2.0), steps=4, global_batch=2).step == 4
    rescue.cancel()


@pytest.mark.thorough
def test_a_run_in_another_thread_leaves_signals_alone():
    """Signals belong to the main thread: its handlers and its wakeup descriptor are not changed."""
    seen, inside, looked = [], threading.Event(), threading.Event()

    class Elsewhere(Linear):
        def on_loop_begin(self, step):
            seen.extend(signal.getsignal(each) for each in STOPPED)
            inside.set()
            looked.wait(20)

    before = [signal.getsignal(each) for each in STOPPED]
    run = {"steps": 2, "global_batch": 2}
    with in_a_thread(lambda: Elsewhere(verbose=False).train(slopes(1.0, 2.0), **run)):
        assert inside.wait(60)
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        looked.set()

    assert seen == before
    assert wakeup != -1


def test_a_signal_at_the_last_moment_is_handled():
    """A signal that arrives before the run restores the handlers ends that run: it is not lost, and
    it does not ask a run to stop that has already ended.
    """
    asked = []

    def struck_at_its_end():
        with stop_signals.StopSignals(lambda: asked.append(1)) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.end_process()

    for _ in range(50):
        with pytest.raises(SystemExit):
            struck_at_its_end()
    with stop_signals.StopSignals(lambda: asked.append(2)) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    over = list(asked)
    time.sleep(0.05)

    assert asked == over == [1] * 50 + [2]
    assert stop.received is signal.SIGTERM


def test_no_traceback_below_the_summary(monkeypatch):
    """The interrupt that ends a program after Ctrl-C is not shown; other errors are."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *info: shown.append(info[1]))
    stop = stop_signals.StopSignals(list)
    stop.received = signal.SIGINT
    with pytest.raises(KeyboardInterrupt) as raised:
        stop.end_process()
    other = KeyboardInterrupt()
    for error in (raised.value, other):
        sys.excepthook(type(error), error, None)
    assert shown == [other]


# Python warns because TensorFlow has threads; the child does not use TensorFlow.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_handles_its_own_signals():
    """SIGTERM ends a forked child, for example one that an action started, and not the run."""
    stray = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready, begun = os.pipe()
    try:
        with stop_signals.StopSignals(list) as stop:
            child = os.fork()
            if not child:
                os.write(begun, b"!")
                time.sleep(20)
                os._exit(0)
            os.read(ready, 1)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGTERM, stray)

    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert stop.received is None


@pytest.mark.parametrize("reader", ["gone", "asleep"])
def test_a_second_signal_ends_a_process_that_cannot_print(reader):
    """The process exits even if the reader of its standard error has ended or does not read."""
    reading, writing = os.pipe()
    if reader == "gone":
        os.close(reading)
    else:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TENSORFLOW + SIGNALLED_TWICE, stop_signals.__file__],
        stderr=writing,
    )
    os.close(writing)
    try:
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_signal_ends_a_run_soon_and_saved(tmp_path, undisturbed, full):
    """After SIGTERM in a graph call of a million steps, in an evaluation, in a save or in an action,
    the inner loop ends within two steps, that step is saved, and `train` raises SystemExit with code
    75. The same command continues from that step and ends with the bits of an uninterrupted run.
    """
    chance = random.Random(3)  # noqa: S311  # not for cryptography
    phases = [PHASES[place % len(PHASES)] for place in range(7)] if full else PHASES[:4]
    in_time, late, step = [], [], 0
    for phase in phases:
        trainer = make(tmp_path, phase)
        error, seen = interrupted(trainer, phase, chance.uniform(0, 0.25))
        assert first_loop_step(tmp_path) == step
        step = trainer.totals.attempted
        late.append(step - seen)
        in_time.append(
            error.code == stop_signals.EXIT_CODE == 75
            # Two, and one more that may end between reading the count and the signal.
            and 0 <= step - seen <= 3
            and newest_checkpoint(tmp_path) == step
        )
    print(  # noqa: T201
        f"in this process: {sum(in_time)} of {len(in_time)} stopped in time, {late} steps later"
    )

    assert all(in_time)
    assert finish(tmp_path) == undisturbed
    assert first_loop_step(tmp_path) == step


def test_saving_may_take_longer_than_the_grace_time():
    """L22: the time in which a run is saved does not count; what blocks it afterwards does."""
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW + SLOW_TO_SAVE, stop_signals.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert (ended.returncode, ended.stdout) == (75, "saved\n")
    assert ended.stderr.count("\n") == 1


def log_of(model_dir):
    """The lines of the log about steps and evaluations, without times."""
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if "second" not in name and "wait" not in name}
        for line in lines
        if line["split"] in {"train", "validation"}
    ]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(where, marks=pytest.mark.thorough if where == "hook" else pytest.mark.slow)
        for where in BLOCKS
    ],
)
def test_a_blocked_run_ends_and_is_resumed(tmp_path, where):
    """L22: one SIGTERM ends the process with 75 at its newest checkpoint. The same command then ends
    with the bits and the log of a run that was never blocked.
    """
    path, undisturbed = tmp_path / "blocked" / "run", tmp_path / "undisturbed" / "run"
    process = subprocess.Popen(
        [sys.executable, blocked_run.__file__, str(path), where, "1"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    try:
        wait_until((path / "blocked").exists, process)
        time.sleep(1.0)  # data that is read ahead is late before the steps are
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    finally:
        process.kill()
        process.wait()
    # The pipeline is late while its position is saved.
    unlike = {"first batch": None, "pipeline": None, "end": blocked_run.STEPS}
    saved = unlike.get(where, blocked_run.INTERVAL)
    assert max(folder.committed(path, "ckpt"), default=None) == saved
    for each in (path, undisturbed):
        each.mkdir(parents=True, exist_ok=True)
        (each.parent / "go").touch()
    assert blocked_run.train(path, where) == blocked_run.train(undisturbed, where)
    assert log_of(path) == log_of(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["python data", "hook"])
def test_blocked_workers_end(tmp_path, where):
    """L22: the last of two workers is blocked and the other waits for it: both end with 75. The same
    command then ends with the log of a job that was never blocked.
    """

    def job(model_dir):
        model_dir.mkdir(parents=True, exist_ok=True)
        strategy = "multi_worker_mirrored"
        return workers(tmp_path, 2, "blocked_run.py", model_dir, where, 2.0, strategy)

    blocked, undisturbed = tmp_path / "blocked" / "run", tmp_path / "undisturbed" / "run"
    with job(blocked) as started:
        started.wait_until((blocked / "blocked").exists)
        time.sleep(1.0)
        for process in started.processes:
            process.send_signal(signal.SIGTERM)
        assert set(started.wait()) == {75}, started.output()
    assert max(folder.committed(blocked, "ckpt")) == blocked_run.INTERVAL
    for path in (blocked, undisturbed):
        (path.parent / "go").touch()
        with job(path) as started:
            assert started.wait() == [0, 0], started.output()
    assert log_of(blocked) == log_of(undisturbed)
