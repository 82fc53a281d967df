"""An evaluator process that follows a run which another process trains."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import followed_run
import pytest
import tensorflow as tf
from followed_run import DATA, HELD_OUT, Followed, Running, validation
from helpers import Linear, linear_model, slopes
from tensorflow.python.summary.summary_iterator import summary_iterator

from trainer import Callback, Checkpoints
from trainer.callbacks import EarlyStopping
from trainer.checkpoint import folder
from trainer.report.reading import read_run
from trainer.run import follow as module
from trainer.run.follow import adopt_compile_mode

# Keras converts its variables in a way that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(followed_run, "NAP", 0)
    monkeypatch.setattr(module, "POLL_SECS", 0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has ended, with all its checkpoints."""
    path = tmp_path_factory.mktemp("finished") / "run"
    trainer = Running(
        model_dir=path,
        seed=3,
        checkpoints=Checkpoints(interval=2, max_to_keep=None),
        steps_per_loop=2,
    )
    trainer.train(DATA, steps=14, global_batch=16, eval_data=HELD_OUT, eval_interval=2)
    return path


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that run."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def evaluator(run, **arguments):
    """A trainer without an optimizer and with another seed."""
    return Followed(model_dir=run, seed=8, **arguments)


def follow(trainer, **arguments):
    """Evaluates the checkpoints of a run."""
    return trainer.evaluate_continuously(HELD_OUT, global_batch=16, **arguments)


def files(path):
    """A digest of each file outside the evaluator's folder."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file() and path / "eval" not in file.parents
    }


@pytest.mark.slow
def test_every_checkpoint_is_evaluated_once_to_the_bit(run):
    """`max_to_keep=None` keeps all checkpoints. The evaluator has the run's own results, writes
    nothing outside its folder, and does nothing when it is called again.
    """
    before, expected = files(run), validation(run)
    (run / "ckpt-99.tmp").mkdir()  # the run may be writing it
    trainer = evaluator(run, checkpoints=Checkpoints(keep_best=2))
    results = follow(trainer)
    events = [
        (value.tag, event.step)
        for path in (run / "eval" / "validation").iterdir()
        for event in summary_iterator(str(path))
        for value in event.summary.value
    ]

    assert list(expected) == [2, 4, 6, 8, 10, 12, 14]
    assert {step: result["loss"] for step, result in results.items()} == expected
    assert validation(run / "eval") == expected
    assert events == [("loss", step) for step in expected]
    ranked = sorted(expected, key=expected.get)[:2]
    assert {path.name for path in (run / "eval" / "best").iterdir()} == {
        f"step-{step}" for step in ranked
    }
    assert read_run(run).validation["eval/loss"].value.tolist() == list(expected.values())
    assert (run / "ckpt-99.tmp").exists()
    assert files(run) == before
    assert follow(trainer) == follow(evaluator(run)) == {}
    assert len(follow(evaluator(run), steps=1)) == 7  # other data


@pytest.mark.thorough
def test_a_checkpoint_may_vanish_or_be_replaced_while_it_is_read(run, monkeypatch):
    """A checkpoint that the run removes is left out; one that it replaces is read again."""
    expected, read, struck = validation(run), folder.read_manifest, []

    def striking(path):
        facts = read(path)
        if path.name == "ckpt-4":
            shutil.rmtree(path)
        if path.name == "ckpt-6" and not struck:
            struck.append(path)
            shutil.rmtree(path)
            shutil.copytree(run / "ckpt-8", path)
        return facts

    trainer = evaluator(run)
    trainer.evaluate(HELD_OUT, global_batch=16)
    monkeypatch.setattr(folder, "read_manifest", striking)
    results = follow(trainer)

    assert list(results) == [2, 6, 8, 10, 12, 14]
    assert struck
    assert {step: results[step]["loss"] for step in (2, 8, 14)} == {
        step: expected[step] for step in (2, 8, 14)
    }
    assert results[6]["loss"] == pytest.approx(expected[8], rel=0.5)  # with the weights of step 8
    assert trainer.evaluate(HELD_OUT, global_batch=16)["loss"] > 0


@pytest.mark.thorough
def test_a_checkpoint_of_the_same_step_is_evaluated_again(run):
    """A run that was rolled back, or started anew, replaces checkpoints; their results too."""
    expected = validation(run)
    follow(evaluator(run))
    for step in (10, 12, 14):
        shutil.rmtree(run / f"ckpt-{step}")
    shutil.copytree(run / "ckpt-8", run / "ckpt-10")
    results = follow(evaluator(run), last_step=10)

    assert list(results) == [10]
    assert list(validation(run / "eval")) == [2, 4, 6, 8, 10]
    assert validation(run / "eval")[8] == expected[8]
    assert results[10]["loss"] != expected[10]


@pytest.mark.thorough
def test_other_arrays_are_evaluated_anew(run):
    """Results are taken over for the same data only."""
    steps = list(follow(evaluator(run), last_step=14))
    assert not follow(evaluator(run), last_step=14)
    other = HELD_OUT | {"y": HELD_OUT["y"] + 1}
    trainer = evaluator(run)
    assert list(trainer.evaluate_continuously(other, global_batch=16, last_step=14)) == steps
    assert list(follow(evaluator(run), last_step=14)) == steps


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_left_out(run, caplog):
    """The others are evaluated."""
    damaged = run / "ckpt-6" / "variables.index"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    results = follow(evaluator(run))

    assert 6 not in results
    assert len(results) == 6
    assert f"{run / 'ckpt-6'} is not evaluated: {damaged} has" in caplog.text


@pytest.mark.thorough
def test_it_waits_for_the_run(run, capsys):
    """A run that was stopped, or is being trained, has not ended. The evaluator waits for it, for
    its folder too, and ends by a timeout or when `stop` is called.
    """
    ended = (run / "metrics.jsonl").read_text()
    line = json.loads(ended.splitlines()[-1])
    assert (line["split"], line["stopped"]) == ("end", False)
    (run / "metrics.jsonl").write_text(ended.replace('"stopped": false', '"stopped": true'))
    trainer = evaluator(run, verbose=True)
    assert len(follow(trainer, timeout_secs=0.2)) == 7
    assert f"no new checkpoint in {run} for 0.2 s" in capsys.readouterr().out.replace("\n", "")

    threading.Timer(0.3, trainer.stop).start()
    began = time.monotonic()
    assert follow(trainer) == {}
    assert time.monotonic() - began < 10
    assert follow(evaluator(run / "later"), timeout_secs=0.2) == {}


def test_there_must_be_a_run_to_follow():
    """The error comes before anything is built."""
    with pytest.raises(ValueError, match="`model_dir`"):
        follow(evaluator(None))


@pytest.mark.thorough
def test_a_trainer_that_trains_does_not_follow(tmp_path):
    """It would lose its weights."""
    trainer = Running(model_dir=tmp_path)
    trainer.train(DATA, steps=1, global_batch=16)
    with pytest.raises(ValueError, match="`evaluate_continuously`"):
        follow(trainer)


def start(run, *arguments):
    """Starts the program of a run, or of its evaluator."""
    script = pathlib.Path(followed_run.__file__)
    command = [sys.executable, str(script), f"--model_dir={run}", "--steps=60", *arguments]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(script.parents[1])},  # beside tests/trainer
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The evaluator follows the run in a process of its own, from before the run's first checkpoint
    to its last one, with the run's own results; the run removes old checkpoints meanwhile. A
    SIGTERM ends an evaluator that waits.
    """
    run = tmp_path / "run"
    following = start(run, "--mode=eval", "--continuous")
    training = start(run, "--mode=train", "--checkpoints.max_to_keep=3")
    said = [process.communicate(timeout=300)[0] for process in (training, following)]
    assert (training.returncode, following.returncode) == (0, 0), said
    expected, found = validation(run), validation(run / "eval")

    assert max(found) == 60
    assert len(found) >= 3
    assert found == {step: expected[step] for step in found}
    assert "--mode=train" in (run / "flags.cfg").read_text()

    waiting = start(run, "--mode=eval", "--continuous", "--steps=100")
    time.sleep(20)
    waiting.terminate()
    waiting.communicate(timeout=60)
    assert waiting.returncode == 75


