"""Losses and metrics of several outputs mean what they mean in `compile`."""

import keras
import numpy as np
import pytest

from trainer import Losses as Factors
from trainer import Monitoring, Trainer

RNG = np.random.default_rng(4)
X = RNG.normal(size=[12, 3]).astype(np.float32)
Y = {"a": RNG.normal(size=[12, 2]).astype(np.float32), "b": RNG.integers(0, 3, 12)}
LOSSES = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
WEIGHTS = {"a": 0.25, "b": np.int64(2)}


def two_heads(kind=dict):
    """A model with two outputs, in a dict or in a list; the same weights every time."""
    x = keras.Input([3])
    seeds = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
    outputs = {
        name: keras.layers.Dense(units, kernel_initializer=seed, name=f"{name}_head")(x)
        for (name, units), seed in zip({"a": 2, "b": 3}.items(), seeds, strict=True)
    }
    return keras.Model(x, outputs if kind is dict else [*outputs.values()])


def in_list(each):
    """The values of a dict, in a list."""
    return [*each.values()]


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("kind", "weights"),
    [(dict, WEIGHTS), (list, WEIGHTS), (dict, {"b": 2.0}), (dict, None)],
    ids=["dict", "list", "one weight", "no weights"],
)
def test_losses_of_outputs_are_keras_s(mirrored, kind, weights, replicas):
    """L21: the SGD step and the evaluation are those of Keras's `fit` on one device."""
    form = in_list if kind is list else dict
    weights = None if weights is None else form(weights)
    model = two_heads(kind)
    # Keras wants a weight for each loss, or none.
    all_weights = form({"a": 1.0} | weights) if kind is dict and weights else weights
    model.compile(keras.optimizers.SGD(0.5), form(LOSSES), loss_weights=all_weights)
    model.train_on_batch(X, form(Y))
    trainer = Trainer(
        model=lambda: two_heads(kind),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn=form(LOSSES),
        losses=Factors(weights=weights),
        strategy=mirrored(replicas) if replicas > 1 else "default",
        verbose=False,
    )
    data = X, (tuple(form(Y)) if kind is list else Y)
    trainer.train(data, steps=1, global_batch=12)

    for mine, theirs in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    expected = model.evaluate(X, form(Y), batch_size=12, verbose=0, return_dict=True)["loss"]
    assert trainer.evaluate(data, global_batch=12)["loss"] == pytest.approx(expected, rel=1e-6)


def test_an_output_without_a_loss_is_left_out():
    """As in Keras, an output that no loss names needs no labels and does not count."""
    trainer = Trainer(
        model=two_heads,
        optimizer="sgd",
        loss_fn={"a": "mse"},
        monitoring=Monitoring(check_gradients=False),
        verbose=False,
    )
    before = trainer.model.get_layer("b_head").get_weights()[0]
    trainer.train((X, {"a": Y["a"]}), steps=1, global_batch=12)

    np.testing.assert_array_equal(trainer.model.get_layer("b_head").get_weights()[0], before)


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_output_without_a_loss_may_be_a_key(num_microbatches):
    """Text, and integers that float32 does not have, are passed on as they are."""
    numbers = 2**40 + np.arange(6)
    texts = np.array([f"row {number}" for number in numbers])

    def model():
        x, number = keras.Input([2], name="x"), keras.Input([], dtype="int64", name="number")
        text = keras.Input([], dtype="string", name="text")
        y = keras.layers.Dense(1, kernel_initializer="ones")(x)
        return keras.Model({"x": x, "number": number, "text": text}, [y, number, text])

    seen = []

    class Kept(Trainer):
        def update_metrics(self, batch, aux):
            seen.append([each.dtype.name for each in aux])
            super().update_metrics(batch, aux)

    trainer = Kept(
        model=model,
        optimizer="sgd",
        loss_fn=["mse", None, None],
        num_microbatches=num_microbatches,
        verbose=False,
    )
    x = {"x": np.ones([6, 2], np.float32), "number": numbers, "text": texts}
    y = np.ones([6, 1], np.float32), numbers, texts
    trainer.train((x, y), 1, global_batch=6)
    _, *found = trainer.predict(x, global_batch=4)

    assert seen
    assert all(names == ["float32", "int64", "string"] for names in seen)
    np.testing.assert_array_equal(found[0], numbers)
    np.testing.assert_array_equal(found[1], texts.astype("S"))


def one_or_two(form):
    """A model whose outputs are in the given form; the same weights every time."""
    x = keras.Input([3])
    a, b = (
        keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed), name=name)(
            x
        )
        for seed, name in enumerate("ab")
    )
    return keras.Model(x, {"two": [b, a], "tensor": a, "list": [a], "dict": {"head": a}}[form])


