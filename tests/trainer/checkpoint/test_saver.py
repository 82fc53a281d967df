"""L12: what a checkpoint holds, when one is written, and what becomes of it."""

import json
import shutil
import threading
import time

import everything
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, copies, linear_model, slopes

import scaling
from trainer import Trainer
from trainer.base.atomic_files import begin_folder
from trainer.checkpoint import CheckpointError, folder, saver
from trainer.checkpoint.contents import comparable_part, describe, first_difference
from trainer.data.batches import untuned
from trainer.log.writers import RunWriters

BATCHES = [everything.batch(seed=seed) for seed in range(4)]


def own(value, *, apart=False):
    """A variable of the user's; apart, every replica may write its own copy."""
    if not apart:
        return tf.Variable(value, trainable=False)
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


class Everything(Trainer):
    """The model in which everything moves, and whatever a subclass may hold beside it."""

    def __init__(self, optimizer_name="adamw", **arguments):
        """Makes the user's own in the strategy's scope."""
        arguments = {"loss_scale": scaling.DynamicLossScale(2.0**4, growth_interval=2)} | arguments
        super().__init__(seed=1, verbose=False, **arguments)
        self.optimizer_name = optimizer_name
        with self.strategy.scope():
            self.generator = tf.random.Generator.from_seed(1)
            self.layer = keras.layers.Dense(2, kernel_initializer="ones")
            self.layer.build([None, 3])
            self.plain = own(1.5)
            self.apart = own(0.0, apart=True)
            self.many = {"b": [own(2), own("words")], "a": (keras.Variable([1.0, 2.0]),)}
            self.item = own([0.25, 0.5])

    def build_model(self):
        """See `everything`."""
        return everything.build_model()

    def build_optimizer(self):
        """See `everything`."""
        return everything.build_optimizer(self.optimizer_name)

    def compute_loss(self, batch, training):
        """Draws a number and counts, beside the model's own writes."""
        del training
        self.apart.assign_add(self.generator.uniform([]))
        return everything.losses(self.model, batch), batch["x"][:, 0]

    def build_metrics(self):
        """Two that replicas sum up each for itself."""
        return {"mean": keras.metrics.Mean(), "sum": keras.metrics.Sum()}

    def update_metrics(self, batch, aux):
        """On applied steps only."""
        for metric in self.metrics.values():
            metric.update_state(aux)

    def checkpoint_items(self):
        """One more, which is no attribute that is looked at."""
        return {"mine": self.item}

    def change_own(self):
        """Gives everything of the user's another value than it began with."""
        for weight in self.layer.weights:
            weight.assign(tf.random.normal(weight.shape))
        self.plain.assign(0.1)
        self.item.assign([0.3, 0.7])
        self.many["b"][0].assign(-7)
        self.many["b"][1].assign("other words")
        self.many["a"][0].assign([0.1, 0.2])

    def whole_state(self):
        """Every copy of every variable there is, by place and the last word of its name."""
        state = self._parts.state
        groups = {
            "model": [*self.model.variables, self.model.layers[2].raw],
            "optimizer": self.optimizer.variables,
            "scale": state.loss_scaler.variables,
            "counts": [state.outcomes, state.consecutive_skips, state.retries, state.random_seed],
            "metrics": [variable for one in self.metrics.values() for variable in one.variables],
            "own": [self.plain, self.apart, self.generator.state, *self.layer.weights, self.item],
            "many": [*self.many["b"], *self.many["a"]],
        }
        return {
            f"{group} {place} {variable.name.split('/')[-1].split('_')[0]}": copies(variable)
            for group, variables in groups.items()
            for place, variable in enumerate(variables)
        }


def pipeline(batches=BATCHES):
    """The batches in turn."""
    stacked = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return untuned(tf.data.Dataset.from_tensor_slices(stacked).batch(everything.EXAMPLES))


def first(data):
    """The first batch, to build a trainer with."""
    return next(iter(data))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", everything.OPTIMIZERS)
