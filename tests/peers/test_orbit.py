"""The cases of Orbit's tests: controller, standard runner, actions, utilities and its example."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Action, Checkpoints, Trainer

pytestmark = pytest.mark.thorough

# Ten examples of three zeros; all targets are 1.
INPUTS, TARGETS = np.zeros([10, 3], np.float32), np.ones([10, 4], np.float32)


def dataset():
    """Batches of ten, as often as asked for."""
    return tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(10)


class Runner(Trainer):
    """A dense layer with the mean squared error and RMSprop, as Orbit's TestRunner."""

    def build_model(self):
        """Three inputs, four outputs."""
        return keras.Sequential([keras.Input([3]), keras.layers.Dense(4, name="dense")])

    def build_optimizer(self):
        """RMSprop with a rate of 0.1."""
        return keras.optimizers.RMSprop(0.1)

    def compute_loss(self, batch, training):
        """The mean squared error of each example."""
        x, y = batch
        return tf.reduce_mean((self.model(x, training=training) - y) ** 2, axis=1)


def runner(**arguments):
    """A runner that takes two steps per loop."""
    settings = {"steps_per_loop": 2, "verbose": False, "jit_compile": False}
    return Runner(**settings | arguments)


def lines(model_dir, split=None):
    """The lines of a run's metrics file, of one split if it is given."""
    found = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if split in (None, line.get("split"))]


def names_in(model_dir):
    """The names of everything in a folder."""
    return {path.name for path in pathlib.Path(model_dir).glob("**/*")}


def test_without_model_dir(tmp_path, monkeypatch):
    """Without a folder a run trains and evaluates to step 10 and writes nothing
    (test_no_checkpoint, test_no_checkpoint_and_summaries).
    """
    monkeypatch.chdir(tmp_path)
    summary = runner().train(dataset(), steps=10, eval_data=dataset(), eval_interval=6)

    assert summary.step == 10
    assert not names_in(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of ten steps that saves and evaluates at step 5 and 10, with loops of ten."""
    folder = tmp_path_factory.mktemp("run")
    trainer = runner(model_dir=folder, checkpoints=Checkpoints(interval=5), steps_per_loop=10)
    data = dataset().repeat(100)
    return trainer, trainer.train(data, steps=10, eval_data=dataset(), eval_interval=5)


def test_train_and_evaluate(run):
    """Checkpoints, training losses and evaluation losses are written (test_train_and_evaluate,
    test_train_and_evaluate_with_same_summary_dir, test_has_checkpoint_...).
    """
    trainer, summary = run
    train = [line for line in lines(trainer.model_dir, "train") if "loss" in line]
    evaluated = [line for line in lines(trainer.model_dir, "validation") if "loss" in line]

    assert summary.step == 10
    assert train
    assert evaluated
    assert any(name.startswith("ckpt-") for name in names_in(trainer.model_dir))
    assert any("tfevents" in name for name in names_in(trainer.model_dir))


def test_eval_and_checkpoint_interval(run):
    """Loops of ten end early: two checkpoints and two evaluations, at 5 and 10
    (test_eval_and_checkpoint_interval).
    """
    trainer, _ = run
    folders = sorted(name for name in names_in(trainer.model_dir) if name.startswith("ckpt-"))

    assert {name.split(".")[0] for name in folders} == {"ckpt-5", "ckpt-10"}
    assert [line["step"] for line in lines(trainer.model_dir, "validation")] == [5, 10]


def test_train_only(tmp_path):
    """Without evaluation data no evaluation is written (test_train_only)."""
    runner(model_dir=tmp_path).train(dataset(), steps=4)

    assert lines(tmp_path, "train")
    assert not lines(tmp_path, "validation")


def test_restore_and_already_trained(run):
    """A new trainer restores the last checkpoint. At its target it takes no more steps, and behind it
    it goes on (test_restore_from_most_recent_checkpoint, test_already_trained_model).
    """
    trainer, _ = run
    restored = runner(model_dir=trainer.model_dir)
    summary = restored.train(dataset().repeat(100), steps=10)

    assert summary.step == 10
    for one, other in zip(trainer.model.variables, restored.model.variables, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_evaluate_only(run):
    """A trainer that only evaluates restores the run, returns the losses, and writes no training
    (test_evaluate_only, test_no_eval_steps, test_evaluate_with_loss_output).
    """
    trainer, _ = run
    before = lines(trainer.model_dir, "train")
    found = runner(model_dir=trainer.model_dir).evaluate(dataset())
    expected = float(np.mean((trainer.model(INPUTS).numpy() - TARGETS) ** 2))

    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert lines(trainer.model_dir, "train") == before


def test_evaluate_with_no_output():
    """Orbit's evaluator may return nothing. Here an evaluation always has its loss."""
    assert set(runner().evaluate(dataset())) == {"loss"}


@pytest.mark.thorough
def test_early_stop_on_eval_loss():
    """An action that evaluates and stops ends a run before its target (test_early_stop_on_eval_loss)."""

    def stop_when_learned(trainer):
        if trainer.evaluate(dataset())["loss"] < 0.1:
            trainer.stop()

    actions = [Action(stop_when_learned, every_steps=2)]
    summary = runner(callbacks=actions).train(dataset(), steps=40)

    assert summary.step < 40


class Summaries(Runner):
    """Writes a summary of its own after every inner loop."""

    def on_train_begin(self):
        """Opens a writer."""
        self.writer = tf.summary.create_file_writer(str(self.model_dir / "mine"))

    def on_loop_end(self, step):
        """Writes the step."""
        with self.writer.as_default(step=step):
            tf.summary.write("mine", step)
        self.writer.flush()


@pytest.mark.slow
def test_summaries_of_ones_own(tmp_path):
    """Orbit's train function may write summaries on the way, which takes a host call in the loop. Here
    a hook writes them between inner loops (test_summaries_inside_train_fn).
    """
    settings = {"steps_per_loop": 2, "verbose": False, "jit_compile": False}
    Summaries(model_dir=tmp_path, **settings).train(dataset(), steps=6)
    [events] = (tmp_path / "mine").glob("events*")
    found = [
        event.step
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
        if value.tag == "mine"
    ]

    assert found == [2, 4, 6]


@pytest.mark.parametrize(
    "steps_per_loop",
    [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.slow)],
)
def test_standard_trainer(steps_per_loop):
    """Ten steps are ten steps, however many are in a loop, and the step counts from 0
    (test_default_trainer, test_trainer_with_tpu_summary_optimization, test_create_global_step).
    """
    seen = []

    class Counting(Runner):
        def on_loop_end(self, step):
            seen.append(step)

    summary = Counting(steps_per_loop=steps_per_loop, verbose=False, jit_compile=False).train(
        dataset(), steps=10
    )

    assert summary.totals.attempted == 10
    assert seen == [*range(steps_per_loop, 10, steps_per_loop), 10]


