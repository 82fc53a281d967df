"""L12: what a checkpoint holds, when one is written, and when it is removed."""

import json
import shutil
import threading
import time
from unittest import mock

import access
import everything
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, copies, linear_model, slopes

import scaling
from trainer import Checkpoints, Trainer
from trainer.base.atomic_files import begin_folder
from trainer.checkpoint import CheckpointError, folder, saver

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(1, 3)]

BATCHES = [everything.batch(seed=seed) for seed in range(4)]


def own_variable(value, *, per_replica=False):
    """A variable of the user's, of which every replica may have a different copy if asked for."""
    if not per_replica:
        return tf.Variable(value, trainable=False)
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


class Everything(Trainer):
    """A model in which everything changes, in a trainer that holds variables of its own."""

    def __init__(self, optimizer_name="adamw", **arguments):
        """Makes the trainer's own variables in the strategy's scope."""
        arguments = {"loss_scale": scaling.DynamicLossScale(2.0**4, growth_interval=2)} | arguments
        super().__init__(seed=1, verbose=False, **arguments)
        self.optimizer_name = optimizer_name
        with self.strategy.scope():
            self.generator = tf.random.Generator.from_seed(1)
            self.layer = keras.layers.Dense(2, kernel_initializer="ones")
            self.layer.build([None, 3])
            self.plain = own_variable(1.5)
            self.per_replica = own_variable(0.0, per_replica=True)
            self.many = {
                "b": [own_variable(2), own_variable("words")],
                "a": (keras.Variable([1.0, 2.0]),),
            }
            self.item = own_variable([0.25, 0.5])

    def build_model(self):
        """The model and optimizers of `everything`."""
        return everything.build_model()

    def build_optimizer(self):
        """The model and optimizers of `everything`."""
        return everything.build_optimizer(self.optimizer_name)

    def compute_loss(self, batch, training):
        """Also draws a random number and adds it to a variable."""
        del training
        self.per_replica.assign_add(self.generator.uniform([]))
        return everything.losses(self.model, batch), batch["x"][:, 0]

    def build_metrics(self):
        """Two metrics that every replica accumulates separately."""
        return {"mean": keras.metrics.Mean(), "sum": keras.metrics.Sum()}

    def update_metrics(self, batch, aux):
        """Called on applied steps only."""
        for metric in self.metrics.values():
            metric.update_state(aux)

    def checkpoint_items(self):
        """One more variable, saved under a name of its own."""
        return {"mine": self.item}

    def change_own(self):
        """Changes all of the trainer's own variables."""
        for weight in self.layer.weights:
            weight.assign(tf.random.normal(weight.shape))
        self.plain.assign(0.1)
        self.item.assign([0.3, 0.7])
        self.many["b"][0].assign(-7)
        self.many["b"][1].assign("other words")
        self.many["a"][0].assign([0.1, 0.2])

    def whole_state(self):
        """Every copy of every variable, by its position and the last word of its name."""
        state = access.state(self)
        groups = {
            "model": [*self.model.variables, self.model.layers[2].raw],
            "optimizer": self.optimizer.variables,
            "scale": state.loss_scaler.variables,
            "counts": [state.outcomes, state.consecutive_skips, state.retries, state.random_seed],
            "metrics": [variable for one in self.metrics.values() for variable in one.variables],
            "own": [
                self.plain,
                self.per_replica,
                self.generator.state,
                *self.layer.weights,
                self.item,
            ],
            "many": [*self.many["b"], *self.many["a"]],
        }
        return {
            f"{group} {place} {variable.name.split('/')[-1].split('_')[0]}": copies(variable)
            for group, variables in groups.items()
            for place, variable in enumerate(variables)
        }


def pipeline(batches=BATCHES):
    """A dataset of the batches."""
    stacked = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return untuned(tf.data.Dataset.from_tensor_slices(stacked).batch(everything.EXAMPLES))