def test_every_copy_of_every_variable_comes_back(tmp_path, mirrored, replicas, name, full):
    """L12: weights, what layers and TensorFlow's own variables keep, slots, averages, counts, scale,
    metrics, and the variables, layers and generators that a trainer holds, however deep: bit for
    bit, on every replica, where replicas differ too.
    """
    if not full and (replicas == 1) != (name == "momentum"):
        pytest.skip("the others hold all kinds of variables; every pair with --full")
    strategy = mirrored(replicas) if replicas > 1 else "default"

    def make():
        return Everything(name, model_dir=tmp_path, strategy=strategy, log_interval=100)

    before = make()
    before.change_own()
    bad = everything.batch("loss", replicas - 1, replicas)
    before.train(pipeline([*BATCHES, bad]), steps=5)
    # The log has read the metrics and begun them anew, and the step has taken means; elsewhere
    # copies differ, and from neither their sum nor their mean could they be had back.
    metrics = [variable for metric in before.metrics.values() for variable in metric.variables]
    make_differ([*metrics, before.apart, before.model.layers[2].raw])
    before._parts.checkpoints.save(5, before._parts.checkpoints.facts, None)
    saved = before.whole_state()

    after = make()
    after._start(first(pipeline()))
    restored = after.whole_state()

    assert before.totals.skipped_by_cause == {"forward": 1}
    assert saved.keys() == restored.keys()
    assert len(saved) > 35
    for place, expected in saved.items():
        assert len(expected) == replicas
        for copy, (ours, theirs) in enumerate(zip(expected, restored[place], strict=True)):
            assert bits(ours) == bits(theirs), f"{place} differs on replica {copy}"
    if replicas > 1:
        apart = [place for place, each in saved.items() if len({bits(one) for one in each}) > 1]
        kinds = {" ".join((place.split()[0], place.split()[-1])) for place in apart}
        assert kinds >= {"model raw:0", "own Variable:0", "metrics total", "metrics count"}


def bits(value):
    """Of an array, or of text."""
    return np.asarray(value).tobytes()


def make_differ(variables):
    """Gives every replica's copy of some variables a value of its own."""
    for variable in variables:
        inner = variable.value if isinstance(variable, keras.Variable) else variable
        copies_here = getattr(inner, "values", [inner])
        for copy, value in zip(copies_here, [0.1, 0.2, 0.7], strict=False):
            copy.assign(value)


class WithModule(tf.Module):
    """A model without Keras that keeps a mean of its own on every replica."""

    def __init__(self):
        """A weight that learns, one that does not, and the mean."""
        super().__init__()
        self.weight = tf.Variable([[1.0]])
        self.fixed = tf.Variable(1.0, trainable=False)
        self.seen = own(0.0, apart=True)

    def __call__(self, x):
        """Counts what comes by."""
        self.seen.assign_add(tf.reduce_sum(x))
        return x @ self.weight * self.fixed


class OfModule(Linear):
    """Trains it, on inputs that differ from replica to replica."""

    def build_model(self):
        """See there."""
        return WithModule()

    def compute_loss(self, batch, training):
        """As `Linear`'s."""
        return self.model(batch["x"])[:, 0] * batch["slope"]


THIRDS = {"x": np.float32([[0.1], [0.2], [0.7]]), "slope": np.float32([1.0, 2.0, 4.0])}


def test_a_modules_own_copies_come_back(tmp_path, mirrored):
    """A mean over three replicas cannot give back its three addends: they are kept apart."""

    def make():
        return OfModule(model_dir=tmp_path, strategy=mirrored(3), verbose=False)

    before, after = make(), make()
    data = untuned(tf.data.Dataset.from_tensors(THIRDS))
    before.train(data, steps=2)
    make_differ([before.model.seen])
    before._parts.checkpoints.save(2, before._parts.checkpoints.facts, None)
    after._start(first(data))

    assert [float(copy) for copy in copies(before.model.seen)] == list(np.float32([0.1, 0.2, 0.7]))
    assert float(before.model.weight.numpy()[0, 0]) != 1.0
    for ours, theirs in zip(before.model.variables, after.model.variables, strict=True):
        assert [*map(bits, copies(ours))] == [*map(bits, copies(theirs))]


@pytest.mark.parametrize("name", ["model", "optimizer", "state", "trainer"])
def test_the_users_items_need_names_of_their_own(tmp_path, name):
    """A checkpoint's own names are refused, before anything is written."""

    class Colliding(Linear):
        def checkpoint_items(self):
            return {"fine": tf.Variable(1.0), name: tf.Variable(2.0)}

    trainer = Colliding(model_dir=tmp_path, verbose=False)
    with pytest.raises(ValueError, match="names of its own") as error:
        trainer.train(slopes(1.0), steps=1, global_batch=1)

    assert str(error.value) == (
        f"`checkpoint_items` must return names of its own; got {name!r}. A checkpoint has that "
        "already. Call it something else."
    )
    assert list(tmp_path.glob("ckpt-*")) == []


