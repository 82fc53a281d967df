"""L18: a recorded step gives the same verdict when it is replayed."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, slopes

import scaling
from scaling import Cause
from trainer import Checkpoints, Skips, Trainer
from trainer.replay.recorder import read_record
from trainer.replay.rerun import Probes, is_innermost, probed_layers, probing


@keras.saving.register_keras_serializable()
class Planted(keras.layers.Layer):
    """The distance from 7, which has no derivative at 7. At 8 the output is infinite."""

    def call(self, inputs):
        """Takes the square root of a square: at 0 the derivative of the root is infinite."""
        broken = keras.ops.where(inputs == 8.0, keras.ops.full_like(inputs, np.inf), 0.0)
        return keras.ops.sqrt(keras.ops.square(inputs - 7.0)) + broken


class Layered(Linear):
    """A model with Dropout and BatchNorm and a planted layer in the middle, on 4 columns of `x`."""

    def build_model(self):
        """Five layers, named for the tests."""
        return keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Dropout(0.5, seed=3, name="dropout"),
                keras.layers.Dense(4, kernel_initializer="identity", name="below"),
                Planted(name="planted"),
                keras.layers.BatchNormalization(name="above"),
                keras.layers.Dense(1, name="last"),
            ]
        )

    def build_optimizer(self):
        """A tiny learning rate, so that a 7 stays a 7 in float16."""
        return keras.optimizers.SGD(2.0**-20)


def batch(kind, example, examples=24):
    """A batch in which one example is not finite in the backward pass, forward pass or loss."""
    rng = np.random.default_rng(5)
    values = {
        "x": rng.normal(size=[examples, 4]).astype(np.float32),
        # With equal slopes BatchNorm would pass no gradient.
        "slope": rng.uniform(0.5, 1.5, examples).astype(np.float32),
    }
    if kind == "loss":
        values["slope"][example] = np.inf
    elif kind == "overflow":
        values["slope"][example] = 1e6
    elif kind:
        # Dropout zeroes a value or doubles it: 3.5 becomes 7, and 4 becomes 8.
        values["x"][example] = {"backward": 3.5, "forward": 4.0}[kind]
    return values


def record(tmp_path, kind, example=0, steps=8, **arguments):
    """Trains on a good and a bad batch in turn; returns the trainer and the records' folders."""
    batches = [batch(None, 0), batch(kind, example)]
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]]), batches[0])
    data = untuned(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs))
    trainer = Layered(
        model_dir=tmp_path,
        verbose=False,
        skips=Skips(max_records=2),
        seed=1,
        checkpoints=Checkpoints(data_resume="restart"),
        **arguments,
    )
    trainer.train(data, steps=steps)
    return trainer, sorted((tmp_path / "overflows").iterdir())


