"""Relations between runs that hold for every model, on random models: a run is compared with the same
run at another loss scale, in another order, on other devices, after a restart, or compiled.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from random_models import Recipe, recipes

import scaling
from trainer import Trainer
from trainer.step import TrainState, attempt_step, plan_step

# Keras and NumPy warn about masks that nobody needs, and about copies.
pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore")]

STEPS = 2
TRIED = collections.Counter()  # models by relation


class Variant:
    """How a run differs from the plain one.

    Args:
        rule: the loss-scale rule.
        loss_factor: what the losses are multiplied by.
        rate: the learning rate of SGD.
        strategy: where it runs; None for one device.
        change: a function of a batch that returns another.
        **arguments: more arguments of `plan_step`.
    """

    def __init__(
        self, rule=None, *, loss_factor=1.0, rate=0.0625, strategy=None, change=None, **arguments
    ):
        """Stores the arguments."""
        self.rule = rule or scaling.NoLossScale()
        self.loss_factor, self.rate, self.strategy = loss_factor, rate, strategy
        self.change = change or (lambda batch: batch)
        self.arguments = arguments


def losses_of(model, factor=1.0):
    """The squared errors of a batch, one per example."""

    def compute_loss(batch, training):
        inputs = {name: batch[name] for name in batch if name.startswith("x")}
        outputs = tf.cast(model(inputs, training=training), tf.float32)
        return factor * tf.reduce_mean((outputs - batch["target"]) ** 2, axis=1)

    return compute_loss


def weights_of(batch):
    """The weights in a batch."""
    return batch["weight"]


def trained(recipe, variant=None):
    """All variables of a recipe's model after a few steps of SGD."""
    variant = variant or Variant()
    strategy = variant.strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model, run = recipe.build(), TrainState(variant.rule, seed=recipe.seed)
        plan = plan_step(
            strategy=strategy,
            model=model,
            optimizer=keras.optimizers.SGD(variant.rate),
            compute_loss=losses_of(model, variant.loss_factor),
            rule=variant.rule,
            example_weights=weights_of,
            **variant.arguments,
        )

    def step(batch):
        return attempt_step(batch, plan, run)

    # On one device eager steps cost less than a trace.
    compiled = recipe.in_graph or variant.strategy or variant.arguments.get("jit_compile")
    attempt = tf.function(step, autograph=False) if compiled else step
    for batch in recipe.batches(STEPS):
        report = attempt(tf.nest.map_structure(tf.constant, variant.change(batch)))
        assert report.grads_finite
    return [variable.numpy() for variable in model.variables if "seed" not in variable.path]


def same_bits(first, second):
    """Whether two lists of arrays have the same bits."""
    return [each.tobytes() for each in first] == [each.tobytes() for each in second]


def distance(first, second):
    """The largest difference, relative to the largest value."""
    one, other = (np.concatenate([each.ravel() for each in values]) for values in (first, second))
    return np.abs(one - other).max() / np.abs(one).max()


def permuted(batch):
    """A batch in another order."""
    order = np.random.default_rng(0).permutation(len(batch["weight"]))
    return {name: values[order] for name, values in batch.items()}


def without_weightless(batch):
    """A batch without the examples of weight 0."""
    kept = batch["weight"] > 0
    return {name: values[kept] for name, values in batch.items()}


def doubled_weights(batch):
    """A batch with all weights doubled."""
    return batch | {"weight": 2.0 * batch["weight"]}


def any_model(_):
    """For relations of all models."""
    return True


def not_random(recipe):
    """Random numbers follow the position in the batch."""
    return not recipe.has("random")


def compiled_not_random(recipe):
    """What XLA can compile, without random numbers."""
    return recipe.xla and not_random(recipe)


def independent(recipe):
    """Examples that do not see each other, and no random numbers."""
    return not (recipe.has("random") or recipe.has("couples"))


def only_losses(recipe):
    """No `model.losses`, which weights do not touch."""
    return not recipe.has("adds_loss")


# Name: (the other run, the models for which it holds, the bound on the distance; 0 for the same bits).
ON_ONE_DEVICE = {
    "a loss scale of 2^10": (Variant(scaling.FixedLossScale(2.0**10)), any_model, 0),
    "a loss scale of 2^-6": (Variant(scaling.FixedLossScale(2.0**-6)), any_model, 0),
    "all weights doubled": (Variant(change=doubled_weights), any_model, 0),
    "the loss times 4 at a quarter of the rate": (
        Variant(loss_factor=4.0, rate=0.0625 / 4),
        only_losses,
        0,
    ),
    "the examples permuted": (Variant(change=permuted), not_random, 1e-5),
    "examples of weight 0 removed": (
        Variant(change=without_weightless),
        lambda recipe: independent(recipe) and only_losses(recipe),
        1e-6,
    ),
    "two microbatches": (Variant(num_microbatches=2), independent, 2e-6),
}


def violations(recipe, relations):
    """The distances of the runs that violate a relation, by the relation's name."""
    plain, found = trained(recipe), {}
    for name, (variant, holds_for, bound) in relations.items():
        if not holds_for(recipe):
            continue
        TRIED[name] += 1
        other = trained(recipe, variant)
        apart = distance(plain, other)
        near = apart <= bound
        if not (near and (bound or same_bits(plain, other))):
            found[name] = apart
    return found


