"""What makes a run the same: every row of the table in docs/resume.md is a case of this file."""

import json
import pathlib
import re
import shutil
import types

import access
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, copies, slopes

import scaling
from trainer import Checkpoints, Losses, Skips, Trainer, Updates
from trainer.checkpoint import folder
from trainer.checkpoint.saver import check_variables
from trainer.data.batches import are_arrays, batches
from trainer.data.iterator_state import DataPosition
from trainer.fingerprint import ALLOWABLE, check_resumable, texts_of_arrays
from trainer.run.declared import first_batch_of
from trainer.run.saving import RunSaver

pytestmark = pytest.mark.sampled

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "resume.md"
L, O = keras.layers, keras.optimizers  # noqa: E741  # short names for a long table
X = np.arange(16, dtype=np.float32).reshape(8, 2)
Y = X.sum(1, keepdims=True)


def model(activation="relu", units=3, l2=0.1, dtype=None, **dense):
    """A sequential model with one of everything."""
    layers = [
        L.Dense(units, activation, kernel_regularizer=keras.regularizers.L2(l2), **dense),
        L.BatchNormalization(),
        L.Dropout(0.1),
        L.Dense(1, dtype=dtype),
    ]
    return keras.Sequential([keras.Input([2]), *layers])


def frozen():
    """The same model with its first layer frozen."""
    made = model()
    made.layers[0].trainable = False
    return made


def functional(factor=2.0, swap=False):
    """A functional model with an operation that is no layer."""
    inputs = keras.Input([2])
    one = L.Dense(1)(inputs)
    two = L.Dense(1)(one)
    return keras.Model(inputs, L.Subtract()([two, one] if swap else [one, two]) * factor)


class Scaled(L.Layer):
    """A layer whose configuration, which Keras makes by itself, tells its argument."""

    def __init__(self, factor=2.0):
        """Keeps a number, and another that no configuration tells."""
        super().__init__()
        self.factor, self.hidden = factor, 1.0

    def call(self, x):
        """Uses them."""
        return x * self.factor * self.hidden


def scaled(factor=2.0, hidden=1.0):
    """A model with such a layer."""
    layer = Scaled(factor)
    layer.hidden = hidden
    return keras.Sequential([keras.Input([2]), L.Dense(1), layer])


class Pair(keras.Model):
    """A model with a part of a name."""

    def __init__(self):
        """Makes the part."""
        super().__init__()
        self.dense = L.Dense(1)

    def call(self, x):
        """Calls the part."""
        return self.dense(x)


class Own(Trainer):
    """Computes its own loss."""

    def compute_loss(self, batch, training):
        """The squared error."""
        return tf.reduce_sum((self.model(batch[0], training) - batch[1]) ** 2, 1)


class Absolute(Own):
    """Computes another loss."""

    def compute_loss(self, batch, training):
        """The absolute error."""
        return tf.reduce_sum(tf.abs(self.model(batch[0], training) - batch[1]), 1)


def pipeline(x=X, seed=1, factor=1.0, calls=None):
    """A pipeline that holds its data."""
    data = tf.data.Dataset.from_tensor_slices((x, Y)).shuffle(8, seed=seed)
    return data.map(lambda x, y: (x * factor, y), num_parallel_calls=calls).batch(4)