class Counted(Linear):
    """`Linear`, with whatever metrics it is given."""

    def __init__(self, names, **arguments):
        """Sums by these names."""
        super().__init__(verbose=False, checkpoint_interval=2, **arguments)
        self.names = names

    def build_metrics(self):
        """See there."""
        return {name: keras.metrics.Sum() for name in self.names}

    def update_metrics(self, batch, aux):
        """The sum of the slopes."""
        for metric in self.metrics.values():
            metric.update_state(batch["slope"])


def warnings_in(caplog):
    """What absl has warned of."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_other_metrics_begin_anew(tmp_path, caplog):
    """A run may be given other metrics when it is taken up; the weights go on, with a warning."""
    Counted(["a"], model_dir=tmp_path).train(slopes(1.0), steps=3, global_batch=1)
    shutil.rmtree(tmp_path / "ckpt-3")  # where the log had read and emptied them
    same, other = [Counted(names, model_dir=tmp_path) for names in (["a"], ["b", "a"])]
    one = tf.nest.map_structure(tf.constant, slopes(1.0))
    with caplog.at_level("WARNING"):
        same._start(one)
    assert warnings_in(caplog) == []
    with caplog.at_level("WARNING"):
        other._start(one)

    assert same.weight == other.weight == -1.0
    assert float(same.metrics["a"].result()) == 2.0
    assert [float(metric.result()) for metric in other.metrics.values()] == [0.0, 0.0]
    [warning] = warnings_in(caplog)
    assert warning.startswith(
        f"Metrics are not restored from {tmp_path / 'ckpt-2'} because they have changed: variable 1 is "
    )
    assert warning.endswith("total: float32 () in this run and none in the checkpoint.")


def test_a_variable_without_a_value_is_an_error(tmp_path):
    """What the model or the trainer holds now and the checkpoint does not is named, not passed over."""

    class More(Linear):
        def __init__(self, **arguments):
            super().__init__(verbose=False, **arguments)
            self.more = tf.Variable(3.0, name="more")

    Linear(model_dir=tmp_path, verbose=False).train(slopes(1.0), steps=1, global_batch=1)
    with pytest.raises(ValueError, match="every variable") as error:
        More(model_dir=tmp_path).train(slopes(1.0), steps=2, global_batch=1)

    start, _, rest = str(error.value).partition(": ")
    tensorflows, _, end = rest.partition("]. ")
    assert start == f"`model_dir` must hold a value for every variable; got {tmp_path / 'ckpt-1'}"
    assert "<tf.Variable 'more:0' shape=() dtype=float32, numpy=3.0>" in tensorflows
    assert end == (
        "Values are found by the names of attributes, and these variables would keep their initial "
        "values. Give the model, the trainer and their layers the attributes that they had in that "
        "run, or use another model_dir."
    )


def test_variables_are_told_by_name_dtype_and_shape():
    """Of Keras or of TensorFlow, of any dtype, and of a shape that is not known."""
    described = describe(
        [
            linear_model(inputs=3).weights[0],
            tf.Variable([1j], name="complex"),
            tf.Variable("a", name="text"),
            tf.Variable([1.0], shape=tf.TensorShape(None), name="any"),
        ]
    )

    assert described[0].endswith("/kernel: float32 (3, 1)")
    assert described[1:] == [
        "complex:0: complex128 (1,)",
        "text:0: string ()",
        "any:0: float32 <unknown>",
    ]


def test_what_of_a_variables_name_is_comparable_part():
    """Of an optimizer's variable, what it is for; not how Keras has numbered it."""
    assert comparable_part("nadam/variable_12: float32 ()", roles=True) == "variable: float32 ()"
    assert comparable_part("momentum:0: float32 (2,)", roles=True) == "momentum: float32 (2,)"
    assert comparable_part("sgd/a_velocity: float32 (2,)", roles=False) == "float32 (2,)"
    ours, theirs = ["x/a_momentum: float32 ()"], ["y/b_velocity: float32 ()"]
    assert first_difference(ours, theirs) is None
    assert first_difference(ours, theirs, roles=True) == (
        "variable 0 is x/a_momentum: float32 () in this run and y/b_velocity: float32 () in the "
        "checkpoint"
    )