def first(data):
    """The first batch, from which a trainer is built."""
    return next(iter(data))


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", everything.OPTIMIZERS)
def test_every_copy_of_every_variable_comes_back(tmp_path, mirrored, replicas, name, full):
    """L12: everything is restored bit for bit on every replica, even where replicas differ: weights,
    layers' statistics, slots, averages, counts, scale, metrics, and the variables, layers and
    generators that a trainer holds at any depth.
    """
    if not full and (replicas == 1) != (name == "momentum"):
        pytest.skip("the other pairs cover all kinds of variables; --full runs every pair")
    strategy = mirrored(replicas) if replicas > 1 else "default"

    def make():
        return Everything(name, model_dir=tmp_path, strategy=strategy, log_interval=100)

    before = make()
    before.change_own()
    bad = everything.batch("loss", replicas - 1, replicas)
    before.train(pipeline([*BATCHES, bad]), steps=5)
    # At the end of a run the metrics are reset and the statistics averaged. Give the copies
    # different values, which neither their sum nor their mean could restore.
    metrics = [variable for metric in before.metrics.values() for variable in metric.variables]
    make_differ([*metrics, before.per_replica, before.model.layers[2].raw])
    access.checkpoints(before).save(5, access.checkpoints(before).facts, None)
    saved = before.whole_state()

    after = make()
    access.start(after, first(pipeline()))
    restored = after.whole_state()

    assert before.totals.skipped_by_cause == {"forward": 1}
    assert saved.keys() == restored.keys()
    assert len(saved) > 35
    for place, expected in saved.items():
        assert len(expected) == replicas
        for copy, (ours, theirs) in enumerate(zip(expected, restored[place], strict=True)):
            assert bits(ours) == bits(theirs), f"{place} differs on replica {copy}"
    if replicas > 1:
        differing = [place for place, each in saved.items() if len({bits(one) for one in each}) > 1]
        kinds = {" ".join((place.split()[0], place.split()[-1])) for place in differing}
        assert kinds >= {"model raw:0", "own Variable:0", "metrics total", "metrics count"}


def bits(value):
    """The bytes of an array or of text."""
    return np.asarray(value).tobytes()


def make_differ(variables):
    """Gives each replica's copy of some variables a different value."""
    for variable in variables:
        inner = variable.value if isinstance(variable, keras.Variable) else variable
        copies_here = getattr(inner, "values", [inner])
        for copy, value in zip(copies_here, [0.1, 0.2, 0.7], strict=False):
            copy.assign(value)


def test_checkpoint_items_need_other_names(tmp_path):
    """The names that a checkpoint uses itself are refused before anything is written."""

    class Colliding(Linear):
        def checkpoint_items(self):
            return {"fine": tf.Variable(1.0), "model": tf.Variable(2.0)}

    trainer = Colliding(model_dir=tmp_path, verbose=False)
    with pytest.raises(ValueError, match="`checkpoint_items`"):
        trainer.train(slopes(1.0), steps=1, global_batch=1)
    assert list(tmp_path.glob("ckpt-*")) == []


class Counted(Linear):
    """`Linear` with the metrics it is given."""

    def __init__(self, names, **arguments):
        """Takes the names of the metrics."""
        super().__init__(verbose=False, checkpoints=Checkpoints(interval=2), **arguments)
        self.names = names

    def build_metrics(self):
        """A sum for each name."""
        return {name: keras.metrics.Sum() for name in self.names}

    def update_metrics(self, batch, aux):
        """Adds up the slopes."""
        for metric in self.metrics.values():
            metric.update_state(batch["slope"])