def files(tmp_path, *names):
    """A pipeline that reads files."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n2\n3\n4\n")
    lines = tf.data.TextLineDataset([str(tmp_path / name) for name in names])
    return lines.map(lambda line: (tf.fill([2], tf.strings.to_number(line)), [1.0])).batch(4)


def facts_of(made=model, optimizer=None, data=(X, Y), batch=4, kind=Trainer, **arguments):
    """The fingerprint and the variables of a run; nothing is trained."""
    settings = {"loss_fn": "mse", "seed": 1, "jit_compile": False, "verbose": False}
    settings["optimizer"] = optimizer or (lambda: O.Adam(0.1))
    if kind is not Trainer:
        del settings["loss_fn"]
    trainer = kind(model=made, **settings | arguments)
    found = batches(data, "train_data", trainer.strategy, batch if are_arrays(data) else None, 1)
    access.start(trainer, found.first)
    position = DataPosition(found, "exact")
    if are_arrays(data):
        position.content = texts_of_arrays(data)
    else:
        position.check_savable()
    saver = RunSaver(trainer, trainer._parts, position, None)
    return saver.declared(), access.checkpoints(trainer)._variables


def schedule(steps):
    """An optimizer with a schedule."""
    return lambda: O.Adam(O.schedules.CosineDecay(0.1, steps))


SEVERAL = {"loss_fn": ["mse"]}


def metric(kind):
    """A metric of one name."""
    return {"metrics": lambda: {"error": kind()}}


# Of each row: the settings before, the settings afterwards, and what happens: a name for
# `allow_changes`, "logged", "nothing", or "never".
A = {}
CASES = {
    "a setting of a layer, such as its activation": (A, {"made": lambda: model("gelu")}, "model"),
    "the factor of a regularizer": (A, {"made": lambda: model(l2=0.5)}, "model"),
    "a layer's own dtype": (
        {"precision": "mixed_bfloat16"},
        {"precision": "mixed_bfloat16", "made": lambda: model(dtype="float32")},
        "model",
    ),
    "whether a layer is trainable": (
        {"optimizer": lambda: O.SGD(0.1)},
        {"optimizer": lambda: O.SGD(0.1), "made": frozen},
        "model",
    ),
    "a number in a functional model (`x * 2`)": (
        {"made": functional},
        {"made": lambda: functional(3.0)},
        "model",
    ),
    "what a layer of a functional model is called with": (
        {"made": functional},
        {"made": lambda: functional(swap=True)},
        "model",
    ),
    "an argument of a layer of your own": (
        {"made": scaled},
        {"made": lambda: scaled(3.0)},
        "model",
    ),
    "the learning rate": (A, {"optimizer": lambda: O.Adam(0.2)}, "optimizer"),
    "a constant of a learning-rate schedule": (
        {"optimizer": schedule(10)},
        {"optimizer": schedule(20)},
        "optimizer",
    ),
    "another setting of the optimizer, such as its clipping": (
        A,
        {"optimizer": lambda: O.Adam(0.1, 0.5)},
        "optimizer",
    ),
    "an optimizer with the same variables (`AdamW` for `Adam`)": (
        A,
        {"optimizer": lambda: O.AdamW(0.1)},
        "optimizer",
    ),
    "the loss, or a constant of it": (A, {"loss_fn": "mae"}, "loss"),
    "`Losses(weights=)`": (SEVERAL, SEVERAL | {"losses": Losses(weights=[2.0])}, "loss"),
    "`Losses(class_weight=)`": (A, {"losses": Losses(class_weight={1: 2.0})}, "loss"),
    "`global_clipnorm` (`clipnorm` and `clipvalue` have their own names)": (
        A,
        {"updates": Updates(global_clipnorm=1.0)},
        "global_clipnorm",
    ),
    "`ema_momentum`": (
        {"updates": Updates(ema_momentum=0.9)},
        {"updates": Updates(ema_momentum=0.5)},
        "ema_momentum",
    ),
    "`updates_per_step`": (
        {
            "made": Pair,
            "optimizer": lambda: {"dense": O.SGD(0.1)},
            "updates": Updates(alternate_optimizers=True),
        },
        {
            "made": Pair,
            "optimizer": lambda: {"dense": O.SGD(0.1)},
            "updates": Updates(alternate_optimizers=True, updates_per_step={"dense": 2}),
        },
        "updates_per_step",
    ),
    "`alternate_optimizers`": (
        A,
        {"updates": Updates(alternate_optimizers=True)},
        "alternate_optimizers",
    ),
    "`num_microbatches`": (A, {"num_microbatches": 2}, "num_microbatches"),
    "the number of replicas": (A, {"strategy": "mirrored", "batch": 4}, "num_replicas"),
    "`precision`": (A, {"precision": "mixed_bfloat16"}, "precision"),
    "`loss_scale`": (A, {"loss_scale": 8}, "loss_scale"),
    "`seed`": (A, {"seed": 2}, "seed"),
    "the global batch": (A, {"batch": 2}, "global_batch"),
    "the number of examples": (A, {"data": (X[:4], Y[:4])}, "data"),
    "the values of arrays": (A, {"data": (X + 1, Y)}, "data"),
    "the values that a pipeline holds": (
        {"data": pipeline()},
        {"data": pipeline(X + 1)},
        "data",
    ),
    "the seed of a pipeline's shuffle": ({"data": pipeline()}, {"data": pipeline(seed=2)}, "data"),
    "a number in a function of a pipeline": (
        {"data": pipeline()},
        {"data": pipeline(factor=2.0)},
        "data",
    ),
    "the names of a pipeline's files": ({"files": ("a",)}, {"files": ("b",)}, "data"),
    "the number of units, or of layers": (A, {"made": lambda: model(units=4)}, "never"),
    "an optimizer with other variables (`SGD` for `Adam`)": (
        A,
        {"optimizer": lambda: O.SGD(0.1)},
        "never",
    ),
    "a schedule in place of a number": (A, {"optimizer": schedule(10)}, "never"),
    "a metric of the same name": (
        metric(keras.metrics.MeanAbsoluteError),
        metric(keras.metrics.MeanSquaredError),
        "logged",
    ),
    "`on_overflow` and other settings for skipped steps": (
        A,
        {"skips": Skips(on_overflow="retry")},
        "logged",
    ),
    "`jit_compile`": (A, {"jit_compile": "elementwise"}, "logged"),
    "`reduce_dtype`, `reduce_bucket_bytes`": (
        A | {"strategy": "mirrored"},
        {"strategy": "mirrored", "updates": Updates(reduce_dtype="bfloat16")},
        "logged",
    ),
    "code, and what it reads from closures and modules": (
        {"kind": Own},
        {"kind": Absolute},
        "not compared",
    ),
    "an attribute that no `get_config()` tells": (
        {"made": scaled},
        {"made": lambda: scaled(hidden=2.0)},
        "not compared",
    ),
    "names of layers": (A, {"made": lambda: model(name="first")}, "nothing"),
    "initializers": (A, {"made": lambda: model(kernel_initializer="ones")}, "nothing"),
    "the strategy, with as many replicas": (A, {"strategy": "one_device"}, "nothing"),
    "the number in `num_parallel_calls`": (
        {"data": pipeline(calls=4)},
        {"data": pipeline(calls=2)},
        "nothing",
    ),
    "the folder of a pipeline's files": ({"files": ("a",)}, {"files": ("c/a",)}, "nothing"),
    "`steps_per_loop`, `log_interval` and other settings of logs and checkpoints": (
        A,
        {"steps_per_loop": 3},
        "nothing",
    ),
}

WORDS = {
    "logged": "allowed, with a warning",
    "nothing": "no effect on the bits",
    "never": "refused",
    "not compared": "not compared",
}


@pytest.fixture(scope="module")
def known():
    """The facts of the run that several rows share."""
    return []


@pytest.mark.parametrize("row", CASES)
def test_a_change(row, known, tmp_path, caplog):
    """Refused with both values unless it is allowed by name; or logged; or without a word."""
    before, after, outcome = CASES[row]
    sides = []
    for side in (before, after):
        if side is A:
            known.append(known[0] if known else facts_of())
            sides.append(known[0])
        else:
            names = side.get("files", ())
            found = {"data": files(tmp_path, *names)} if names else {}
            sides.append(facts_of(**{k: v for k, v in side.items() if k != "files"} | found))
    (saved, saved_variables), (ours, our_variables) = sides
    path = tmp_path / "ckpt-1"
    if outcome == "never":
        with pytest.raises(ValueError, match="`model_dir`"):
            check_variables(saved_variables, our_variables, path, "model_dir")
        return
    check_variables(saved_variables, our_variables, path, "model_dir")
    if outcome in ALLOWABLE:
        with pytest.raises(ValueError, match=rf"^`{outcome}[`.\[].*allow_changes"):
            check_resumable(saved, ours, (), path)
        assert check_resumable(saved, ours, (outcome,), path) == {outcome}
        assert caplog.records[0].getMessage().startswith(outcome)
    else:
        changed = check_resumable(saved, ours, (), path)
        assert len(changed) == (outcome == "logged") == (len(caplog.records) > 0)


def test_the_table_has_these_rows():
    """docs/resume.md has a row for every case, with what happens."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    table = {change: (outcome, name.strip("`")) for change, outcome, name in rows}
    for row, (_, _, outcome) in CASES.items():
        allowed = outcome in ALLOWABLE
        expected = ("refused unless allowed", f'"{outcome}"') if allowed else (WORDS[outcome], "")
        assert table[row] == expected, row
    assert len(CASES) >= 30


class Learns(Trainer):
    """Remembers the learning rate that it begins with."""

    def __init__(self, folder, rate, lower_to=None, clipnorm=None, **arguments):
        """Takes a learning rate to assign in a hook, and one more constant of the optimizer."""
        super().__init__(
            model=lambda: keras.Sequential([keras.Input([2]), L.Dense(1)]),
            optimizer=lambda: O.SGD(rate, clipnorm=clipnorm),
            loss_fn="mse",
            model_dir=folder,
            verbose=False,
            jit_compile=False,
            **arguments,
        )
        self.lower_to = lower_to

    def on_train_begin(self):
        """Reads it."""
        self.began_with = float(self.optimizer.learning_rate)

    def on_loop_end(self, step):
        """Assigns another."""
        if self.lower_to:
            self.optimizer.learning_rate = self.lower_to


def begins_with(steps, *arguments, **settings):
    """Trains to a step; returns the learning rate at the beginning."""
    trainer = Learns(*arguments, **settings)
    trainer.train((X, Y), steps=steps, global_batch=8)
    return trainer.began_with


@pytest.mark.thorough
def test_a_new_learning_rate_takes_effect(tmp_path):
    """With "optimizer" allowed, a new learning rate replaces the saved one. If another constant has
    changed, the saved rate is kept, which a hook may have assigned.
    """
    assert begins_with(1, tmp_path, 0.5) == 0.5
    with pytest.raises(ValueError, match="`optimizer"):
        begins_with(2, tmp_path, 0.25)
    allowed = {"checkpoints": Checkpoints(allow_changes=("optimizer",))}
    assert begins_with(2, tmp_path, 0.25, lower_to=0.125, **allowed) == 0.25
    allowed["clipnorm"] = 1.0
    assert begins_with(3, tmp_path, 0.25, **allowed) == 0.125


