"""The cases of Keras 3.15's tests of rematerialization and float8."""

import keras
import numpy as np
import pytest
from helpers import attempt, copies

from trainer import Trainer


def sgd(rate=1.0, **arguments):
    """A function that returns a new SGD."""
    return lambda: keras.optimizers.SGD(rate, **arguments)


# remat_test.py, layer_test.py, operation_test.py


def trained(build, precision="float32", **arguments):
    """The weights of a model after two steps of SGD with the mean squared error."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x, y = random.standard_normal([2, 8, 4]).astype(np.float32)
    settings = {"loss_fn": "mse", "verbose": False, "jit_compile": False} | arguments
    trainer = Trainer(model=build, optimizer=sgd(0.1), precision=precision, **settings)
    reports = list(attempt(trainer, [(x, y[:, :1])] * 2))
    assert all(report.grads_finite for report in reports)
    return [copies(variable)[-1] for variable in trainer.model.trainable_variables]


def layers(*, remat=None):
    """Two dense layers, a convolution of their outputs and a third one. A scope may be around all."""
    with remat or keras.name_scope("plain"):
        inputs = keras.Input([4])
        hidden = keras.layers.Dense(6, activation="relu")(inputs)
        hidden = keras.layers.Reshape([6, 1])(hidden)
        hidden = keras.layers.Conv1D(3, 2, activation="tanh")(hidden)
        hidden = keras.layers.Flatten()(hidden)
        return keras.Model(inputs, keras.layers.Dense(1, name="last")(hidden))


def of_lambda():
    """A rematerialized function in a Lambda layer, between dense layers (test_remat_basic_call)."""
    relu = keras.remat(keras.layers.ReLU())
    inner = [keras.layers.Dense(4), keras.layers.Lambda(relu), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input([4]), *inner])


SCOPES = {
    "full": {"mode": "full"},
    "list": {"mode": "list_of_layers", "layer_names": ["last"]},
    "larger than 0": {"mode": "larger_than", "output_size_threshold": 0},
}


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_remat_of_activations(mirrored, replicas):
    """Layers whose activations are rematerialized learn as others (test_rematerialized_call_none and
    the mode "activations").
    """
    strategy = {"strategy": mirrored(replicas)} if replicas > 1 else {}
    expected = trained(layers)
    found = trained(lambda: layers(remat=keras.RematScope(mode="activations")), **strategy)

    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", SCOPES)
def test_remat_scopes_fail_in_graphs(mode):
    """Keras calls a whole layer in a scope with keywords, which `tf.custom_gradient` refuses in graphs.
    Keras's own cases call such layers eagerly; its `fit` and every step here raise the same error
    (test_layer_with_remat, test_functional_model_with_remat, test_remat_wrapper_list_of_layers,
    test_remat_larger_than_mode).
    """

    def build():
        return layers(remat=keras.RematScope(**SCOPES[mode]))

    with pytest.raises(ValueError, match="keywords arguments only when eager"):
        trained(build)
    model, x = build(), np.ones([8, 4], np.float32)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="keywords arguments only when eager"):
        model.fit(x, x[:, :1], verbose=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "precision", ["mixed_float16", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_remat_of_a_layer(precision):
    """A layer wrapped by `keras.remat` learns (test_remat_basic_call, test_rematerialized_call)."""
    first, *_ = trained(of_lambda, precision)
    plain, *_ = trained(
        lambda: keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(4), keras.layers.ReLU(), keras.layers.Dense(1)]
        ),
        precision,
    )

    np.testing.assert_allclose(first, plain, rtol=1e-5)


# dense_test.py and einsum_dense_test.py


def float8(kind="dense"):
    """A dense layer in float8."""
    layer = (
        keras.layers.Dense(1)
        if kind == "dense"
        else keras.layers.EinsumDense("ab,bc->ac", output_shape=1, bias_axes="c")
    )
    model = keras.Sequential([keras.Input([4]), layer])
    layer.quantize("float8")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "division"),
    [
        ("dense", {"replicas": 2, "num_microbatches": 2}),
        ("dense", {}),
        ("dense", {"num_microbatches": 2}),
        ("einsum", {"replicas": 2}),
    ],
    ids=str,
)
def test_float8_statistics(mirrored, kind, division):
    """After a step, the newest entry of each amax history is the largest magnitude of the whole batch,
    and of the kernel; the scales follow from it (test_quantize_float8, test_quantize_float8_fitting).
    """
    arguments = dict(division)
    if replicas := arguments.pop("replicas", None):
        arguments["strategy"] = mirrored(replicas)
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x, y = random.standard_normal([2, 8, 4]).astype(np.float32)
    trainer = Trainer(
        model=lambda: float8(kind),
        optimizer=sgd(0.01),
        loss_fn="mse",
        precision="mixed_bfloat16",
        loss_scale=2.0**10,
        verbose=False,
        jit_compile=False,
        **arguments,
    )
    kernels = []
    for _ in range(2):
        list(attempt(trainer, [(x, y[:, :1])]))
        layer = trainer.model.layers[0]
        kernels.append(np.abs(copies(layer.kernel)[-1]).max())

    inputs, kernel = copies(layer.inputs_amax_history)[-1], copies(layer.kernel_amax_history)[-1]
    np.testing.assert_allclose(inputs[[0, -1]], np.abs(x).max(), rtol=2.0**-7)
    np.testing.assert_allclose(kernel[0], kernels[0], rtol=2.0**-7)
    assert not inputs[1:-1].any()
    assert copies(layer.outputs_grad_amax_history)[-1][0] > 0
    assert 0 < copies(layer.inputs_scale)[-1] < 1
    assert len(trainer.model.trainable_variables) == 8


def test_float8_evaluation():
    """An evaluation is the model's own call, in float8, and changes no statistics
    (test_quantize_float8_inference).
    """
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal([8, 4]).astype(np.float32)
    model = float8()
    expected = model(x, training=False).numpy()
    before = [variable.numpy().tobytes() for variable in model.variables]
    trainer = Trainer(model=model, optimizer="sgd", loss_fn="mse", verbose=False)
    predicted = trainer.predict(x, global_batch=4)

    np.testing.assert_allclose(predicted, expected, rtol=1e-6)
    assert [variable.numpy().tobytes() for variable in model.variables] == before