def warnings_in(caplog):
    """The warnings that absl has logged."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.thorough
def test_other_metrics_start_over(tmp_path, caplog):
    """A resumed run may have other metrics: they start over with a warning, and the weights continue."""
    Counted(["a"], model_dir=tmp_path).train(slopes(1.0), steps=3, global_batch=1)
    shutil.rmtree(tmp_path / "ckpt-3")  # at the end of the run the log has reset the metrics
    same, other = [Counted(names, model_dir=tmp_path) for names in (["a"], ["b", "a"])]
    one = tf.nest.map_structure(tf.constant, slopes(1.0))
    with caplog.at_level("WARNING"):
        access.start(same, one)
    assert warnings_in(caplog) == []
    with caplog.at_level("WARNING"):
        access.start(other, one)

    assert same.weight == other.weight == -1.0
    assert float(same.metrics["a"].result()) == 2.0
    assert [float(metric.result()) for metric in other.metrics.values()] == [0.0, 0.0]
    assert len(warnings_in(caplog)) == 1


# When checkpoints are written, and how many are kept.


def steps_saved(model_dir):
    """The steps of the checkpoints in a directory."""
    return list(folder.committed(model_dir, "ckpt"))


def test_checkpoints_come_at_their_interval(tmp_path):
    """One every `interval` steps, for any `steps_per_loop`, and one at the end."""
    checkpoints = Checkpoints(interval=3, max_to_keep=3)
    trainer = Linear(model_dir=tmp_path, steps_per_loop=2, checkpoints=checkpoints, verbose=False)
    seen = []
    trainer.on_loop_end = lambda step: seen.append((step, steps_saved(tmp_path)))
    trainer.train(slopes(1.0), steps=11, global_batch=1)

    # The hook runs before the checkpoint of the same step is written.
    assert seen == [
        (2, []),
        (3, []),
        (5, [3]),
        (6, [3]),
        (8, [3, 6]),
        (9, [3, 6]),
        (11, [3, 6, 9]),
    ]
    assert steps_saved(tmp_path) == [6, 9, 11]


@pytest.mark.thorough
def test_a_checkpoint_of_another_run_at_the_same_step_is_read(tmp_path):
    """A trainer that evaluates notices that the folder holds another run now, whose newest checkpoint is
    of the same step.
    """

    def trainer():
        return Linear(model_dir=tmp_path, seed=None, verbose=False)

    def evaluated(one):
        return one.evaluate(slopes(1.0), global_batch=1)["loss"], one.weight

    trainer().train(slopes(1.0), steps=4, global_batch=1)
    reader = trainer()
    assert evaluated(reader) == (-3.0, -3.0)
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    trainer().train(slopes(2.0), steps=4, global_batch=1)

    assert evaluated(reader) == (-7.0, -7.0)


@pytest.mark.thorough
@pytest.mark.parametrize("online", [False, True])
def test_a_trainer_does_not_go_on_behind_the_back_of_another(tmp_path, online):
    """A cell of a notebook that is run again, with the trainer from before."""

    def made():
        return Linear(model_dir=tmp_path, verbose=False, checkpoints=Checkpoints(max_to_keep=2))

    data = slopes(*range(4))
    first, second = made(), made()
    first.train(data, steps=2, global_batch=2)
    second.train(data, steps=4, global_batch=2)
    before = sorted(path.name for path in tmp_path.iterdir()), first.totals
    again = first.train_on_batch if online else lambda data: first.train(data, 6, global_batch=2)
    with pytest.raises(RuntimeError, match="`model_dir`"):
        again(data)
    assert (sorted(path.name for path in tmp_path.iterdir()), first.totals) == before
    assert second.train(data, steps=6, global_batch=2).steps_run == 2
    last = made()
    assert list(last.evaluate_continuously(data, global_batch=2, timeout_secs=0.01)) == [4, 6]
    last.on_loop_begin = mock.Mock(side_effect=[OSError("a fault"), None, None])
    with pytest.raises(OSError, match="a fault"):
        last.train(data, steps=8, global_batch=2)
    assert last.train(data, steps=8, global_batch=2).steps_run == 2


@pytest.mark.thorough
def test_damaged_checkpoints_do_not_displace_good_ones(tmp_path, caplog):
    """A damaged newest checkpoint is skipped with an error, stays until its step is saved again, and
    does not count towards `max_to_keep`.
    """

    def run(steps):
        trainer = Linear(model_dir=tmp_path, checkpoints=Checkpoints(max_to_keep=1), verbose=False)
        return trainer.train(slopes(1.0), steps=steps, global_batch=1), trainer

    run(2)
    kept = tmp_path / "aside"
    (tmp_path / "ckpt-2").rename(kept)
    run(6)
    kept.rename(tmp_path / "ckpt-2")
    broken = tmp_path / "ckpt-6" / "variables.data-00000-of-00001"
    broken.write_bytes(broken.read_bytes()[:-1] + b"!")
    with caplog.at_level("ERROR"):
        summary, trainer = run(4)

    assert (summary.step, summary.steps_run, trainer.weight) == (4, 2, -3.0)
    [record] = caplog.records
    assert str(broken) in record.getMessage()
    assert steps_saved(tmp_path) == [4, 6]
    assert run(6)[0].steps_run == 2
    assert steps_saved(tmp_path) == [6]
    assert folder.read_manifest(tmp_path / "ckpt-6")["step"] == 6


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(tmp_path):
    """Starting over would overwrite files that may still be recoverable."""
    trainer = Linear(model_dir=tmp_path, checkpoints=Checkpoints(interval=1), verbose=False)
    trainer.train(slopes(1.0), steps=2, global_batch=1)
    for step in (1, 2):
        (tmp_path / f"ckpt-{step}" / "scale.index").unlink()
    with pytest.raises(ValueError, match=r"`model_dir`.*scale.index"):
        Linear(model_dir=tmp_path, verbose=False).train(slopes(1.0), steps=3, global_batch=1)
    assert steps_saved(tmp_path) == [1, 2]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path, monkeypatch, caplog
):
    """A reader that has the old manifest and the new files does not fall back to an earlier one."""
    paths = {step: tmp_path / f"ckpt-{step}" for step in (1, 2)}
    for step, path in paths.items():
        (begin_folder(path) / "data").write_text("old")
        folder.commit(path, {"step": step, "saved": "once"})
    checksum, replaced = folder.checksum, []

    def replace_first(file):
        if not replaced:
            replaced.append(file)
            (begin_folder(paths[2]) / "data").write_text("new")
            folder.commit(paths[2], {"step": 2, "saved": "twice"})
        return checksum(file)

    monkeypatch.setattr(folder, "checksum", replace_first)
    path, facts = saver.newest_intact(folder.committed(tmp_path, "ckpt"), "model_dir")

    assert (path, facts["saved"], replaced) == (paths[2], "twice", [paths[2] / "data"])
    assert "damaged" not in caplog.text


def sgd():
    """The optimizer of `Linear`."""
    return keras.optimizers.SGD(1.0)


def with_bias():
    """A model with one variable more."""
    return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])


def whole_numbers():
    """A model whose first variable has another dtype."""
    layer = keras.layers.Layer()
    layer.add_weight(shape=(1, 1), dtype="int32", trainable=False, name="count")
    return keras.Sequential([keras.Input([1]), layer, linear_model().layers[-1]])


def momentum():
    """An optimizer with slots."""
    return keras.optimizers.SGD(1.0, momentum=0.5)


class Pair(keras.Model):
    """A model with a part that has an optimizer of its own."""

    def __init__(self):
        """Makes the part."""
        super().__init__()
        self.one = linear_model()

    def call(self, x):
        """Calls the part."""
        return self.one(x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "model", "optimizer", "found"),
    [
        (sgd, lambda: linear_model(units=2), sgd, r"float32 \(1, 2\) as model\[0\]"),
        (sgd, with_bias, sgd, r"float32 \(1,\) as model\[1\]; got None"),
        (sgd, whole_numbers, sgd, r"int32 .* as model\[0\]"),
        (sgd, linear_model, momentum, r"momentum: .* as optimizer\[2\]; got None"),
        (momentum, linear_model, sgd, r"None as optimizer\[2\]; got momentum"),
        (momentum, linear_model, lambda: keras.optimizers.RMSprop(1.0), r"velocity.*momentum"),
        (sgd, Pair, lambda: {"one": sgd()}, r"as optimizer_one\[0\]; got None"),
    ],
)
def test_another_model_or_optimizer_is_refused(tmp_path, before, model, optimizer, found):
    """L12: other shapes or dtypes, more variables or fewer, or as many of another role."""

    def train(model, optimizer):
        trainer = Linear(model_dir=tmp_path, verbose=False)
        trainer.model, trainer.optimizer = model(), optimizer()
        trainer.train(slopes(1.0), steps=2, global_batch=1)

    train(linear_model, before)
    with pytest.raises(ValueError, match=f"`model_dir`.*{found}"):
        train(model, optimizer)


# Writing in a thread.


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_checkpoint_written_in_a_thread_has_the_same_bits(
    tmp_path, mirrored, monkeypatch, replicas
):
    """It holds the values from when it was requested, although training has continued since."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    states, gone_on, seen = {}, threading.Event(), []

    def run(name, *, background):
        trainer = Everything(
            "momentum",
            model_dir=tmp_path / name,
            strategy=strategy,
            steps_per_loop=2,
            checkpoints=Checkpoints(interval=2, background=background),
        )
        trainer.on_loop_end = lambda step: gone_on.set() if step == 4 else None
        trainer.train(pipeline(), steps=4)
        states[name] = trainer.whole_state()
        return {
            step: tensors(path / "variables") | tensors(path / "copies") | tensors(path / "scale")
            for step, path in folder.committed(tmp_path / name, "ckpt").items()
        }

    def held(path):
        if path.name.startswith("ckpt-2"):
            assert gone_on.wait(60)
            seen.append(sorted(file.name for file in path.iterdir()))
        move_to_disk(path)

    plain = run("plain", background=False)
    gone_on.clear()
    move_to_disk = saver.move_to_disk
    monkeypatch.setattr(saver, "move_to_disk", held)
    in_thread = run("in_thread", background=True)

    assert seen == [[]]
    assert list(plain) == list(in_thread) == [2, 4]
    for step, expected in plain.items():
        assert expected.keys() == in_thread[step].keys()
        differing = [key for key in expected if expected[key] != in_thread[step][key]]
        assert differing == []
    assert plain[2] != plain[4]
    plain, in_thread = [
        [bits(one) for each in states[name].values() for one in each]
        for name in ("plain", "in_thread")
    ]
    assert plain == in_thread