SLOPES = [2.0**power for power in range(-3, 5)]  # of 8 examples: any sum identifies its terms
SAVED_AT, END = 4, 9


class Traced(Linear):
    """Records by how much the weight moved in each step, which identifies the examples."""

    def __init__(self, **arguments):
        """Runs one step per loop, because the weight is read at the end of a loop."""
        rule = scaling.DynamicLossScale(2.0**3, growth_interval=2)
        settings = {"seed": 1, "loss_scale": rule, "verbose": False, "steps_per_loop": 1}
        super().__init__(**settings | arguments)
        self.moves = []

    def build_metrics(self):
        """A count of the examples."""
        return {"seen": keras.metrics.Sum()}

    def compute_loss(self, batch, training):
        """The same for slopes of any dtype."""
        return super().compute_loss(
            batch | {"slope": tf.cast(batch["slope"], tf.float32)}, training
        )

    def update_metrics(self, batch, aux):
        """Counts the examples."""
        self.metrics["seen"].update_state(tf.ones_like(batch["x"][:, 0]))

    def on_train_begin(self):
        """Records the restored values."""
        self.began_with = {
            "weight": self.weight,
            "weights": copies(self.model.trainable_variables[0]),
            "iterations": int(self.optimizer.iterations.numpy()),
            "scale": self.loss_scale,
            "seen": float(self.metrics["seen"].result()),
            "seed": int(access.state(self).random_seed.numpy()),
        }
        self.weight_before = self.weight

    def on_loop_end(self, step):
        """Records the step of the weight: the mean slope of the batch."""
        self.moves.append(self.weight_before - self.weight)
        self.weight_before = self.weight


