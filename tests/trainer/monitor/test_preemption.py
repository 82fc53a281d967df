"""SIGTERM, SIGINT and `stop`: a run that is asked to end does so soon, and saved."""

import contextlib
import itertools
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import signalled_run
from helpers import Linear, slopes
from signalled_run import EVENTS, INTERVAL, SLOW, bits, data, events, make, train

from trainer.checkpoint import folder
from trainer.monitor import preemption as signals

SCRIPT = pathlib.Path(signalled_run.__file__)
ROOT = SCRIPT.parents[1]
STOPPED = (signal.SIGTERM, signal.SIGINT)
ONE_LONG = ["one long step", "one long save"]
TARGET = 600  # beyond wherever a signal meets a run
PHASES = ["training", "evaluating", "saving", "acting", "saving in a thread"]

STRUCK_TWICE = """
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("signals", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with module.StopSignals(list):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def mine():
    """Handlers and a wakeup descriptor of the test's own, which must be there again at its end.

    They also keep a signal that comes too late from ending the tests.
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
    """The bits of a run that nobody has disturbed."""
    return finish(tmp_path_factory.mktemp("undisturbed"))


def wait_until(condition, process=None):
    """Waits for a condition; fails if the process ends before, or two minutes have gone."""
    end = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, "it has ended"
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def in_phase(model_dir, phase):
    """Whether a run is where it is slow, and beyond its beginning."""
    if "sav" in phase:
        return any(model_dir.glob("ckpt-*.tmp/*"))
    lines = events(model_dir)
    loops = [place for place, line in enumerate(lines) if line.startswith("loop")]
    # Some batches have been fetched ahead, and are trained on in no time.
    enough = 8 if phase == "training" else 1
    return bool(loops) and lines[loops[0] :].count(phase) >= enough


def came_from(model_dir):
    """The step at which a run has begun its first inner loop."""
    return next(int(line.split()[1]) for line in events(model_dir) if line.startswith("loop"))


def last_commit(model_dir):
    """The step of the newest checkpoint, all of which are sound."""
    found = folder.committed(model_dir, "ckpt")
    for path in found.values():
        folder.read_manifest(path)
    return max(found)


@contextlib.contextmanager
def a_thread(function, *args):
    """Runs a function in a thread meanwhile; raises what it raised."""
    raised = []

    def guarded():
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 - handed on
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
    """Waits for a phase; notes the step that the run is at, and asks it to stop."""
    wait_until(lambda: in_phase(trainer.model_dir, phase))
    time.sleep(wait)
    if phase == "training":  # in the middle of a step, however long the signal takes to arrive
        count = events(trainer.model_dir).count(phase)
        wait_until(lambda: events(trainer.model_dir).count(phase) > count)
        time.sleep(SLOW[phase] / 3)
    seen.append(trainer.totals.attempted)
    ask()


def interrupted(trainer, phase, wait, number=signal.SIGTERM):
    """Sends a signal to this process while the trainer trains; returns what train raised, and the
    step at the signal.
    """
    seen = []
    (trainer.model_dir / EVENTS).unlink(missing_ok=True)
    send = (ask_in_phase, trainer, phase, wait, lambda: os.kill(os.getpid(), number), seen)
    with a_thread(*send), pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        train(trainer, phase, 10**6)
    return raised.value, seen[0]


@pytest.fixture(scope="module", autouse=True)
def processes(tmp_path_factory, full):
    """Runs in processes of their own, by what is slow in them: with their folders, and what they
    print. They start together, and before other tests, since starting takes long.
    """
    folders = {slow: tmp_path_factory.mktemp("process") for slow in ONE_LONG}
    folders |= {slow: tmp_path_factory.mktemp("process") for slow in PHASES[: 3 if full else 1]}
    started = {}
    for slow, path in folders.items():
        with (path / "printed.txt").open("w") as printed:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(path), slow, "1000000"],
                env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
        started[slow] = process, path
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


def finish(model_dir):
    """Takes up a run in this process, and trains to the end; returns its bits."""
    (model_dir / EVENTS).unlink(missing_ok=True)
    trainer = make(model_dir)
    train(trainer, "nothing", TARGET)
    return bits(trainer)