PLACES = {
    "backward": "the gradient of the input of layer 'planted'",
    "forward": "the output of layer 'planted'",
    "overflow": "the gradient of the output of layer 'last'",
    "loss": "the loss (all outputs of layers are finite)",
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("backward", marks=pytest.mark.slow),
        pytest.param("forward", marks=pytest.mark.slow),
        "overflow",
        pytest.param("loss", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("replicas", "num_microbatches"), [pytest.param(1, 1, marks=pytest.mark.slow), (3, 2)]
)
def test_a_record_gives_the_same_verdict_and_names_the_layer(
    tmp_path, mirrored, kind, replicas, num_microbatches
):
    """L18: a replay has the same cause, variable, replica and counts as the recorded step, also
    with Dropout, and names the first layer whose output, or else whose gradient, is not finite.
    """
    settings = {
        "strategy": mirrored(replicas) if replicas > 1 else "default",
        "precision": "mixed_float16",
        "jit_compile": False,
        "loss_scale": 2.0**12,
        "num_microbatches": num_microbatches,
    }
    _, records = record(tmp_path / "run", kind, example=23, **settings)
    kept = [read_record(path)[0] for path in records]
    replay = Layered(verbose=False, **settings).replay(records[-1])

    assert replay.same, str(replay)
    assert Cause(kept[-1].cause) is (
        Cause.FORWARD if kind in ("forward", "loss") else Cause.BACKWARD
    )
    assert kept[-1].bad_replica == replicas - 1
    assert replay.place == PLACES[kind]


@pytest.mark.slow
def test_recording_does_not_change_the_run(tmp_path):
    """A run with the recorder ends with the same bits as one without, although its loops end
    early.
    """
    rule = scaling.DynamicLossScale(2.0**12)
    half = {"precision": "mixed_float16", "jit_compile": False, "loss_scale": rule}
    trainer, _ = record(tmp_path / "a", "overflow", steps_per_loop=5, **half)
    batches = [batch(None, 0), batch("overflow", 0)]
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]]), batches[0])
    data = untuned(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs))
    plain = Layered(verbose=False, seed=1, **half)
    plain.train(data, steps=8)

    assert trainer.totals == plain.totals
    for ours, theirs in zip(trainer.model.weights, plain.model.weights, strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.slow
def test_a_plain_module_is_replayed_too(tmp_path):
    """A `tf.Module` has no layers to probe, but its random numbers are restored."""

    class Noisy(Linear):
        def build_model(self):
            model = tf.Module()
            model.weight = tf.Variable(1.0)
            model.generator = tf.random.Generator.from_seed(3)
            return model

        def compute_loss(self, batch, training):
            del training
            noise = self.model.generator.uniform([])
            # Some steps with a slope of 3 overflow by chance, and none with a slope of 1. A
            # skipped step restores the generator; the next one draws the same number.
            factor = tf.where(noise * batch["slope"] > 1.5, np.inf, 1.0)
            return self.model.weight * batch["slope"] * factor

    arguments = {"verbose": False, "skips": Skips(max_records=9)}
    data = untuned(tf.data.Dataset.from_tensor_slices(slopes(1.0, 3.0)).batch(1))
    Noisy(model_dir=tmp_path, **arguments).train(data, steps=20)
    records = sorted((tmp_path / "overflows").iterdir())
    replays = [Noisy(verbose=False).replay(path) for path in records]

    assert len(records) > 2
    assert all(replay.same for replay in replays)
    assert {replay.place for replay in replays} == {None}


@pytest.mark.thorough
def test_what_cannot_be_replayed_is_refused(tmp_path):
    """The verdict of another model or other settings, and the layer that it would name, say nothing of
    the recorded step.
    """

    class Rescaled(Layered):
        def build_model(self):
            layers = super().build_model().layers
            return keras.Sequential([keras.Input([4]), keras.layers.Rescaling(0.5), *layers])

    _, [path, _] = record(tmp_path, "loss")
    with pytest.raises(ValueError, match=r"`model.layers\[0\]`"):
        Rescaled(verbose=False).replay(path)
    with pytest.raises(ValueError, match="`loss_scale`"):
        Layered(verbose=False, loss_scale=4.0).replay(path)
    with pytest.raises(ValueError, match="`num_microbatches`"):
        Layered(verbose=False, num_microbatches=2).replay(path)
    with pytest.raises(ValueError, match="`overflow`"):
        Layered(verbose=False).replay(tmp_path)
    assert Layered(verbose=False).replay(path).same


@keras.saving.register_keras_serializable()
class Block(keras.layers.Layer):
    """A layer that contains another one, and overflows float16 by itself after it."""

    def __init__(self, **arguments):
        """With a dense layer."""
        super().__init__(**arguments)
        self.inner = keras.layers.Dense(4, name="inner")

    def call(self, inputs):
        """More than 65504, for any output of the dense layer that is not tiny."""
        return self.inner(inputs) * 6e4 * 6e4


def between_layers():
    """A functional model that overflows between two layers."""
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4, name="inner")(inputs) * 6e4 * 6e4
    return keras.Model(inputs, keras.layers.Dense(1, name="innocent")(hidden))


def within_a_block():
    """A model whose block overflows outside of the layer in it."""
    return keras.Sequential(
        [keras.Input([4]), Block(name="block"), keras.layers.Dense(1, name="innocent")]
    )


