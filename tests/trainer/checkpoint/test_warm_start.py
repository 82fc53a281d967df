"""`init_from`: a new run starts from the weights of an old one, or from some of them, and from
nothing else of it.
"""

import shutil

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, copies, slopes

import scaling
from trainer import Checkpoints
from trainer.checkpoint.warm_start import named, read_file

# Keras converts its variables in a way that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)

ROWS = np.random.default_rng(2).normal(size=[8, 3]).astype(np.float32)
DATA = {"x": ROWS, "slope": ROWS[:, 0]}


class Deep(Linear):
    """A model with BatchNorm and Dropout; an optimizer with momentum, average and schedule."""

    units = 4

    def __init__(self, classes=1, more=False, **arguments):
        """With a rule that changes its scale.

        Takes the size of the head, and whether a layer stands between body and head.
        """
        self.classes, self.more = classes, more
        rule = scaling.DynamicLossScale(2.0**3, growth_interval=1)
        settings = {"loss_scale": rule, "verbose": False, "jit_compile": False}
        super().__init__(**settings | arguments)

    def build_model(self):
        """A Sequential, whose own name differs from run to run."""
        layers = [
            keras.layers.Dense(self.units, name="body"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, seed=3),
        ]
        if self.more:
            layers.append(keras.layers.Dense(4, name="added"))
        head = keras.layers.Dense(self.classes, name="head")
        return keras.Sequential([keras.Input([3]), *layers, head])

    def build_optimizer(self):
        """SGD with momentum, a moving average and a schedule."""
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
        return keras.optimizers.SGD(rate, momentum=0.9, use_ema=True, ema_momentum=0.5)

    def weights(self):
        """Every weight on the first replica."""
        return [copies(variable)[0] for variable in self.model.weights]

    def by_name(self):
        """Every weight on the first replica, by the layer's name and its own."""
        names = ["/".join(variable.path.split("/")[-2:]) for variable in self.model.weights]
        return dict(zip(names, self.weights(), strict=True))

    def started(self):
        """Builds the trainer as for its first batch."""
        access.start(self, tf.nest.map_structure(tf.constant, DATA))
        return self


