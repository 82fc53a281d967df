"""Settings that a resumed run must share with its checkpoint, and what happens if they differ."""

import json
import re
import shutil

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, copies, linear_model, slopes

import scaling
from trainer import Checkpoints, Updates
from trainer.checkpoint import folder
from trainer.checkpoint.compatibility import ARGUMENTS, version

pytestmark = pytest.mark.sampled

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
        trainer = run(model_dir, checkpoints=Checkpoints(allow_changes=tuple(ARGUMENTS)))

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


SPEC = (
    "{{'x': TensorSpec(shape=(None, 1), dtype=tf.float32, name=None), 'slope': "
    "TensorSpec(shape=(None,), dtype=tf.{dtype}, name=None)}}, {steps} steps an epoch"
)
# Of each setting: its value now, its value in the checkpoint, and what the change leads to.
WORDS = {
    "precision": ("'mixed_bfloat16'", "'float32'", "another precision"),
    "loss_scale": (
        f"{str(scaling.FixedLossScale(4.0))!r}",
        f"{str(scaling.DynamicLossScale(2.0**3, growth_interval=2))!r}",
        "another loss-scale rule, from its initial scale",
    ),
    "seed": ("2", "1", "other random numbers, and its data from the beginning"),
    "num_replicas": (
        "2",
        "1",
        "different shares of each batch on the replicas, and its metrics from zero",
    ),
    "global_batch": ("4", "2", "other batches, from the beginning of the data"),
    "data": (
        f'"{SPEC.format(dtype="float64", steps=4)}"',
        f'"{SPEC.format(dtype="float32", steps=4)}"',
        "other data, from the beginning",
    ),
}


def as_doubles():
    """The same numbers in float64."""
    data = slopes(*SLOPES)
    return data | {"slope": data["slope"].astype(np.float64)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(WORDS))