def tensors(prefix):
    """The bits of every tensor in a TensorFlow checkpoint, by its key."""
    reader = tf.train.load_checkpoint(str(prefix))
    found = {}
    for key in reader.get_variable_to_shape_map():
        value = np.asarray(reader.get_tensor(key))
        if "CHECKPOINTABLE_OBJECT_GRAPH" not in key:
            found[f"{prefix.name}: {key}"] = (
                value.tobytes() if value.dtype != object else str(value)
            )
    return found


class Failing(Linear):
    """`Linear` with a full disk when one of its checkpoints is committed."""

    def __init__(self, step, monkeypatch, **arguments):
        """Takes the step of that checkpoint."""
        super().__init__(verbose=False, **arguments)
        commit = folder.commit

        def failing(path, facts):
            if facts["step"] == step:
                raise OSError(28, "No space left on device")
            return commit(path, facts)

        monkeypatch.setattr(folder, "commit", failing)


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_in_saving_ends_the_run_and_not_its_checkpoints(
    tmp_path, monkeypatch, asynchronous
):
    """The error comes at once, or from a thread at the next save or the end of `train`. It names the
    last good checkpoint, from which the run then resumes.
    """
    trainer = Failing(
        4,
        monkeypatch,
        model_dir=tmp_path,
        checkpoints=Checkpoints(interval=2, background=asynchronous),
        steps_per_loop=2,
    )
    with pytest.raises(CheckpointError, match=r"ckpt-4.*No space.*ckpt-2") as error:
        trainer.train(slopes(1.0), steps=10, global_batch=1)
    stood_at = trainer.totals.attempted

    assert isinstance(error.value.__cause__, OSError)
    assert stood_at == (6 if asynchronous else 4)
    assert access.checkpoints(trainer).latest == tmp_path / "ckpt-2"
    assert [each.name for each in tmp_path.glob("ckpt*")] == ["ckpt-2"]
    monkeypatch.undo()
    again = Linear(model_dir=tmp_path, verbose=False)
    assert again.train(slopes(1.0), steps=4, global_batch=1).steps_run == 2
    assert again.weight == -3.0