def evaluated(trainer):
    """The results of an evaluation in float32."""
    return trainer.evaluate(DATA, global_batch=8)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A short run, evaluated and exported in every possible way."""
    keras.utils.set_random_seed(0)
    path = tmp_path_factory.mktemp("old")
    trainer = Deep(model_dir=path / "run", checkpoints=Checkpoints(interval=2, keep_best=1), seed=3)
    trainer.train(DATA, steps=4, global_batch=4, eval_data=DATA)
    trainer.export(path / "plain.keras", averaged=False)
    trainer.model.save_weights(path / "some.weights.h5")
    trainer.model.save_weights(path / "parts.weights.json", max_shard_size=1e-7)
    return path, trainer


def assert_only_weights(trainer, weights):
    """Checks that a trainer has these weights and is otherwise at its beginning."""
    for ours, theirs in zip(trainer.weights(), weights, strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert trainer.totals.attempted == 0
    assert trainer.loss_scale == 8.0
    assert int(trainer.optimizer.iterations.numpy()) == 0
    slots = [variable for variable in trainer.optimizer.variables if "momentum" in variable.path]
    assert slots
    assert all(not np.any(variable.numpy()) for variable in slots)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "what",
    [
        "run",
        "plain.keras",
        pytest.param("run/ckpt-4", marks=pytest.mark.thorough),
        *(
            pytest.param(what, marks=pytest.mark.slow)
            for what in ("some.weights.h5", "parts.weights.json", "run/best/step-4/model.keras")
        ),
    ],
)
def test_only_the_weights_are_loaded(old, tmp_path, what):
    """Weights and layers' statistics come from a checkpoint, a `model_dir` or a file of Keras
    weights. Slots, averages, counts, scale and the random seed start over.
    """
    path, trainer = old
    weights = trainer.weights()
    if "best" in what:  # a best model holds the averaged weights
        averages = [v for v in trainer.optimizer.variables if v.path.endswith("_average")]
        trained = {variable.path for variable in trainer.model.trainable_variables}
        for place, variable in enumerate(trainer.model.weights):
            if variable.path in trained:
                weights[place] = averages.pop(0).numpy()
        assert averages == []
    new = Deep(
        model_dir=tmp_path / "new", checkpoints=Checkpoints(init_from=path / what), seed=9
    ).started()

    assert_only_weights(new, weights)
    assert int(access.state(new).random_seed.numpy()) == 9
    assert evaluated(new) == evaluated(
        Deep(checkpoints=Checkpoints(init_from=str(path / what)), seed=10).started()
    )


def test_a_named_checkpoint_is_used_and_otherwise_the_newest(old):
    """A path to `ckpt-STEP` selects that checkpoint; a path to a run selects its newest."""
    path, _ = old
    early = Deep(checkpoints=Checkpoints(init_from=path / "run" / "ckpt-2")).started().weights()
    late = Deep(checkpoints=Checkpoints(init_from=path / "run" / "ckpt-4")).started().weights()
    newest = Deep(checkpoints=Checkpoints(init_from=path / "run")).started().weights()

    assert all(np.array_equal(one, other) for one, other in zip(late, newest, strict=True))
    assert not any(np.array_equal(one, other) for one, other in zip(early, late, strict=True))


@pytest.mark.thorough
def test_the_folder_of_a_best_model_is_accepted(old, tmp_path):
    """The folder of a Keras model or of a `tf.Module`."""
    path, _ = old
    by_folder = Deep(checkpoints=Checkpoints(init_from=path / "run" / "best" / "step-4")).started()
    by_file = Deep(
        checkpoints=Checkpoints(init_from=path / "run" / "best" / "step-4" / "model.keras")
    ).started()
    assert_only_weights(by_folder, by_file.weights())

    def make(**arguments):
        return OfModule(verbose=False, **arguments)

    before = make(model_dir=tmp_path, checkpoints=Checkpoints(keep_best=1))
    data = slopes(1.0, 2.0)
    before.train(data, steps=3, global_batch=2, eval_data=data)
    after = make(checkpoints=Checkpoints(init_from=tmp_path / "best" / "step-3"))
    access.start(after, tf.nest.map_structure(tf.constant, data))
    assert after.model.weight.numpy().item() == before.model.weight.numpy().item() == -3.5
    assert after.model.fixed.numpy() == 7.0

    best = Checkpoints(init_from=tmp_path / "best" / "step-3", init_from_skip=["fixed"])
    with pytest.raises(ValueError, match="`init_from_skip`"):
        make(checkpoints=best).train(data, steps=1, global_batch=2)


class Plain(tf.Module):
    """A model without Keras, with one trainable and one other variable."""

    def __init__(self, name="fixed"):
        """Takes the attribute name of the other variable."""
        super().__init__()
        self.weight = tf.Variable([[1.0]])
        setattr(self, name, tf.Variable(1.0, trainable=False, name="any"))

    def __call__(self, x):
        """A linear function."""
        return x @ self.weight


class OfModule(Linear):
    """Trains a `Plain`."""

    attribute = "fixed"

    def build_model(self):
        """A `tf.Module`."""
        return Plain(self.attribute)

    def compute_loss(self, batch, training):
        """The same as in `Linear`."""
        return self.model(batch["x"])[:, 0] * batch["slope"]

    def on_train_begin(self):
        """Sets the variable that is not trained."""
        self.model.fixed.assign(7.0)


def test_a_module_whose_attributes_have_other_names_is_refused(tmp_path):
    """Values are found by attribute names; a variable without one would keep its initial value."""

    class Renamed(OfModule):
        attribute = "renamed"

    data = slopes(1.0, 2.0)
    OfModule(model_dir=tmp_path, verbose=False).train(data, steps=3, global_batch=2)
    for argument, settings in {
        "init_from": {"checkpoints": Checkpoints(init_from=tmp_path)},
        "model_dir": {"model_dir": tmp_path},
    }.items():
        with pytest.raises(ValueError, match=f"(?s)`{argument}`.*any:0"):
            Renamed(**settings, verbose=False).train(data, steps=4, global_batch=2)


@pytest.mark.parametrize("what", ["run", "plain.keras"])
def test_weights_are_loaded_into_another_precision(old, what):
    """Weights are float32 in every precision."""
    path, trainer = old
    new = Deep(checkpoints=Checkpoints(init_from=path / what), precision="mixed_float16").started()

    assert_only_weights(new, trainer.weights())
    assert new.model.layers[0].compute_dtype == "float16"


@pytest.mark.parametrize("what", ["run", "plain.keras"])
def test_every_replica_gets_the_weights(old, mirrored, what):
    """Each replica gets a copy, although the old run had one replica."""
    path, trainer = old
    new = Deep(checkpoints=Checkpoints(init_from=path / what), strategy=mirrored(2)).started()

    assert_only_weights(new, trainer.weights())
    for variable in new.model.weights:
        one, other = copies(variable)
        assert one.tobytes() == other.tobytes()


class Wider(Deep):
    """A model of another shape."""

    units = 5


def refused(trainer, argument="init_from"):
    """Returns the message of the error when a trainer starts."""
    with pytest.raises(ValueError, match=f"`{argument}`") as error:
        trainer.started()
    return str(error.value)


def test_a_checkpoint_of_another_model_is_refused(old):
    """A file of Keras weights is refused by Keras itself."""
    path, _ = old
    refused(Wider(checkpoints=Checkpoints(init_from=path / "run")))
    with pytest.raises(ValueError, match="hape"):
        Wider(checkpoints=Checkpoints(init_from=path / "plain.keras")).started()


class Headless(Deep):
    """The old model without its last layer."""

    def build_model(self):
        """All layers but one."""
        return keras.Sequential([*super().build_model().layers[:-1]])


@pytest.mark.parametrize("what", ["plain.keras", "some.weights.h5", "parts.weights.json"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_file_of_a_larger_model_is_refused(old, mirrored, what, replicas):
    """Keras would load a part of it and say nothing."""
    path, _ = old
    refused(Headless(checkpoints=Checkpoints(init_from=path / what), strategy=mirrored(replicas)))


def test_a_file_of_the_older_format_may_hold_a_layer_twice(tmp_path):
    """It holds the arrays of a shared layer for each of its owners; Keras itself compares layers."""
    shared = keras.layers.Dense(3)

    def model():
        inputs = keras.Input([3])
        inner = keras.Sequential([keras.Input([3]), shared])
        return keras.Model(inputs, keras.layers.Dense(1)(inner(shared(inputs))))

    saved = model()
    saved.save(tmp_path / "old.h5")
    read_file(tmp_path / "old.h5", model())


@pytest.mark.thorough
def test_numbers_that_are_no_weights_may_be_in_a_file(old, tmp_path):
    """Those of the optimizer that Keras trained the model with."""
    _, trainer = old
    whole = keras.models.clone_model(trainer.model)
    whole.compile("adam", "mse", metrics=["mae"])
    whole.fit(ROWS, ROWS[:, :1], verbose=0)
    whole.save(tmp_path / "whole.keras")

    new = Deep(checkpoints=Checkpoints(init_from=tmp_path / "whole.keras")).started()
    assert_only_weights(new, [variable.numpy() for variable in whole.weights])


def test_init_from_must_lead_to_weights(old, tmp_path):
    """An empty folder, a path that does not exist, and a Keras file for a `tf.Module` are refused."""
    path, _ = old
    for where in (tmp_path, tmp_path / "nowhere"):
        refused(Deep(checkpoints=Checkpoints(init_from=where)))
    module = OfModule(checkpoints=Checkpoints(init_from=path / "plain.keras"), verbose=False)
    with pytest.raises(ValueError, match="`init_from`"):
        module.train(slopes(1.0), steps=1, global_batch=1)


def test_damaged_checkpoints_are_not_used(old, tmp_path):
    """The newest undamaged checkpoint of a run is used; naming a damaged one is an error."""
    path, _ = old
    run = shutil.copytree(path / "run", tmp_path / "run")
    (run / "ckpt-4" / "variables.index").write_bytes(b"")
    early = Deep(checkpoints=Checkpoints(init_from=path / "run" / "ckpt-2")).started().weights()
    for ours, theirs in zip(
        Deep(checkpoints=Checkpoints(init_from=run)).started().weights(), early, strict=True
    ):
        assert ours.tobytes() == theirs.tobytes()

    assert "variables.index" in refused(Deep(checkpoints=Checkpoints(init_from=run / "ckpt-4")))


# Some of the weights.


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "skip", "fresh"),
    [
        ({"classes": 5}, ["head/"], ["head"]),
        ({}, ["head/"], ["head"]),
        ({"more": True}, ["^added/"], ["added"]),
        ({"more": True, "classes": 2}, ["^(added|head)/"], ["added", "head"]),
    ],
    ids=["another size", "the same size", "a new layer", "both"],
)
def test_all_but_some_weights_are_loaded(old, mirrored, arguments, skip, fresh):
    """The rest is found by name, wherever it is in the model, and has the bits of the checkpoint;
    what is left out has its initial values. So it is on every replica.
    """
    path, trainer = old
    weights = trainer.by_name()
    keras.utils.set_random_seed(1)
    checkpoints = Checkpoints(init_from=path / "run", init_from_skip=skip)
    new = Deep(**arguments, checkpoints=checkpoints, strategy=mirrored(2), seed=9).started()
    found = new.by_name()

    assert {name.split("/")[0] for name in found} >= set(fresh)
    for name, value in found.items():
        same = name in weights and np.array_equal(value, weights[name])
        if name.split("/")[0] not in fresh:
            assert same, name
        elif name.endswith("kernel"):
            assert not same, name
    for one, other in map(copies, new.model.weights):
        assert one.tobytes() == other.tobytes()
    assert new.totals.attempted == int(new.optimizer.iterations.numpy()) == 0


def test_a_part_of_the_saved_model_is_enough(old):
    """A model without the saved head takes the rest, if the head is left out."""
    path, trainer = old
    checkpoints = Checkpoints(init_from=path / "run", init_from_skip=["head"])
    new = Headless(checkpoints=checkpoints).started()

    for name, value in new.by_name().items():
        np.testing.assert_array_equal(value, trainer.by_name()[name])


@pytest.mark.parametrize(
    ("kind", "arguments", "what", "skip"),
    [
        (Deep, {"more": True}, "run", "head/"),
        (Headless, {}, "run", "body/"),
        (Deep, {}, "run", "haed/"),
        # Such files do not name their values.
        (Deep, {}, "some.weights.h5", "head/"),
        (Deep, {}, "run/best/step-4", "head/"),
    ],
    ids=["a new layer", "a layer less", "a misspelt name", "a file", "a best model"],
)
def test_what_is_not_left_out_must_fit(old, kind, arguments, what, skip):
    """Nothing is left at its initial value without a word."""
    checkpoints = Checkpoints(init_from=old[0] / what, init_from_skip=[skip])
    refused(kind(**arguments, checkpoints=checkpoints), "init_from_skip")


def test_two_weights_of_one_name_are_refused():
    """Values could not be told apart."""
    with pytest.raises(ValueError, match="`init_from_skip`"):
        named(["dense/kernel", "dense/kernel", "other/bias"], [1, 2, 3])
    assert named(["kernel"], [1]) == {"kernel": 1}