def in_a_weight():
    """A model without biases, whose weight alone has a large gradient if the inputs are large."""
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1, use_bias=False, name="dense")])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "size", "place"),
    [
        (between_layers, 1.0, "the input of layer 'innocent'"),
        (within_a_block, 1.0, "the output of layer 'block'"),
        (
            in_a_weight,
            3e4,
            "the gradient of sequential/dense/kernel (those of all layers are finite)",
        ),
    ],
)
def test_no_innocent_layer_is_named(tmp_path, model, size, place):
    """What overflows between layers, or in a layer around others, or in the product for a weight."""
    settings = {
        "model": model,
        "optimizer": "sgd",
        "loss_fn": lambda labels, outputs: outputs[:, 0] * labels,
        "precision": "mixed_float16",
        "loss_scale": 2.0**4,
        "jit_compile": False,
        "verbose": False,
    }
    data = np.full([8, 4], size, np.float32), np.ones([8], np.float32)
    trainer = Trainer(model_dir=tmp_path, skips=Skips(max_records=1), **settings)
    trainer.train(data, steps=1, global_batch=8)
    replay = Trainer(**settings).replay(tmp_path / "overflows" / "step-00000001")

    assert replay.same, str(replay)
    assert re.sub(r"_\d+/", "/", replay.place) == place


# Probes.


def test_all_layers_but_cells_are_probed():
    """A nested model is probed beside its layers, and a recurrent layer is not entered."""
    inner = keras.Sequential([keras.Input([3, 2]), keras.layers.LSTM(2, name="recurrent")])
    model = keras.Sequential(
        [keras.Input([3, 2]), inner, keras.layers.Dense(1, name="last")], name="outer"
    )
    probed = {each.name: is_innermost(each) for each in probed_layers(model)}

    expected = {"outer": False, inner.name: False, "recurrent": True, "last": True}
    assert {k: v for k, v in probed.items() if not k.startswith("input")} == expected


def checks(values):
    """What probes find in x -> sqrt(x) at some values: forward and backward, by place."""

    @tf.function(autograph=False)
    def traced(x):
        probes = Probes()
        with tf.GradientTape() as tape:
            tape.watch(x)
            root = tf.sqrt(probes.watch(x, "the input"))
            root = probes.watch(root, "the middle", backward=False)
            output = probes.watch({"root": root, "count": tf.constant(1)}, "the output")
            loss = tf.reduce_sum(output["root"])
        tape.gradient(loss, x)
        return dict(probes.forward), dict(probes.backward)

    return tf.nest.map_structure(lambda finite: bool(finite.numpy()), traced(tf.constant(values)))


@pytest.mark.parametrize(
    ("values", "output", "gradient"),
    [([1.0, 4.0], True, True), ([1.0, 0.0], True, False), ([1.0, np.inf], False, True)],
)
def test_a_probe_sees_values_and_gradients(values, output, gradient):
    """Values are checked going forward, gradients going back; an integer tensor is passed through."""
    forward, backward = checks(values)

    finite = all(np.isfinite(values))
    assert forward == {"the input": finite, "the middle": output, "the output": output}
    assert backward == {
        "the gradient of the output": True,
        "the gradient of the input": gradient,
    }


def test_probed_layers_compute_what_they_computed_before():
    """Inside the context every layer is probed by name; afterwards the layers are as they were."""
    layers = [keras.layers.Dense(2, name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential([keras.Input([3]), *layers])
    x = tf.random.normal([4, 3])
    expected, calls = model(x).numpy(), [layer.call for layer in layers]

    @tf.function(autograph=False)
    def probed(x):
        with probing(model) as probes:
            return model(x), dict(probes.forward)

    outputs, finite = probed(x)

    np.testing.assert_allclose(outputs.numpy(), expected, rtol=1e-6)
    names = ["first", "second"]
    around = [f"the {end} of layer {model.name!r}" for end in ("input", "output")]
    between = [f"the {end} of layer {name!r}" for name in names for end in ("input", "output")]
    assert list(finite) == [around[0], *between, around[1]]
    assert all(bool(each.numpy()) for each in finite.values())
    assert [layer.call for layer in layers] == calls


def test_probes_leave_the_mask_of_an_outer_layer():
    """Keras finds a mask by the tensor that a model returns, so that must stay the same one."""
    encoder = keras.Sequential(
        [keras.layers.Embedding(5, 2, mask_zero=True), keras.layers.Dense(2)], name="encoder"
    )
    outer = keras.Sequential([keras.Input([3], dtype="int32"), encoder, keras.layers.Dense(1)])
    ids = tf.constant([[1, 2, 0]])
    masks = []

    @tf.function(autograph=False)
    def probed(ids):
        with probing(outer):
            masks.append(getattr(outer(ids), "_keras_mask", None) is not None)
        return ids

    probed(ids)
    assert masks == [True]