# When one is written, and how many stay.


def steps_saved(model_dir):
    """The steps of the checkpoints there are."""
    return list(folder.committed(model_dir, "ckpt"))


def test_checkpoints_come_at_their_interval(tmp_path):
    """Every so many steps, however long inner loops are, and at the end; the newest stay."""
    arguments = {"model_dir": tmp_path, "checkpoint_interval": 3, "verbose": False}
    trainer = Linear(steps_per_loop=2, max_to_keep=3, **arguments)
    seen = []
    trainer.on_loop_end = lambda step: seen.append((step, steps_saved(tmp_path)))
    trainer.train(slopes(1.0), steps=11, global_batch=1)

    # A hook comes before the checkpoint of the same step.
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


def test_without_an_interval_there_is_one_at_the_end(tmp_path):
    """And none at all without a `model_dir`."""
    Linear(model_dir=tmp_path, verbose=False).train(slopes(1.0), steps=30, global_batch=1)
    assert steps_saved(tmp_path) == [30]

    summary = Linear(verbose=False).train(slopes(1.0), steps=3, global_batch=1)
    assert summary.checkpoint is None


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch):
        """Takes the place of the monotonic one."""
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_checkpoints_come_after_some_seconds(tmp_path, monkeypatch):
    """At the end of the inner loop in which they have gone by since the last one of any cause."""
    clock = Clock(monkeypatch)
    trainer = Linear(
        model_dir=tmp_path,
        steps_per_loop=1,
        checkpoint_secs=10.0,
        checkpoint_interval=7,
        max_to_keep=20,
        verbose=False,
    )

    def on_loop_begin(step):
        del step
        clock.now += 4.0

    trainer.on_loop_begin = on_loop_begin
    trainer.train(slopes(1.0), steps=12, global_batch=1)

    # 4, 8, 12 seconds; 16, 20, 24; the seventh step's own; 32, 36, 40; 44 and the end.
    assert steps_saved(tmp_path) == [3, 6, 7, 10, 12]


def test_damaged_later_ones_do_not_cost_the_good_ones(tmp_path, caplog):
    """A damaged newest checkpoint is left out with an error, stays until it is written anew, and does
    not count among those that are kept.
    """

    def run(steps):
        trainer = Linear(model_dir=tmp_path, max_to_keep=1, verbose=False)
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
    assert [record.getMessage() for record in caplog.records] == [
        f"Skipping damaged checkpoint ckpt-6: {broken} has changed: its checksum does not match."
    ]
    assert steps_saved(tmp_path) == [4, 6]
    assert run(6)[0].steps_run == 2
    assert steps_saved(tmp_path) == [6]
    assert folder.read_manifest(tmp_path / "ckpt-6")["step"] == 6


def test_a_run_with_nothing_but_damaged_checkpoints_does_not_begin_anew(tmp_path):
    """It would write over what may be saved of them."""
    trainer = Linear(model_dir=tmp_path, checkpoint_interval=1, verbose=False)
    trainer.train(slopes(1.0), steps=2, global_batch=1)
    for step in (1, 2):
        (tmp_path / f"ckpt-{step}" / "scale.index").unlink()
    with pytest.raises(ValueError, match="damaged") as error:
        Linear(model_dir=tmp_path, verbose=False).train(slopes(1.0), steps=3, global_batch=1)

    assert str(error.value) == (
        "All checkpoints in `model_dir` are damaged (2 found): "
        f"{tmp_path / 'ckpt-2' / 'scale.index'} is missing; "
        f"{tmp_path / 'ckpt-1' / 'scale.index'} is missing. Starting a new run here would overwrite "
        "files that may still be recoverable. Repair the files, or use another model_dir."
    )
    assert steps_saved(tmp_path) == [1, 2]