def run(model_dir, steps=END, global_batch=2, data=None, **arguments):
    """Trains to a step; returns the trainer."""
    trainer = Traced(model_dir=model_dir, **arguments)
    trainer.train(slopes(*SLOPES) if data is None else data, steps=steps, global_batch=global_batch)
    return trainer


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A run of 9 steps, with only the checkpoint of step 4 left."""
    keras.utils.set_random_seed(0)
    path = tmp_path_factory.mktemp("before")
    trainer = run(path, checkpoints=Checkpoints(interval=SAVED_AT, max_to_keep=9))
    assert list(folder.committed(path, "ckpt")) == [4, 8, 9]
    for step in (8, 9):
        shutil.rmtree(path / f"ckpt-{step}")
    return path, trainer


@pytest.fixture
def model_dir(before, tmp_path):
    """A copy of the directory of that run."""
    return shutil.copytree(before[0], tmp_path / "model_dir")


def warnings_in(caplog):
    """The warnings that absl has logged."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.thorough
def test_the_same_run_resumes_exactly(before, model_dir, caplog):
    """If nothing differs, nothing is logged, even if changes are allowed."""
    with caplog.at_level("WARNING"):
        trainer = run(model_dir, checkpoints=Checkpoints(allow_changes=ALLOWABLE))

    assert trainer.began_with == {
        "weight": 1.0 - sum(before[1].moves[:SAVED_AT]),
        "weights": [trainer.began_with["weight"]],
        "iterations": SAVED_AT,
        "scale": 32.0,
        "seen": 8.0,
        "seed": 1,
    }
    assert trainer.moves == before[1].moves[SAVED_AT:]
    assert warnings_in(caplog) == []