BOTH = {"a": Y["a"], "b": Y["a"] + 1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "losses", "labels", "metrics"),
    [
        ("two", {"a": "mse", "b": "mae"}, BOTH, {"a": ["mae"]}),
        ("two", {"a": "mse", "b": "mae"}, [BOTH["b"], BOTH["a"]], {"b": "mse"}),
        ("two", ["mae", "mse"], BOTH, [None, ["mae"]]),
        ("tensor", {"a": "mse"}, Y["a"], {"a": "mae"}),
        ("tensor", ["mse"], Y["a"], None),
        ("tensor", ["mse"], [Y["a"]], None),
        ("list", "mse", Y["a"], ["mae"]),
        ("list", keras.losses.MeanSquaredError(), [Y["a"]], ["mae"]),
        ("list", ["mse"], Y["a"], None),
        ("list", {"a": "mse"}, Y["a"], None),
        ("dict", "mse", Y["a"], ["mae"]),
        ("dict", "mse", {"head": Y["a"]}, ["mae"]),
        ("dict", {"head": "mse"}, Y["a"], None),
    ],
)
def test_names_and_places_stand_for_each_other(form, losses, labels, metrics):
    """Whatever `fit` takes for the outputs of a functional model gives `fit`'s numbers."""
    theirs = one_or_two(form)
    theirs.compile(keras.optimizers.SGD(0.5), losses, metrics=metrics)
    theirs.train_on_batch(X, labels)
    trainer = Trainer(
        model=lambda: one_or_two(form),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn=losses,
        metrics=metrics,
        verbose=False,
    )
    data = X, tuple(labels) if isinstance(labels, list) else labels
    trainer.train(data, steps=1, global_batch=12)

    for mine, other in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6)
    expected = theirs.evaluate(X, labels, batch_size=12, verbose=0, return_dict=True)
    found = trainer.evaluate(data, global_batch=12)
    shorter = {name.removeprefix("a_").removeprefix("head_"): found[name] for name in found}
    compared = found if set(expected) <= set(found) else shorter  # of one output, Keras has no name
    for name, value in expected.items():
        assert compared[name] == pytest.approx(value, rel=1e-6)


def test_a_single_tensor_in_a_list_keeps_its_mask():
    """The mask of the only output counts, whether the output is in a list or not."""

    def tagger(in_list):
        x = keras.Input([4], dtype="int32")
        hidden = keras.layers.Embedding(5, 3, mask_zero=True, embeddings_initializer="ones")(x)
        y = keras.layers.Dense(1, kernel_initializer="ones")(hidden)
        return keras.Model(x, [y] if in_list else y)

    data = np.array([[1, 2, 0, 0], [3, 0, 0, 0]], np.int32), np.ones([2, 4, 1], np.float32)
    found = [
        Trainer(
            model=lambda in_list=in_list: tagger(in_list),
            optimizer="sgd",
            loss_fn="mse",
            metrics=["mae"],
            verbose=False,
        ).evaluate(data, global_batch=2)
        for in_list in (True, False)
    ]

    assert found[0] == found[1]


def test_names_that_no_output_has_are_refused():
    """The error tells the names of the outputs, although the model returns a list."""
    trainer = Trainer(
        model=lambda: one_or_two("two"), optimizer="sgd", loss_fn={"a": "mse", "c": "mae"}
    )
    with pytest.raises(ValueError, match="`loss_fn` must have the structure"):
        trainer.train((X, {"a": Y["a"], "c": Y["a"]}), steps=1, global_batch=12)


def trainer_of(kind, metrics, **arguments):
    """A trainer of `two_heads` with plain SGD."""
    return Trainer(
        model=lambda: two_heads(kind),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn=LOSSES if kind is dict else [*LOSSES.values()],
        losses=Factors(weights=WEIGHTS if kind is dict else [*WEIGHTS.values()]),
        metrics=metrics,
        verbose=False,
        **arguments,
    )


def test_weights_may_be_bools():
    """The examples that are True count, in each output's loss and metrics too."""
    keep = np.arange(12) % 2 == 0
    trainer = trainer_of(dict, {"a": "mae"})
    found = trainer.evaluate((X, Y, keep), global_batch=12)
    alone = X[keep], {name: each[keep] for name, each in Y.items()}
    assert found == pytest.approx(trainer_of(dict, {"a": "mae"}).evaluate(alone, global_batch=4))


@pytest.mark.parametrize(
    ("kind", "replicas"), [pytest.param(dict, 3, marks=pytest.mark.thorough), (list, 1)]
)
def test_each_output_has_its_loss_and_metrics_as_in_compile(mirrored, kind, replicas):
    """The numbers of training and of evaluation have the names and values of Keras's."""
    form = dict if kind is dict else (lambda each: [*each.values()])
    top = keras.metrics.SparseTopKCategoricalAccuracy(2, "top")
    metrics = form({"a": "mae", "b": ["accuracy", top]})
    model = two_heads(kind)
    model.compile("sgd", form(LOSSES), loss_weights=form(WEIGHTS), metrics=metrics)
    model.optimizer.learning_rate = 0.5
    trainer = trainer_of(kind, metrics, strategy=mirrored(replicas) if replicas > 1 else "default")
    data = X, (Y if kind is dict else tuple(Y.values()))
    after = model.train_on_batch(X, form(Y), return_dict=True)
    found = trainer.train_on_batch(data)

    assert found == pytest.approx(
        {name: np.float64(each) for name, each in after.items()}, rel=1e-5
    )
    after = model.evaluate(X, form(Y), batch_size=4, verbose=0, return_dict=True)
    assert trainer.evaluate(data, global_batch=4) == pytest.approx(after, rel=1e-5)


def test_losses_of_outputs_are_weighted_as_the_loss_is():
    """With weights of examples, the loss is still the weighted sum of the outputs' losses, also where
    an example that weighs nothing has a loss of NaN.
    """
    weight = np.arange(12, dtype=np.float32)
    labels = Y | {"a": np.where(weight[:, None] == 0, np.nan, Y["a"]).astype(np.float32)}
    found = trainer_of(dict, None).evaluate((X, labels, weight), global_batch=3)

    assert set(found) == {"loss", "a_loss", "b_loss"}
    assert found["loss"] == pytest.approx(0.25 * found["a_loss"] + 2.0 * found["b_loss"], rel=1e-6)


@pytest.mark.parametrize("metrics", [["mae"], {"aa": "mae"}, {"a": ["mae", "mae"]}])
def test_metrics_that_fit_no_output_are_refused(metrics):
    """By another structure, a name that no output has, and a name that stands twice."""
    with pytest.raises(ValueError, match="`metrics` must"):
        trainer_of(dict, metrics).evaluate((X, Y), global_batch=12)