def test_going_back_removes_what_came_after_and_nothing_if_there_is_nowhere_to_go(tmp_path):
    """Checkpoints from an offence on are removed when an earlier one has been taken up."""
    trainer = Linear(model_dir=tmp_path, checkpoint_interval=2, verbose=False)
    trainer.train(slopes(1.0), steps=6, global_batch=1)
    checkpoints = trainer._parts.checkpoints

    assert checkpoints.restore(before=2) is None
    assert steps_saved(tmp_path) == [2, 4, 6]
    assert trainer.weight == -5.0
    assert checkpoints.restore(before=4) == tmp_path / "ckpt-2"
    assert steps_saved(tmp_path) == [2]
    assert trainer.weight == -1.0


def test_what_a_killed_process_left_is_removed(tmp_path):
    """By the next one, as it starts."""
    run = {"steps": 2, "global_batch": 1}
    Linear(model_dir=tmp_path, verbose=False).train(slopes(1.0), **run)
    (begin_folder(tmp_path / "ckpt-3") / "variables.index").write_text("half")
    (tmp_path / "ckpt-2").rename(tmp_path / "ckpt-2.old")
    summary = Linear(model_dir=tmp_path, verbose=False).train(slopes(1.0), **run)

    assert (summary.steps_run, steps_saved(tmp_path)) == (0, [2])
    assert sorted(each.name for each in tmp_path.glob("ckpt*")) == ["ckpt-2"]


# Written in a thread.


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_checkpoint_written_in_a_thread_has_the_same_bits(
    tmp_path, mirrored, monkeypatch, replicas
):
    """Those of the moment it was asked for, though the run has gone on before any file was there."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    states, gone_on, seen = {}, threading.Event(), []

    def run(name, **arguments):
        trainer = Everything(
            "momentum",
            model_dir=tmp_path / name,
            strategy=strategy,
            steps_per_loop=2,
            checkpoint_interval=2,
            **arguments,
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

    plain = run("plain")
    gone_on.clear()
    move_to_disk = saver.move_to_disk
    monkeypatch.setattr(saver, "move_to_disk", held)
    in_thread = run("in_thread", async_checkpoint=True)

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
    """The bits of every tensor in a checkpoint of TensorFlow's, by its key."""
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
    """`Linear`, of which one checkpoint cannot be put in its place."""

    def __init__(self, step, monkeypatch, **arguments):
        """The step is that checkpoint's."""
        super().__init__(verbose=False, **arguments)
        commit = folder.commit

        def failing(path, facts):
            if facts["step"] == step:
                raise OSError(28, "No space left on device")
            return commit(path, facts)

        monkeypatch.setattr(folder, "commit", failing)