def test_a_run_with_something_else_is_refused_or_allowed(before, model_dir, mirrored, caplog, name):
    """The error gives the path, both values and a remedy. If the change is allowed, a warning gives
    them and the run resumes: weights and counts continue, a new rule starts at its initial scale,
    the data start over if they, their batches or the seed have changed, metrics start over with
    another number of replicas, and everything else continues.
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

    here, there, effect = WORDS[name]
    with pytest.raises(ValueError, match="to resume from it") as error:
        go(model_dir)
    path = model_dir / "ckpt-4"
    assert str(error.value) == (
        f"`{ARGUMENTS[name]}` must be the same as in {path} to resume from it; got {name} {here}, "
        f"and the checkpoint has {there}. The run would continue with {effect}. Use another "
        f"model_dir, or pass allow_changes=('{name}',)."
    )
    assert list(folder.committed(model_dir, "ckpt")) == [4]

    with caplog.at_level("WARNING"):
        trainer = go(model_dir, checkpoints=Checkpoints(allow_changes=(name,)))

    assert warnings_in(caplog)[0] == (
        f"{name} was {there} in {path} and is {here} now, as allow_changes permits. The run "
        f"continues with {effect}."
    )
    assert len(warnings_in(caplog)) == 1

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
    """All differences that are not allowed are named, and the remedy keeps those that are."""
    with pytest.raises(ValueError, match="`seed` must be") as error:
        run(
            model_dir,
            seed=2,
            loss_scale=None,
            checkpoints=Checkpoints(allow_changes=("loss_scale",)),
        )

    assert str(error.value).endswith("or pass allow_changes=('loss_scale', 'seed').")

    with pytest.raises(ValueError, match="`seed` and") as error:
        run(model_dir, seed=2, updates=Updates(clipnorm=1.0), num_microbatches=2, data=as_doubles())
    spec = SPEC.format(dtype="float64", steps=4), SPEC.format(dtype="float32", steps=4)
    assert str(error.value) == (
        f"`seed` and `train_data` and `num_microbatches` and `clipnorm` must be the same as in "
        f"{model_dir / 'ckpt-4'} to resume from it; got seed 2, and the checkpoint has 1; data "
        f"{spec[0]!r}, and the checkpoint has {spec[1]!r}; num_microbatches 2, and the checkpoint "
        "has 1; clipnorm 1.0, and the checkpoint has None. The run would continue with other "
        "random numbers, and its data from the beginning; with other data, from the beginning; "
        "with other random numbers in each part of a batch, and other rounding; with another bound "
        "on its gradients. Use another model_dir, or pass "
        "allow_changes=('seed', 'data', 'num_microbatches', 'clipnorm')."
    )


def test_another_size_of_batches_is_no_other_data(tmp_path):
    """`"global_batch"` allows what follows from it: the number of batches, in a pipeline too."""

    def pipeline(size):
        return tf.data.Dataset.from_tensor_slices(slopes(*SLOPES)).batch(size)

    run(tmp_path, steps=2, data=pipeline(2), global_batch=None)
    with pytest.raises(ValueError, match="`train_data` must be") as error:
        run(tmp_path, data=pipeline(3), global_batch=None)
    assert "allow_changes=('global_batch',)" in str(error.value)

    trainer = run(
        tmp_path,
        data=pipeline(3),
        global_batch=None,
        checkpoints=Checkpoints(allow_changes=["global_batch"]),
    )
    assert trainer.totals.attempted == END

    doubles = tf.data.Dataset.from_tensor_slices(as_doubles()).batch(2)
    with pytest.raises(ValueError, match="float64"):
        run(
            tmp_path,
            steps=20,
            data=doubles,
            global_batch=None,
            checkpoints=Checkpoints(allow_changes=["global_batch"]),
        )


def test_other_versions_only_warn(before, model_dir, caplog):
    """A run resumes from a checkpoint of another Keras, and a warning says that bits may differ."""
    path = model_dir / "ckpt-4"
    facts = folder.read_manifest(path)
    facts["versions"] |= {"keras": "3.0.0", "python": "3.10.0"}
    (path / "run.json").write_text(folder.sealed(facts))
    with caplog.at_level("WARNING"):
        trainer = run(model_dir)

    now = json.loads((model_dir / "ckpt-9" / "run.json").read_text())["versions"]
    assert warnings_in(caplog) == [
        f"{path} was written with keras 3.0.0 (now {keras.__version__}), python 3.10.0 (now "
        f"{now['python']}). Results may not be identical bit for bit."
    ]
    assert trainer.moves == before[1].moves[SAVED_AT:]
    assert len({*trainer.moves}) > 4


def test_a_clone_that_is_not_installed_has_no_version():
    """A clone on PYTHONPATH has no package metadata, and trains all the same."""
    assert version("keras") == keras.__version__
    assert version("a-package-that-nobody-wrote") == "not installed"


def rewritten(path, change):
    """Changes the facts of a checkpoint, which stays intact."""
    facts = folder.read_manifest(path)
    change(facts)
    (path / "run.json").write_text(folder.sealed(facts))


def test_older_checkpoints_resume(before, model_dir, caplog):
    """What a checkpoint has not recorded is named in a warning, and nothing else is compared less."""
    path = model_dir / "ckpt-4"

    def forget(facts):
        del facts["identity"], facts["content"]

    rewritten(path, forget)
    with pytest.raises(ValueError, match="`seed` must be the same"):
        run(model_dir, seed=2)
    caplog.clear()
    with caplog.at_level("WARNING"):
        trainer = run(model_dir)

    assert warnings_in(caplog) == [
        f"{path} was written by an older version of halfstep, which did not record model, "
        "optimizer, loss, global_clipnorm, clipnorm, clipvalue, ema_momentum, "
        "alternate_optimizers, updates_per_step, metrics, on_overflow, max_retries, "
        "on_nonfinite_loss, max_consecutive, on_stuck, attribute_causes, content of the "
        "data. The run resumes without comparing them."
    ]
    assert trainer.moves == before[1].moves[SAVED_AT:]


@pytest.mark.thorough
def test_other_versions_describe_less_or_more(model_dir):
    """Bytecode is compared within a version of Python, and settings that only one version of Keras
    knows are not compared with another.
    """
    path = model_dir / "ckpt-4"

    def change(facts):
        facts["versions"] |= {"keras": "3.0.0", "python": "3.10.0"}
        facts["identity"]["loss"]["compute_loss"]["code"] = "another"
        facts["identity"]["optimizer"]["optimizer"]["lookahead"] = 2.0

    rewritten(path, change)
    run(model_dir, steps=5)
    rewritten(model_dir / "ckpt-5", lambda facts: facts["versions"].update(keras="3.0.0"))
    with pytest.raises(ValueError, match=r"got global_clipnorm 1\.0, and the checkpoint has None"):
        run(model_dir, updates=Updates(global_clipnorm=1.0))


def test_other_values_in_the_data_are_refused(model_dir):
    """Arrays of the same shape with other values are other data."""
    with pytest.raises(ValueError, match="`train_data` must be the same") as error:
        run(model_dir, data=slopes(*SLOPES[:-1], 3.0))
    assert "got data component 0 'float32 (8,), norm " in str(error.value)
    trainer = run(
        model_dir, data=slopes(*SLOPES[:-1], 3.0), checkpoints=Checkpoints(allow_changes=("data",))
    )
    assert 3.0 in [2 * move - other for move in trainer.moves for other in SLOPES]


def test_another_metric_begins_at_zero(model_dir, caplog):
    """Values of one metric do not continue in another."""
    rewritten(
        model_dir / "ckpt-4",
        lambda facts: facts["identity"]["metrics"].update(seen={"class": "Other"}),
    )
    with caplog.at_level("WARNING"):
        trainer = run(model_dir)
    assert trainer.began_with["seen"] == 0.0
    assert warnings_in(caplog) == [
        f"metrics seen was 'Other' in {model_dir / 'ckpt-4'} and is 'Sum' now. The training "
        "metrics begin at zero."
    ]


def test_evaluation_warns_of_another_model(model_dir, caplog):
    """An evaluation of other layers with the same weights is announced."""

    class Activated(Traced):
        def build_model(self):
            layer = keras.layers.Dense(1, "relu", use_bias=False)
            return keras.Sequential([keras.Input([1]), layer])

    for kind, words in ((Traced, []), (Activated, ["'relu' now and was 'linear'"])):
        caplog.clear()
        with caplog.at_level("WARNING"):
            kind(model_dir=model_dir, precision="mixed_bfloat16", seed=None).evaluate(
                slopes(*SLOPES), global_batch=8
            )
        assert len(warnings_in(caplog)) == len(words)
        assert all(word in text for word, text in zip(words, warnings_in(caplog), strict=True))


class Models(Traced):
    """`Traced` with any model and optimizer."""

    def __init__(self, model, optimizer, **arguments):
        """Takes functions that make them."""
        super().__init__(**arguments)
        self.make = model, optimizer

    def build_model(self):
        """The given model."""
        return self.make[0]()

    def build_optimizer(self):
        """The given optimizer."""
        return self.make[1]()


def refused(model_dir, model, optimizer, whose):
    """Checks that a run with another model or optimizer is refused.

    Returns the difference: our variable, the checkpoint's, and the position.
    """
    trainer = Models(model, optimizer, model_dir=model_dir)
    with pytest.raises(ValueError, match="in the checkpoint") as error:
        trainer.train(slopes(*SLOPES), steps=END, global_batch=2)
    [path] = folder.committed(model_dir, "ckpt").values()
    if whose == "model":
        remedy = "or build the same model as in that run"
    else:
        remedy = f"with init_from={str(path)!r} to start from the weights alone"
    pattern = (
        re.escape(
            f"`model_dir` must be empty or hold a run with the same {whose}; got {path}, where variable "
        )
        + "(.*) is (.*) in this run and (.*) in the checkpoint"
        + re.escape(
            ". Values can only be restored into variables of the same shape and dtype. Use another "
            f"model_dir, {remedy}."
        )
    )
    found = re.fullmatch(pattern, str(error.value))
    assert found, error.value
    place, ours, theirs = found.groups()
    optimizers = (
        trainer.optimizer if isinstance(trainer.optimizer, dict) else {"": trainer.optimizer}
    )
    owners = [trainer.model, *optimizers.values()]
    names = [variable.path for owner in owners for variable in owner.variables]
    assert ours == "missing" or ours.split(": ")[0] in names
    saved = json.loads((path / "run.json").read_text())["variables"].get(whose)
    assert theirs == "missing" or theirs == saved[int(place)]
    return ours.split("/")[-1], theirs.split("/")[-1], int(place)


def sgd():
    """The optimizer of the earlier run."""
    return keras.optimizers.SGD(1.0)


def test_another_model_is_refused(model_dir):
    """The error names the first variable that differs in shape or dtype, on both sides."""

    def wider():
        return linear_model(units=2)

    def with_bias():
        return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])

    def whole_numbers():
        layer = keras.layers.Layer()
        layer.add_weight(shape=(1, 1), dtype="int32", trainable=False, name="count")
        return keras.Sequential([keras.Input([1]), layer, linear_model().layers[-1]])

    def none_at_all():
        return keras.Sequential([keras.Input([1]), keras.layers.Activation("relu")])

    kernel = "kernel: float32 (1, 1)"
    assert refused(model_dir, wider, sgd, "model") == ("kernel: float32 (1, 2)", kernel, 0)
    assert refused(model_dir, with_bias, sgd, "model") == ("bias: float32 (1,)", "missing", 1)
    assert refused(model_dir, whole_numbers, sgd, "model") == ("count: int32 (1, 1)", kernel, 0)


def test_another_optimizer_is_refused(tmp_path, model_dir):
    """More variables, fewer, or as many with the same shapes but other roles are refused."""

    def momentum():
        return keras.optimizers.SGD(1.0, momentum=0.5)

    def rms():
        return keras.optimizers.RMSprop(1.0)

    one = "float32 (1, 1)"
    ours, theirs, place = refused(model_dir, linear_model, momentum, "optimizer")
    assert (ours.split("_")[-1], theirs, place) == (f"momentum: {one}", "missing", 2)

    with_momentum = tmp_path / "momentum"
    Models(linear_model, momentum, model_dir=with_momentum).train(
        slopes(*SLOPES), steps=1, global_batch=2
    )
    ours, theirs, place = refused(with_momentum, linear_model, sgd, "optimizer")
    assert (ours, theirs.split("_")[-1], place) == ("missing", f"momentum: {one}", 2)
    ours, theirs, place = refused(with_momentum, linear_model, rms, "optimizer")
    assert (ours.split("_")[-1], theirs.split("_")[-1], place) == (
        f"velocity: {one}",
        f"momentum: {one}",
        2,
    )


def test_one_optimizer_is_not_the_same_as_several(model_dir):
    """A dict of optimizers has other names in a checkpoint than a single optimizer."""

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.one = linear_model()

        def call(self, x):
            return self.one(x)

    ours, theirs, place = refused(model_dir, Pair, lambda: {"one": sgd()}, "optimizer_one")

    assert (ours.split("_")[-1], theirs, place) == ("iteration: int64 ()", "missing", 0)