def test_an_error_of_the_last_save_is_raised_by_train(tmp_path, monkeypatch):
    """`train` waits for the thread that writes the last checkpoint."""
    trainer = Failing(3, monkeypatch, model_dir=tmp_path, checkpoints=Checkpoints(background=True))
    with pytest.raises(CheckpointError, match="ckpt-3"):
        trainer.train(slopes(1.0), steps=3, global_batch=1)

    assert list(tmp_path.glob("ckpt*")) == []


# What the files contain.


def test_a_manifest_describes_the_run(tmp_path):
    """`run.json` holds the settings of the run, its progress, and the files of the checkpoint."""
    trainer = Linear(model_dir=tmp_path, seed=5, loss_scale=8.0, verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=3, global_batch=2)
    path = tmp_path / "ckpt-3"
    facts = json.loads((path / "run.json").read_text())
    sizes = {name: file["bytes"] for name, file in facts.pop("files").items()}
    variables = facts.pop("variables")

    assert (facts["step"], facts["scale"], facts["batches_taken"]) == (3, 8.0, 3)
    assert (facts["slots"], facts["trained"]) == ({"optimizer": [[0, 0]]}, [0])
    assert {"seed": "5", "num_replicas": "1"}.items() <= facts["fingerprint"].items()
    assert {whose: [line.split("/")[-1] for line in each] for whose, each in variables.items()} == {
        "model": ["kernel: float32 (1, 1)"],
        "optimizer": ["iteration: int64 ()", "learning_rate: float32 ()"],
    }
    assert sizes == {
        file.name: file.stat().st_size for file in path.iterdir() if file.name != "run.json"
    }
    assert {name.split(".")[0] for name in sizes} == {
        "variables",
        "copies",
        "scale",
        "data",
        "counts",
    }


class Raising(Linear):
    """Raises before its second step."""

    def on_loop_begin(self, step):
        """Raises ZeroDivisionError after step 1."""
        1 / (1 - step)


@pytest.mark.thorough
@pytest.mark.parametrize("online", [False, True])
def test_an_error_waits_for_the_checkpoint_that_is_written(tmp_path, monkeypatch, online):
    """When it is raised, another run may write to the folder, so the thread must have ended."""
    commit = folder.commit

    def slow(*arguments):
        time.sleep(0.5)
        return commit(*arguments)

    monkeypatch.setattr(folder, "commit", slow)
    settings = {"checkpoints": Checkpoints(interval=1, background=True), "steps_per_loop": 1}
    trainer = Raising(model_dir=tmp_path, verbose=False, **settings)

    def take_two_steps():
        if online:
            trainer.train_on_batch(slopes(1.0))
            trainer.train_on_batch(slopes(1.0))
        else:
            trainer.train(slopes(1.0), 2, global_batch=1)

    with pytest.raises(ZeroDivisionError):
        take_two_steps()

    assert list(folder.committed(tmp_path, "ckpt")) == [1]