def failed(path, last):
    """The whole message."""
    saved = f"The last good checkpoint is {last}." if last else "There is no earlier one."
    return (
        f"Could not write checkpoint {path}: [Errno 28] No space left on device. {saved} Make sure that "
        "the disk has free space and that model_dir is writable, then run the same command again "
        f"{'to continue from it' if last else 'to start over'}."
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_in_saving_ends_the_run_and_not_its_checkpoints(
    tmp_path, monkeypatch, asynchronous
):
    """At once, or of a thread at the next save or the end of `train`; what was saved before stays, is
    named, and is gone on from.
    """
    trainer = Failing(
        4,
        monkeypatch,
        model_dir=tmp_path,
        checkpoint_interval=2,
        steps_per_loop=2,
        async_checkpoint=asynchronous,
    )
    with pytest.raises(CheckpointError) as error:
        trainer.train(slopes(1.0), steps=10, global_batch=1)
    stood_at = trainer.totals.attempted

    assert str(error.value) == failed(tmp_path / "ckpt-4", tmp_path / "ckpt-2")
    assert isinstance(error.value.__cause__, OSError)
    assert stood_at == (6 if asynchronous else 4)
    assert trainer._parts.checkpoints.latest == tmp_path / "ckpt-2"
    assert [each.name for each in tmp_path.glob("ckpt*")] == ["ckpt-2"]
    monkeypatch.undo()
    again = Linear(model_dir=tmp_path, verbose=False)
    assert again.train(slopes(1.0), steps=4, global_batch=1).steps_run == 2
    assert again.weight == -3.0


def test_an_error_of_the_last_save_is_raised_by_train(tmp_path, monkeypatch):
    """A thread's too: `train` waits for it."""
    trainer = Failing(3, monkeypatch, model_dir=tmp_path, async_checkpoint=True)
    with pytest.raises(CheckpointError) as error:
        trainer.train(slopes(1.0), steps=3, global_batch=1)

    assert str(error.value) == failed(tmp_path / "ckpt-3", None)
    assert list(tmp_path.glob("ckpt*")) == []


# What stands in the files.


def test_a_checkpoint_can_be_read_by_people(tmp_path):
    """`run.json` says of what run it is, where that stands, and what the files are."""
    trainer = Linear(model_dir=tmp_path, seed=5, loss_scale=8.0, verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=3, global_batch=2)
    path = tmp_path / "ckpt-3"
    facts = json.loads((path / "run.json").read_text())
    sizes = {name: file["bytes"] for name, file in facts.pop("files").items()}
    versions = facts.pop("versions")
    variables = facts.pop("variables")
    seal = facts.pop("sha256")

    assert facts == {
        "precision": "float32",
        "loss_scale": "FixedLossScale(loss_scale=8.0)",
        "seed": 5,
        "num_replicas": 1,
        "num_microbatches": 1,
        "strategy": "_DefaultDistributionStrategy",
        "jit_compile": False,
        "global_batch": 2,
        "data": "{'x': TensorSpec(shape=(None, 1), dtype=tf.float32, name=None), 'slope': "
        "TensorSpec(shape=(None,), dtype=tf.float32, name=None)}, 1 steps an epoch",
        "pipeline": "",
        "data_resume": "exact",
        "batches_taken": 3,
        "scale": 8.0,
        "actions": [],
        "divergence": None,
        "step": 3,
        "copies": [],
    }
    assert set(versions) == {"halfstep", "tensorflow", "keras", "numpy", "python"}
    assert {whose: [line.split("/")[-1] for line in each] for whose, each in variables.items()} == {
        "model": ["kernel: float32 (1, 1)"],
        "optimizer": ["iteration: int64 ()", "learning_rate: float32 ()"],
    }
    assert len(seal) == 64
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
    assert sum(sizes.values()) < 8000


def lines_of(path):
    """The lines of a log."""
    return path.read_text().splitlines(keepends=True)


def test_a_log_is_taken_back_with_the_run(tmp_path):
    """Lines of later steps go, torn ones go, those about recoveries stay; the rest is untouched."""
    files = RunWriters(tmp_path)
    path = tmp_path / "metrics.jsonl"
    files.rewind(3)
    assert not path.exists()
    RunWriters(None).rewind(3)

    stay = [
        '{"step": 1, "split": "train", "loss": 1.0}\n',
        '{"step": 3, "split":"validation",  "loss": null}\n',
        '{"step": 9, "split": "recovery", "what": "loss 9 above 1 at step 9"}\n',
        '{"step": 2, "split": "skip"}\n',
    ]
    go = ['{"step": 4, "split": "train"}\n', '{"step": 30, "split": "skip"}\n']
    # Of two processes that were killed while they wrote: the first tore a line, which the second
    # wrote on.
    torn = ['{"step": 2, "spl{"step": 2, "split": "train"}\n', '{"step": 1, "split": "train"']
    path.write_text("".join([stay[0], go[0], stay[1], torn[0], stay[2], go[1], stay[3], torn[1]]))
    files.rewind(3)
    assert lines_of(path) == stay
    table = tmp_path / "train.csv"
    table.write_text("step,loss\n1,1.0\n3,\n4,0.5\n5,0.")
    files.rewind(3)
    assert table.read_text() == "step,loss\n1,1.0\n3,\n"
    table.unlink()

    before = path.stat().st_ino
    files.rewind(3)
    assert (lines_of(path), path.stat().st_ino) == (stay, before)
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_is_taken_up_logs_each_step_once(tmp_path):
    """Though it was killed after it had logged steps that it had not saved."""
    arguments = {"model_dir": tmp_path, "log_interval": 1, "steps_per_loop": 1, "verbose": False}
    Linear(**arguments).train(slopes(1.0), steps=2, global_batch=1)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "split": "train"}\n{"step": 4, "spl')
    Linear(**arguments).train(slopes(1.0), steps=4, global_batch=1)

    lines = map(json.loads, lines_of(tmp_path / "metrics.jsonl"))
    logged = [(line["split"], line["step"]) for line in lines]
    numbers = [("train", step) for step in range(1, 5)]
    assert [each for each in logged if each[0] not in {"run", "end"}] == [("scale", 1), *numbers]
    rows = (tmp_path / "train.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4"]