def test_an_interrupted_notebook_can_go_on(tmp_path, undisturbed):
    """SIGINT: `train` raises KeyboardInterrupt when all is saved; called again, in the same process
    and with the same target, it comes to the same bits.
    """
    trainer = make(tmp_path, "training")
    batches = trainer.slow_data()
    seen = []
    interrupt = (ask_in_phase, trainer, "training", 0.2)
    with a_thread(*interrupt, lambda: os.kill(os.getpid(), signal.SIGINT), seen):  # noqa: SIM117
        with pytest.raises(KeyboardInterrupt):
            trainer.train(batches, steps=TARGET)
    step = trainer.totals.attempted

    assert seen[0] <= step <= seen[0] + 2 < TARGET
    assert last_commit(tmp_path) == step
    trainer.hurry = True
    assert trainer.train(batches, steps=TARGET).steps_run == TARGET - step
    assert bits(trainer) == undisturbed
    assert folder.read_manifest(tmp_path / f"ckpt-{TARGET}")["batches_taken"] == TARGET


@pytest.mark.parametrize("when", ["reading", "building", "beginning"])
def test_a_signal_before_the_first_step_ends_the_run_before_it(tmp_path, undisturbed, when):
    """While the first batch is read, while the model is built, and in `on_train_begin`: no step is
    taken; the same command begins then.
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

    trainer = Struck(model_dir=tmp_path, data_resume="skip", verbose=False)
    with pytest.raises(SystemExit) as raised:
        trainer.train(data(strike_once), steps=5)

    assert raised.value.code == 75
    assert trainer.totals.attempted == 0
    assert (trainer.weight, last_commit(tmp_path), events(tmp_path)) == (1.0, 0, [])
    assert finish(tmp_path) == undisturbed


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_is_stopped_from_another_thread(tmp_path, mirrored, undisturbed, replicas):
    """`stop` ends the inner loop within two steps, and `train` returns; the next call goes on."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = make(tmp_path, "training", strategy=strategy)
    batches = trainer.slow_data()
    seen = []
    with a_thread(ask_in_phase, trainer, "training", 0.3, trainer.stop, seen):
        summary = trainer.train(batches, steps=10**6)

    assert seen[0] <= summary.step <= seen[0] + 2
    assert summary.checkpoint == str(tmp_path / f"ckpt-{summary.step}")
    trainer.hurry = True
    assert trainer.train(batches, steps=TARGET).steps_run == TARGET - summary.step
    if replicas == 1:
        assert bits(trainer) == undisturbed


def test_stop_between_two_calls_is_not_meant_for_the_next():
    """Who stops a run that does not go on stops nothing."""
    trainer = Linear(verbose=False)
    trainer.stop()

    assert trainer.train(slopes(1.0, 2.0), steps=2, global_batch=2).step == 2
    trainer.stop()
    rescue = threading.Timer(20, trainer.stop)
    rescue.start()
    assert trainer.train(slopes(1.0, 2.0), steps=4, global_batch=2).step == 4
    rescue.cancel()


def test_a_run_in_another_thread_leaves_signals_alone():
    """They belong to the main thread: its handlers and its wakeup descriptor stay as they are."""
    seen, inside, looked = [], threading.Event(), threading.Event()

    class Elsewhere(Linear):
        def on_loop_begin(self, step):
            seen.extend(signal.getsignal(each) for each in STOPPED)
            inside.set()
            looked.wait(20)

    before = [signal.getsignal(each) for each in STOPPED]
    run = {"steps": 2, "global_batch": 2}
    with a_thread(lambda: Elsewhere(verbose=False).train(slopes(1.0, 2.0), **run)):
        assert inside.wait(60)
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        looked.set()

    assert seen == before
    assert wakeup != -1


def test_signals_are_given_back_when_a_run_raises():
    """As the fixture looks after every test of this file; meanwhile they are the run's."""
    meanwhile = []

    class Raising(Linear):
        def on_loop_begin(self, step):
            meanwhile.extend(signal.getsignal(each) for each in STOPPED)
            raise RuntimeError("as it was asked to")

    with pytest.raises(RuntimeError) as raised:
        Raising(verbose=False).train(slopes(1.0, 2.0), steps=2, global_batch=2)

    assert str(raised.value) == "as it was asked to"
    assert meanwhile == [signals.leave_alone] * 2


def test_a_signal_in_the_last_moment_is_heard():
    """What has come before the run gives signals back is the run's: it is neither lost, nor does it
    ask a run to stop that is over.
    """
    asked = []

    def struck_at_its_end():
        with signals.StopSignals(lambda: asked.append(1)) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.end_process()

    for _ in range(50):
        with pytest.raises(SystemExit):
            struck_at_its_end()
    with signals.StopSignals(lambda: asked.append(2)) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    over = list(asked)
    time.sleep(0.05)

    assert asked == over == [1] * 50 + [2]
    assert stop.received is signal.SIGTERM