def check(recipe, relations):
    """Asserts all relations of a model at once."""
    found = violations(recipe, relations)
    assert not found


# Hypothesis's first model is its smallest one, so each search begins with one of these.
PLAIN = Recipe(("ids", "vector"), (("convolution_1d", "shared"), ("residual",)), seed=1, size=7)
PENALIZED = Recipe(("image", "vector"), (("convolution", "add_loss"), ("activity",)), 2, size=8)
COUPLED = Recipe(("image",), (("convolution", "batch_norm", "dropout"),), seed=3, size=9)


def search(tried, models, *, first, plain=None):
    """Calls `tried` with given recipes and then with random ones; see `recipes` for `plain`."""
    for recipe in first:
        tried(recipe)
    if models:
        test = given(recipe=recipes(plain=plain))(lambda recipe: tried(recipe))  # noqa: PLW0108
        settings(max_examples=models, phases=[Phase.generate])(test)()


def reported(record_property, relations):
    """Prints and records how many models each relation was tried on."""
    for name in relations:
        tried = TRIED.pop(name)
        print(f"{name}: {tried} models, 0 violations")  # noqa: T201
        record_property(name, tried)


@pytest.mark.thorough
def test_relations_on_one_device(full, record_property):
    """L1, L2, L8: another loss scale, doubled weights, and a factor on the loss that the learning rate
    takes back change no bit. Another order, the removal of weightless examples, and microbatches
    change no more than rounding does. Holds for random models.
    """
    search(lambda recipe: check(recipe, ON_ONE_DEVICE), 4 if full else 0, first=[PLAIN, COUPLED])
    reported(record_property, ON_ONE_DEVICE)


@pytest.mark.slow
def test_relations_on_many_models(record_property):
    """The same on many more models."""
    search(lambda recipe: check(recipe, ON_ONE_DEVICE), 120, first=[])
    reported(record_property, ON_ONE_DEVICE)


@pytest.fixture(scope="module")
def on_replicas(mirrored):
    """Relations that need several devices."""
    strategy = mirrored(3)
    return {
        "three replicas with two microbatches": (
            Variant(scaling.FixedLossScale(2.0**10), strategy=strategy, num_microbatches=2),
            independent,
            2e-6,
        ),
    }


@pytest.mark.slow
def test_relations_on_replicas(full, on_replicas, record_property):
    """L8: three replicas with two microbatches each, at another loss scale, take the steps of one device.
    Holds for random models.
    """
    search(
        lambda recipe: check(recipe, on_replicas), 2 if full else 0, first=[PENALIZED], plain=True
    )
    reported(record_property, on_replicas)


COMPILED = {
    "XLA compiles the pass": (Variant(jit_compile=True), compiled_not_random, 1e-5),
    "XLA compiles element-wise operations": (Variant(jit_compile="elementwise"), any_model, 1e-5),
    "XLA compiles the update": (Variant(jit_compile="update"), any_model, 1e-5),
    "XLA compiles the step": (Variant(jit_compile="step"), compiled_not_random, 1e-5),
}


@pytest.mark.slow
def test_compile_modes_agree(full, record_property):
    """L15: what XLA compiles changes no more than rounding does. Holds for random models. (The random
    numbers of Dropout differ under XLA.)
    """
    search(lambda recipe: check(recipe, COMPILED), 2 if full else 0, first=[PLAIN], plain=True)
    reported(record_property, COMPILED)


class Recipes(Trainer):
    """Trains a recipe's model."""

    def __init__(self, recipe, **arguments):
        """Takes the recipe and more arguments of `Trainer`."""
        super().__init__(seed=recipe.seed, verbose=False, jit_compile=False, **arguments)
        self.recipe = recipe

    def build_model(self):
        """The recipe's."""
        return self.recipe.build()

    def build_optimizer(self):
        """Adam, which has slots."""
        return keras.optimizers.Adam(0.01)

    def compute_loss(self, batch, training):
        """Squared errors."""
        return losses_of(self.model)(batch, training)

    def example_weights(self, batch):
        """Those in the batch."""
        return weights_of(batch)


def trained_to(recipe, folder, targets, **arguments):
    """The variables after runs to each of the targets, each by a new trainer."""
    data = {
        name: np.concatenate([batch[name] for batch in recipe.batches(3)])
        for name in recipe.batches(1)[0]
    }
    for target in targets:
        trainer = Recipes(recipe, model_dir=folder, precision="mixed_float16", **arguments)
        trainer.train(data, steps=target, global_batch=recipe.size)
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    return [variable.numpy() for variable in variables], trainer.loss_scale


@pytest.mark.slow
def test_resumed_runs_have_the_same_bits(full, tmp_path_factory, record_property):
    """L12: a run that was stopped after two of five steps and resumed has the bits of one that was not:
    in float16, with shuffled data and random numbers. Holds for random models.
    """

    def tried(recipe):
        whole = trained_to(recipe, tmp_path_factory.mktemp("whole"), [5])
        resumed = trained_to(recipe, tmp_path_factory.mktemp("resumed"), [2, 5])
        TRIED["stopped and resumed"] += 1
        assert whole[1] == resumed[1]
        assert same_bits(whole[0], resumed[0])

    search(tried, 1 if full else 0, first=[COUPLED])
    reported(record_property, ["stopped and resumed"])
