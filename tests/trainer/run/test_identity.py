"""What makes a run the same: every row of the table in docs/resume.md is a case of this file."""

import pathlib
import re

import access
import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Checkpoints, Losses, Monitoring, Skips, Trainer, Updates
from trainer.checkpoint.compatibility import ARGUMENTS, LOGGED, check_same
from trainer.checkpoint.saver import check_variables
from trainer.data.batches import are_arrays, batches
from trainer.data.fingerprint import of_arrays
from trainer.data.iterator_state import DataPosition
from trainer.run.saving import RunSaver

pytestmark = pytest.mark.sampled

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "resume.md"
L, O = keras.layers, keras.optimizers  # noqa: E741  # short names for a long table
X = np.arange(16, dtype=np.float32).reshape(8, 2)
Y = X.sum(1, keepdims=True)


def model(activation="relu", rate=0.1, units=3, momentum=0.9, l2=0.1, dtype=None, **dense):
    """A sequential model with one of everything."""
    layers = [
        L.Dense(units, activation, kernel_regularizer=keras.regularizers.L2(l2), **dense),
        L.BatchNormalization(momentum=momentum),
        L.Dropout(rate),
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


class Scaled(keras.Model):
    """A model of its own class, which Keras cannot describe."""

    def __init__(self, factor=2.0):
        """Keeps a number."""
        super().__init__()
        self.dense, self.factor = L.Dense(1), factor

    def call(self, x):
        """Uses it."""
        return self.dense(x) * self.factor


class Added(Scaled):
    """The same with another `call`."""

    def call(self, x):
        """Adds instead."""
        return self.dense(x) + self.factor


Added.__name__ = "Scaled"


class Module(tf.Module):
    """A linear model that is no Keras model."""

    def __init__(self, factor=2.0):
        """Keeps a number."""
        super().__init__()
        self.kernel, self.factor = tf.Variable(tf.zeros([2, 1])), factor

    def __call__(self, x):
        """Uses it."""
        return self.factor * x @ self.kernel


class Own(Trainer):
    """Computes its own loss."""

    factor = 1.0

    def __init__(self, factor=2.0, **arguments):
        """Keeps a number."""
        super().__init__(**arguments)
        self.factor = factor

    def compute_loss(self, batch, training):
        """Uses it."""
        return self.factor * tf.reduce_sum((self.model(batch[0], training) - batch[1]) ** 2, 1)


class Absolute(Own):
    """Computes another loss."""

    def compute_loss(self, batch, training):
        """The absolute error."""
        return self.factor * tf.reduce_sum(tf.abs(self.model(batch[0], training) - batch[1]), 1)


class Weighted(Own):
    """Weighs its examples."""

    def example_weights(self, batch):
        """By their labels."""
        return batch[1][:, 0]


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
    """The facts that a checkpoint of a run would hold; nothing is trained."""
    settings = {"loss_fn": "mse", "seed": 1, "jit_compile": False, "verbose": False}
    settings["optimizer"] = optimizer or (lambda: O.Adam(0.1))
    if kind is not Trainer:
        del settings["loss_fn"]
    trainer = kind(model=made, **settings | arguments)
    found = batches(data, "train_data", trainer.strategy, batch if are_arrays(data) else None, 1)
    access.start(trainer, found.first)
    position = DataPosition(found, "exact")
    if are_arrays(data):
        position.content = of_arrays(data)
    else:
        position.check_savable()
    saver = RunSaver(trainer, trainer._parts, position, None)
    facts = saver.facts() | saver.identity()
    facts["data"] += facts["pipeline"]
    return facts | {"variables": access.checkpoints(trainer)._variables}


def schedule(steps):
    """An optimizer with a schedule."""
    return lambda: O.Adam(O.schedules.CosineDecay(0.1, steps))


SEVERAL = {"loss_fn": ["mse"]}


def huber(delta):
    """A loss with a constant."""
    return {"loss_fn": keras.losses.Huber(delta=delta)}


def metric(kind):
    """A metric of one name."""
    return {"metrics": lambda: {"error": kind()}}


# Of each row: the settings before, the settings afterwards, and what happens: a name for
# `allow_changes`, "logged", "nothing", or "never".
A = {}
CASES = {
    "the activation of a layer": (A, {"made": lambda: model("gelu")}, "model"),
    "the rate of a `Dropout`": (A, {"made": lambda: model(rate=0.5)}, "model"),
    "the momentum of a `BatchNormalization`": (A, {"made": lambda: model(momentum=0.5)}, "model"),
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
    "a number kept by a layer or model of your own": (
        {"made": Scaled},
        {"made": lambda: Scaled(3.0)},
        "model",
    ),
    "the code of `call` in a layer or model of your own": (
        {"made": Scaled},
        {"made": Added},
        "model",
    ),
    "a number kept by a `tf.Module`": ({"made": Module}, {"made": lambda: Module(3.0)}, "model"),
    "the learning rate": (A, {"optimizer": lambda: O.Adam(0.2)}, "optimizer"),
    "a constant of a learning-rate schedule": (
        {"optimizer": schedule(10)},
        {"optimizer": schedule(20)},
        "optimizer",
    ),
    "a constant of the optimizer": (A, {"optimizer": lambda: O.Adam(0.1, 0.5)}, "optimizer"),
    "weight decay": (A, {"optimizer": lambda: O.Adam(0.1, weight_decay=0.1)}, "optimizer"),
    "an optimizer with the same variables (`AdamW` for `Adam`)": (
        A,
        {"optimizer": lambda: O.AdamW(0.1)},
        "optimizer",
    ),
    "the optimizer's own clipping": (
        A,
        {"optimizer": lambda: O.Adam(0.1, clipnorm=1)},
        "optimizer",
    ),
    "the loss": (A, {"loss_fn": "mae"}, "loss"),
    "`Losses(weights=)`": (SEVERAL, SEVERAL | {"losses": Losses(weights=[2.0])}, "loss"),
    "`Losses(class_weight=)`": (A, {"losses": Losses(class_weight={1: 2.0})}, "loss"),
    "a constant of the loss": (huber(1.0), huber(2.0), "loss"),
    "the code of `compute_loss`": ({"kind": Own}, {"kind": Absolute}, "loss"),
    "a number that `compute_loss` uses": ({"kind": Own}, {"kind": Own, "factor": 3.0}, "loss"),
    "the code of `example_weights`": ({"kind": Own}, {"kind": Weighted}, "loss"),
    "`global_clipnorm`": (A, {"updates": Updates(global_clipnorm=1.0)}, "global_clipnorm"),
    "`clipnorm`": (A, {"updates": Updates(clipnorm=1.0)}, "clipnorm"),
    "`clipvalue`": (A, {"updates": Updates(clipvalue=1.0)}, "clipvalue"),
    "`ema_momentum`": (
        {"updates": Updates(ema_momentum=0.9)},
        {"updates": Updates(ema_momentum=0.5)},
        "ema_momentum",
    ),
    "`updates_per_step`": (
        {
            "made": Scaled,
            "optimizer": lambda: {"dense": O.SGD(0.1)},
            "updates": Updates(alternate_optimizers=True),
        },
        {
            "made": Scaled,
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
    "the dtype or the shape of the data": (A, {"data": (X.astype("float64"), Y)}, "data"),
    "the values of arrays": (A, {"data": (X + 1, Y)}, "data"),
    "the order of arrays": (A, {"data": (X[::-1], Y)}, "data"),
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
    "`on_overflow`": (A, {"skips": Skips(on_overflow="retry")}, "logged"),
    "`max_retries`": (A, {"skips": Skips(max_retries=2)}, "logged"),
    "`on_nonfinite_loss`": (A, {"skips": Skips(on_nonfinite_loss="raise")}, "logged"),
    "`max_consecutive`": (A, {"skips": Skips(max_consecutive=3)}, "logged"),
    "`on_stuck`": (A, {"skips": Skips(on_stuck="hold")}, "logged"),
    "`attribute_causes`": (A, {"skips": Skips(attribute_causes=False)}, "logged"),
    "`jit_compile`": (A, {"jit_compile": "elementwise"}, "logged"),
    "`reduce_dtype`": (
        A | {"strategy": "mirrored"},
        {"strategy": "mirrored", "updates": Updates(reduce_dtype="bfloat16")},
        "logged",
    ),
    "`reduce_bucket_bytes`": (
        A | {"strategy": "mirrored"},
        {"strategy": "mirrored", "updates": Updates(reduce_bucket_bytes=1000)},
        "logged",
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
    "`steps_per_loop`": (A, {"steps_per_loop": 3}, "nothing"),
    "`log_interval`, `verbose`": (A, {"log_interval": 3}, "nothing"),
    "`interval`, `max_to_keep`": (
        A,
        {"checkpoints": Checkpoints(interval=3, max_to_keep=2)},
        "nothing",
    ),
    "`record_gradients`, `check_gradients`": (
        A,
        {"monitoring": Monitoring(check_gradients=False)},
        "nothing",
    ),
    "`check_data`": (A, {"monitoring": Monitoring(check_data=True)}, "nothing"),
}

WORDS = {
    "logged": "allowed, with a warning",
    "nothing": "no effect on the bits",
    "never": "refused",
}


@pytest.fixture(scope="module")
def known():
    """The facts of runs that several rows share."""
    return {}


@pytest.mark.parametrize("row", CASES)
def test_a_change(row, known, tmp_path, caplog):
    """Refused with both values unless it is allowed by name; or logged; or without a word."""
    before, after, outcome = CASES[row]
    sides = []
    for side in (before, after):
        if side is A:
            known.update({} if known else facts_of())
            sides.append(known)
        else:
            names = side.get("files", ())
            found = {"data": files(tmp_path, *names)} if names else {}
            sides.append(facts_of(**{k: v for k, v in side.items() if k != "files"} | found))
    saved, ours = sides
    path = tmp_path / "ckpt-1"
    if outcome == "never":
        with pytest.raises(ValueError, match="must be empty or hold a run with the same"):
            check_variables(saved["variables"], ours["variables"], path, "model_dir")
        return
    check_variables(saved["variables"], ours["variables"], path, "model_dir")
    if outcome in ARGUMENTS:
        with pytest.raises(ValueError, match="to resume from it; got") as error:
            check_same(dict(saved), dict(ours), (), path)
        assert f"`{ARGUMENTS[outcome]}` must be the same as in {path} to resume" in str(error.value)
        assert f"allow_changes=('{outcome}',)" in str(error.value)
        assert check_same(dict(saved), dict(ours), (outcome,), path) == [outcome]
        assert next(record.getMessage().split(" ")[0] for record in caplog.records) == outcome
    else:
        changed = check_same(dict(saved), dict(ours), (), path)
        assert len(changed) == (outcome == "logged") == len(caplog.records)
        assert not changed or changed[0] in LOGGED


def test_the_table_has_these_rows():
    """docs/resume.md has a row for every case, with what happens."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    table = {change: (outcome, name.strip("`")) for change, outcome, name in rows}
    for row, (_, _, outcome) in CASES.items():
        allowed = outcome in ARGUMENTS
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
            monitoring=Monitoring(check_gradients=False),
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
    with pytest.raises(ValueError, match="got optimizer") as error:
        begins_with(2, tmp_path, 0.25)
    assert str(error.value) == (
        f"`optimizer` must be the same as in {tmp_path}/ckpt-1 to resume from it; got "
        "optimizer (SGD).learning_rate 0.25, and the checkpoint has 0.5. The run would continue "
        "with the state of the saved optimizer in another one. Use another model_dir, or pass "
        "allow_changes=('optimizer',)."
    )
    assert (
        begins_with(
            2, tmp_path, 0.25, lower_to=0.125, checkpoints=Checkpoints(allow_changes=("optimizer",))
        )
        == 0.25
    )
    allowed = {
        "updates": Updates(clipnorm=1.0),
        "checkpoints": Checkpoints(allow_changes=("optimizer",)),
    }
    assert begins_with(3, tmp_path, 0.25, **allowed) == 0.125


class Head(keras.Model):
    """A functional model with a constructor of its own, as all of KerasHub's are."""

    def __init__(self, units):
        """Declares its units alone."""
        x = keras.Input([2])
        super().__init__(inputs=x, outputs=L.Dense(units)(x))
        self.units = units

    def get_config(self):
        """Returns no layers."""
        return {"units": self.units}


class Shaped(Trainer):
    """Its loss holds empty tuples, as Gemma's layers do."""

    def compute_loss(self, batch, training):
        """Adds a scalar of shape ()."""
        x, y = batch
        error = tf.reshape(y, [-1]) - self.model(x, training=training)[:, 0]
        return error**2 + tf.zeros(()) + tf.reshape(tf.constant([0.0]), ())


@pytest.mark.parametrize("nested", [False, True])
def test_what_cannot_be_described_ends_no_run(tmp_path, nested):
    """Such a model trains and resumes, at top level or nested; another one is refused."""

    def train(units, steps):
        def make():
            head = Head(units)
            return keras.Sequential([keras.Input([2]), head, L.Dense(1)]) if nested else head

        trainer = Shaped(
            model=make, optimizer="sgd", model_dir=tmp_path, verbose=False, jit_compile=False
        )
        trainer.train((X, Y), steps=steps, global_batch=4)
        return trainer.totals.applied

    assert train(1, 2) == 2
    assert train(1, 3) == 3
    with pytest.raises(ValueError, match="`model_dir`"):
        train(2, 4)
