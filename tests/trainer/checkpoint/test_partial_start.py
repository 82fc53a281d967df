"""`init_from_skip`: a new run starts from some of the weights of an old one."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, copies

from trainer import Checkpoints
from trainer.checkpoint.partial_start import named

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)

ROWS = np.random.default_rng(2).normal(size=[8, 3]).astype(np.float32)
DATA = {"x": ROWS, "slope": ROWS[:, 0]}


class Named(Linear):
    """A body with BatchNorm, more layers on request, and a head of some size."""

    def __init__(self, classes=1, more=False, **arguments):
        """Takes the size of the head, and whether a layer stands between body and head."""
        self.classes, self.more = classes, more
        super().__init__(verbose=False, jit_compile=False, **arguments)

    def build_model(self):
        """A Sequential, whose own name differs from run to run."""
        layers = [keras.layers.Dense(4, name="body"), keras.layers.BatchNormalization(name="norm")]
        if self.more:
            layers.append(keras.layers.Dense(4, name="added"))
        head = keras.layers.Dense(self.classes, name="head")
        return keras.Sequential([keras.Input([3]), *layers, head])

    def compute_loss(self, batch, training):
        """The squared error of the first output."""
        return (self.model(batch["x"], training=training)[:, 0] - batch["slope"]) ** 2

    def build_optimizer(self):
        """SGD with momentum."""
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def started(self):
        """Builds the trainer as for its first batch."""
        access.start(self, tf.nest.map_structure(tf.constant, DATA))
        return self

    def by_name(self):
        """Every weight on the first replica, by the layer's name and its own."""
        return {"/".join(v.path.split("/")[-2:]): copies(v)[0] for v in self.model.weights}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A short run with a head of 1."""
    keras.utils.set_random_seed(0)
    path = tmp_path_factory.mktemp("old")
    trainer = Named(model_dir=path / "run", checkpoints=Checkpoints(keep_best=1), seed=3)
    trainer.train(DATA, steps=3, global_batch=4, eval_data=DATA)
    trainer.model.save_weights(path / "some.weights.h5")
    return path, trainer.by_name()


def check_loaded(trainer, weights, fresh):
    """Asserts that all but the fresh layers have the old bits, and that the fresh ones have not."""
    found = trainer.by_name()
    for name, value in found.items():
        layer = name.split("/", maxsplit=1)[0]
        same = name in weights and np.array_equal(value, weights[name])
        if layer not in fresh:
            assert same, name
        elif name.endswith("kernel"):
            assert not same, name
    assert {name.split("/")[0] for name in found} >= set(fresh)


@pytest.mark.parametrize(
    ("arguments", "skip", "fresh"),
    [
        ({"classes": 5}, ["head/"], ["head"]),
        ({"classes": 1}, ["head/"], ["head"]),
        ({"more": True}, ["^added/"], ["added"]),
        ({"more": True, "classes": 2}, ["^(added|head)/"], ["added", "head"]),
        ({}, ["kernel$"], ["body", "head"]),
    ],
    ids=["another size", "the same size", "a new layer", "both", "kernels"],
)
def test_all_but_some_weights_are_loaded(old, arguments, skip, fresh):
    """The rest is found by name, wherever it is in the model, and has the bits of the checkpoint;
    what is left out has its initial values.
    """
    path, weights = old
    keras.utils.set_random_seed(1)
    new = Named(
        **arguments, checkpoints=Checkpoints(init_from=path / "run", init_from_skip=skip), seed=9
    ).started()
    if skip == ["kernel$"]:
        weights = {name: value for name, value in weights.items() if "kernel" not in name}
        found = {name: value for name, value in new.by_name().items() if name in weights}
        assert all(np.array_equal(value, weights[name]) for name, value in found.items())
        assert len(found) == 6
    else:
        check_loaded(new, weights, fresh)
    assert new.totals.attempted == 0
    assert int(new.optimizer.iterations.numpy()) == 0


def test_a_part_of_the_saved_model_is_enough(old):
    """A model without the saved head takes the rest, if the head is left out."""
    path, weights = old

    class Headless(Named):
        def build_model(self):
            return keras.Sequential(super().build_model().layers[:-1])

    new = Headless(
        checkpoints=Checkpoints(init_from=path / "run", init_from_skip=["head"])
    ).started()
    check_loaded(new, weights, [])


def test_every_replica_gets_the_weights(old, mirrored):
    """Also layers' statistics."""
    path, weights = old
    new = Named(
        classes=2,
        checkpoints=Checkpoints(init_from=path / "run", init_from_skip=["head/"]),
        strategy=mirrored(2),
    ).started()
    for variable in new.model.weights:
        name = "/".join(variable.path.split("/")[-2:])
        if not name.startswith("head"):
            for copy in copies(variable):
                np.testing.assert_array_equal(copy, weights[name])


@pytest.mark.parametrize(
    ("arguments", "skip", "message"),
    [
        ({"classes": 5}, ["bias$"], "hape"),
        ({"more": True}, ["head/"], "`init_from_skip`.*'added/bias'"),
        ({}, ["haed/"], "`init_from_skip`.*'haed/'"),
    ],
    ids=["another shape", "a new layer", "a misspelt name"],
)
def test_what_is_not_left_out_must_fit(old, arguments, skip, message):
    """Nothing is left at its initial value without a word."""
    path, _ = old
    trainer = Named(
        **arguments, checkpoints=Checkpoints(init_from=path / "run", init_from_skip=skip)
    )
    with pytest.raises(ValueError, match=message):
        trainer.started()


def test_a_saved_weight_without_a_place_is_named(old):
    """What the model lacks must be left out, too."""
    path, _ = old

    class Headless(Named):
        def build_model(self):
            return keras.Sequential(super().build_model().layers[:-1])

    with pytest.raises(ValueError, match=r"`init_from_skip`.*'head/bias'"):
        Headless(
            checkpoints=Checkpoints(init_from=path / "run", init_from_skip=["body/"])
        ).started()


@pytest.mark.parametrize("what", ["some.weights.h5", "run/best/step-3"])
def test_a_file_of_keras_weights_is_refused(old, what):
    """Such files do not name their values."""
    path, _ = old
    with pytest.raises(ValueError, match="`init_from_skip`"):
        Named(checkpoints=Checkpoints(init_from=path / what, init_from_skip=["head/"])).started()


def test_two_weights_of_one_name_are_refused():
    """Values could not be told apart."""
    with pytest.raises(ValueError, match="init_from_skip"):
        named(["dense/kernel", "dense/kernel", "other/bias"], [1, 2, 3])
    assert named(["kernel"], [tf.constant(1)]) == {"kernel": tf.constant(1)}