# Python, since TensorFlow has threads: the child touches nothing of theirs.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_signals_of_its_own():
    """A child of the run, a worker of some action, dies of SIGTERM, and the run does not hear of it."""
    stray = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready, begun = os.pipe()
    try:
        with signals.StopSignals(list) as stop:
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


def test_a_run_whose_reader_has_gone_is_stopped_all_the_same(tmp_path, monkeypatch):
    """Who reads its output, as `tee` does, is sent the same signal, and may end before the run does:
    the run is saved, and the code is 75.
    """
    reading, writing = os.pipe()

    class Struck(signalled_run.SignalledRun):
        def on_train_begin(self):
            os.close(reading)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    trainer = Struck(model_dir=tmp_path, data_resume="skip")
    gone = os.fdopen(writing, "w")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        try:
            with pytest.raises(SystemExit) as raised:
                trainer.train(data(), steps=5)
        finally:
            with contextlib.suppress(BrokenPipeError):
                gone.close()

    assert last_commit(tmp_path) == 0
    assert raised.value.code == 75


@pytest.mark.parametrize("reader", ["gone", "asleep"])
def test_a_second_signal_ends_a_process_that_cannot_say_so(reader):
    """Who reads what it prints may have gone at the same signal, as `tee` does, or wait."""
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
        [sys.executable, "-c", STRUCK_TWICE, signals.__file__], stderr=writing
    )
    os.close(writing)
    try:
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("phase", ["training", "evaluating", "saving"])
def test_a_process_that_is_asked_to_end_exits_with_75(processes, undisturbed, phase):
    """The same of a process, as a scheduler sees it: the code says that it may be started again."""
    if phase not in processes:
        pytest.skip("in the full run")
    process, model_dir = processes[phase]
    wait_until(lambda: in_phase(model_dir, phase), process)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    step = last_commit(model_dir)
    print(f"a process, in {phase}: honoured, at step {step}")  # noqa: T201

    assert step > 0
    assert not any(model_dir.glob("*.tmp"))
    assert finish(model_dir) == undisturbed
    assert came_from(model_dir) == step


@pytest.mark.parametrize(
    ("slow", "second", "code"),
    [("one long step", signal.SIGTERM, 128 + 15), ("one long save", signal.SIGINT, 128 + 2)],
)
def test_a_second_signal_ends_the_process_at_once(processes, undisturbed, slow, second, code):
    """It waits neither for a graph call nor for a save; what was committed before is intact, what is
    half written is removed at the next start, and the run is taken up.
    """
    process, model_dir = processes[slow]
    newest = model_dir / f"ckpt-{2 * INTERVAL}"
    unfinished = newest.with_name(newest.name + ".tmp")
    slow_part = newest if slow == "one long step" else unfinished / "variables.index"
    wait_until(lambda: slow in events(model_dir) and slow_part.exists(), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(second)
    assert process.wait(30) == code
    seconds = time.monotonic() - began
    print(f"{slow}: gone {seconds:.2f} s after the second signal")  # noqa: T201

    words = "asked a second time to stop: gone at once, nothing is saved\n"
    assert (model_dir / "printed.txt").read_text().endswith(words)
    step = last_commit(model_dir)
    assert step == (INTERVAL if slow == "one long save" else 2 * INTERVAL)
    assert unfinished.exists() == (slow == "one long save")
    assert finish(model_dir) == undisturbed
    assert came_from(model_dir) == step
    assert not unfinished.exists()


def test_a_signal_ends_a_run_soon_and_saved(tmp_path, undisturbed, full):
    """SIGTERM in a graph call of a million steps, in an evaluation, in a save or while an action
    sleeps: the inner loop ends within two steps, that step is saved, and `train` raises SystemExit
    with code 75. The same command goes on from that step, and in the end it has the bits of a run
    that nobody has disturbed.
    """
    chance = random.Random(3)  # noqa: S311  # nothing to keep secret
    phases = [PHASES[place % len(PHASES)] for place in range(17)] if full else PHASES[:4]
    honoured, late, step = [], [], 0
    for phase in phases:
        trainer = make(tmp_path, phase)
        error, seen = interrupted(trainer, phase, chance.uniform(0, 0.25))
        assert came_from(tmp_path) == step
        step = trainer.totals.attempted
        late.append(step - seen)
        honoured.append(
            error.code == signals.EXIT_CODE == 75
            # Two, and one that may end between the look at the count and the signal.
            and 0 <= step - seen <= 3
            and last_commit(tmp_path) == step
        )
    print(  # noqa: T201
        f"in this process: {sum(honoured)} of {len(honoured)} honoured, {late} steps later"
    )

    assert all(honoured)
    assert finish(tmp_path) == undisturbed
    assert came_from(tmp_path) == step
