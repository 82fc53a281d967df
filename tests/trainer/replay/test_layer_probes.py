"""Probes that find the first inf or NaN in a model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.replay.layer_probes import Probes, is_innermost, probed_layers, probing


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