def as_doubles():
    """The same numbers in float64."""
    data = slopes(*SLOPES)
    return data | {"slope": data["slope"].astype(np.float64)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["precision", "loss_scale", "seed", "num_replicas", "global_batch", "data"]
)
def test_a_run_with_something_else_is_refused_or_allowed(before, model_dir, mirrored, caplog, name):
    """L12: if the change is allowed, a warning says so and the run resumes: weights and counts
    continue, a new rule starts at its initial scale, the data start over if they, their batches or
    the seed have changed, metrics start over with another number of replicas, and everything else
    continues.
    """
    changes = {}
    if name == "precision":
        changes = {"precision": "mixed_bfloat16"}
    elif name == "loss_scale":
        changes = {"loss_scale": 4.0}
    elif name == "seed":
        changes = {"seed": 2}
    elif name == "num_replicas":
        changes = {"strategy": mirrored(2)}
    train = {"data": slopes(*SLOPES), "global_batch": 4 if name == "global_batch" else 2}
    if name == "data":
        train["data"] = as_doubles()

    def go(path, **arguments):
        keras.utils.set_random_seed(0)  # TensorFlow's shuffles also depend on its global seed
        caplog.clear()
        trainer = Traced(model_dir=path, **changes, **arguments)
        trainer.train(train["data"], steps=END, global_batch=train["global_batch"])
        return trainer

    with pytest.raises(ValueError, match=f"^`{name}[`.].*allow_changes"):
        go(model_dir)
    assert list(folder.committed(model_dir, "ckpt")) == [4]

    with caplog.at_level("WARNING"):
        trainer = go(model_dir, checkpoints=Checkpoints(allow_changes=(name,)))
    assert {text.split(" ")[0].split(".")[0] for text in warnings_in(caplog)} == {name}

    assert trainer.totals.attempted == END
    reached = 1.0 - sum(before[1].moves[:SAVED_AT])
    replicas = 2 if name == "num_replicas" else 1
    assert trainer.began_with == {
        "weight": reached,
        "weights": [reached] * replicas,
        "iterations": SAVED_AT,
        "scale": 4.0 if name == "loss_scale" else 32.0,
        "seen": 0.0 if name == "num_replicas" else 8.0,
        "seed": 2 if name == "seed" else 1,
    }
    if name in ("seed", "global_batch", "data"):
        keras.utils.set_random_seed(0)
        fresh = Traced(**changes)
        fresh.train(train["data"], steps=END - SAVED_AT, global_batch=train["global_batch"])
        assert trainer.moves == fresh.moves
        # The new checkpoint counts the batches of the new data.
        assert folder.read_manifest(model_dir / "ckpt-9")["batches_taken"] == END - SAVED_AT
    else:
        assert trainer.moves == before[1].moves[SAVED_AT:]
        assert folder.read_manifest(model_dir / "ckpt-9")["batches_taken"] == END
    if name == "precision":
        assert trainer.model.layers[-1].compute_dtype == "bfloat16"


def test_every_difference_must_be_allowed(model_dir):
    """The remedy names all that is not allowed, and keeps what is."""
    with pytest.raises(ValueError, match=r"`seed`.*\('loss_scale', 'seed'\)"):
        run(
            model_dir,
            seed=2,
            loss_scale=None,
            checkpoints=Checkpoints(allow_changes=("loss_scale",)),
        )