class Module(tf.Module):
    """One weight."""

    def __init__(self):
        """The weight is 1."""
        super().__init__()
        self.weight = tf.Variable([[1.0]])


@pytest.mark.parametrize(
    ("model", "asked", "mode"),
    [(Module, "auto", "update"), (Module, False, False), (linear_model, "auto", False)],
)
def test_a_module_computes_as_in_the_run(tmp_path, model, asked, mode):
    """The compile mode of the newest checkpoint is used for a `tf.Module` with "auto"."""
    trainer = Linear(model_dir=tmp_path, jit_compile=asked)
    trainer.build_model = model
    for step, saved in ((1, False), (2, "update")):
        (tmp_path / f"ckpt-{step}").mkdir()
        (tmp_path / f"ckpt-{step}" / folder.MANIFEST).write_text(json.dumps({"jit_compile": saved}))
    adopt_compile_mode(trainer, tmp_path)

    assert trainer.jit_compile == mode


class Note(Callback):
    """Notes its calls."""

    def __init__(self):
        """Has noted nothing."""
        self.calls = []

    def on_evaluate_begin(self, step):
        """Notes the step."""
        self.calls.append(step)

    def on_evaluate_end(self, step, results):
        """Notes the step and the results."""
        self.calls.append((step, results))


@pytest.mark.thorough
def test_callbacks_hear_of_evaluations(tmp_path):
    """They get the calls of a run's own evaluations, except those that act on training."""
    settings = {"model_dir": tmp_path, "checkpoints": Checkpoints(interval=1)}
    Linear(**settings, verbose=False).train(slopes(1.0), steps=2, global_batch=1)
    note, stopping = Note(), EarlyStopping(mode="max")
    trainer = Linear(**settings, callbacks=[note, stopping], verbose=False)
    results = trainer.evaluate_continuously(slopes(1.0), global_batch=1)

    assert list(results) == [1, 2]
    assert note.calls == [1, (1, results[1]), 2, (2, results[2])]
    assert stopping.best is None