class Sum(Trainer):
    """The loss of an example is the example."""

    def build_model(self):
        """One weight that nothing reads in an evaluation."""
        model = tf.Module()
        model.weight = tf.Variable(0.0)
        return model

    def build_optimizer(self):
        """Any."""
        return keras.optimizers.SGD()

    def compute_loss(self, batch, training):
        """The batch itself."""
        return tf.cast(batch, tf.float32) + self.model.weight


def test_standard_evaluator():
    """The mean over 0 to 9 is 4.5 and over the first five is 2. Orbit may go on where the last
    evaluation ended; here every evaluation begins anew (test_default_evaluator,
    test_evaluator_with_outputs_aggregation, test_evaluator_with_repeat_dataset).
    """
    trainer, data = Sum(verbose=False, jit_compile=False), tf.data.Dataset.range(10).batch(1)

    assert trainer.evaluate(data)["loss"] == 4.5
    assert [trainer.evaluate(data.take(5))["loss"] for _ in range(2)] == [2.0, 2.0]


@pytest.mark.slow
def test_single_task():
    """A small classifier halves its loss in 500 steps; loops of 100 (test_single_task_training). The
    flowers are ours: three Gaussian clouds.
    """
    random = np.random.default_rng(0)
    labels = np.arange(150) % 3
    features = (random.standard_normal([150, 4]) + 2.0 * np.eye(4)[labels]).astype(np.float32)
    layers = [keras.layers.Dense(units, activation="relu") for units in (10, 10)]
    trainer = Trainer(
        model=lambda: keras.Sequential(
            [keras.Input([4]), *layers, keras.layers.Dense(3, "softmax")]
        ),
        loss_fn="sparse_categorical_crossentropy",
        optimizer=lambda: keras.optimizers.SGD(0.01),
        steps_per_loop=100,
        verbose=False,
        jit_compile=False,
        seed=0,
    )
    data = tf.data.Dataset.from_tensor_slices((features, labels[:, None])).batch(32).repeat()
    whole = features, labels[:, None]
    trainer.train(data, steps=1)
    start = trainer.evaluate(whole, global_batch=150)["loss"]
    trainer.train(data, steps=500)

    assert trainer.evaluate(whole, global_batch=150)["loss"] < start / 2