@pytest.mark.thorough
def test_another_size_of_batches_is_no_other_data(tmp_path):
    """`"global_batch"` allows what follows from it: the number of batches, in a pipeline too."""

    def pipeline(size):
        return tf.data.Dataset.from_tensor_slices(slopes(*SLOPES)).batch(size)

    run(tmp_path, steps=2, data=pipeline(2), global_batch=None)
    with pytest.raises(ValueError, match=r"`global_batch`.*\('global_batch',\)"):
        run(tmp_path, data=pipeline(3), global_batch=None)

    allowed = Checkpoints(allow_changes=["global_batch"])
    trainer = run(tmp_path, data=pipeline(3), global_batch=None, checkpoints=allowed)
    assert trainer.totals.attempted == END

    doubles = tf.data.Dataset.from_tensor_slices(as_doubles()).batch(2)
    with pytest.raises(ValueError, match="float64"):
        run(tmp_path, steps=20, data=doubles, global_batch=None, checkpoints=allowed)


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["versions.keras", "metrics.seen"])
def test_what_is_only_logged(before, model_dir, caplog, place):
    """A run resumes from a checkpoint of another Keras, or with another metric, which begins at 0."""
    path = model_dir / "ckpt-4"
    facts = folder.read_manifest(path)
    facts["fingerprint"][place] = "another"
    (path / "run.json").write_text(folder.sealed(facts))
    with caplog.at_level("WARNING"):
        trainer = run(model_dir)

    assert [text.split(" ")[0] for text in warnings_in(caplog)] == [place]
    assert trainer.moves == before[1].moves[SAVED_AT:]
    assert trainer.began_with["seen"] == (8.0 if place == "versions.keras" else 0.0)


@pytest.mark.thorough
def test_evaluation_warns_of_another_model(model_dir, caplog):
    """An evaluation of other layers with the same weights is announced."""

    class Activated(Traced):
        def build_model(self):
            layer = keras.layers.Dense(1, "relu", use_bias=False)
            return keras.Sequential([keras.Input([1]), layer])

    for kind, words in ((Traced, []), (Activated, ["model.layers[0].activation"])):
        caplog.clear()
        with caplog.at_level("WARNING"):
            kind(model_dir=model_dir, precision="mixed_bfloat16", seed=None).evaluate(
                slopes(*SLOPES), global_batch=8
            )
        assert len(warnings_in(caplog)) == len(words)
        assert all(word in text for word, text in zip(words, warnings_in(caplog), strict=True))


@pytest.fixture(scope="module")
def of_two_workers(tmp_path_factory):
    """Runs two workers; returns what each says of every call."""
    out = tmp_path_factory.mktemp("differences")
    with jobs.workers(out, 2, "worker_differences.py", out) as job:
        assert job.wait(200) == [0, 0], job.output()
    assert [*out.glob("run/plugins/profile/*/*.xplane.pb")]
    assert not [*out.glob("ends/ckpt-*")]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


# The place at which each call of `worker_differences.py` differs.
PLACES = {
    "same": None,
    "rounded": None,
    "shard": "data",
    "arrays": "data",
    "batch size": "global_batch",
    "length": "data",
    "steps": "steps",
    "clipnorm": "clipnorm",
    "seed": "seed",
    "steps per loop": "steps_per_loop",
    "actions": "callbacks",
    "eval_data": "eval_data",
    "eval_interval": "eval_interval",
    "evaluate": "data",
    "predict": "data",
    "profile": None,
    "same again": None,
}


@pytest.mark.thorough
def test_calls_that_differ_between_workers_are_refused(of_two_workers):
    """L15: without this, workers would train different models, leave out the examples of data that is
    divided between them, or wait for each other without end. Rounding is no difference.
    """
    for found in of_two_workers:
        assert {name for name in PLACES if found[name] is None} == {
            name for name, place in PLACES.items() if place is None
        }
    for name, place in PLACES.items():
        assert place is None or of_two_workers[1][name].startswith(f"`{place}")


@pytest.mark.thorough
def test_workers_predict_other_dtypes_and_end_with_their_own_error(of_two_workers):
    """L15: what workers cannot exchange is sent in another dtype, or refused by name; an error in a
    hook of one worker is its own, and nothing is saved that the others do not know of.
    """
    numbers = [float(number) for number in range(10)]
    for found in of_two_workers:
        assert found["bool"] == ["bool", [0.0] + [1.0] * 9]
        assert found["uint8"] == ["uint8", numbers]
        assert found["bfloat16"] == ["bfloat16", numbers]
        assert found["string"].startswith("`predict_batch` must ")
    assert [found["end"] for found in of_two_workers] == ["WorkerLostError", "KeyError"]


def test_a_batch_of_any_kind_has_a_fingerprint():
    """Ragged and sparse tensors are compared by their components."""
    ragged, sparse = tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.eye(2)

    first = {"r": ragged, "s": sparse, "t": tf.constant(["a", "b"])}
    data = types.SimpleNamespace(first=first)
    arrays = [ragged.values, ragged.row_splits, sparse.indices, sparse.values, sparse.dense_shape]
    assert first_batch_of(data) == texts_of_arrays([*arrays, np.array([b"a", b"b"], object)])
