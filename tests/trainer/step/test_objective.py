"""Several optimizers: each updates its own part of the model, in one step with one verdict."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import attempt, copies, reset_step_count

import scaling
from scaling import Cause
from trainer import Skips, Trainer, Updates
from trainer.base.tracking import read_copies, write_copies
from trainer.step.objective import ONLY, objectives_of

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(1)]

# The order in which they move if they alternate.
NAMES = ["discriminator", "generator"]
# BatchNorm of two nearly equal examples has steep gradients, which can overflow at 2^15.
RULE = scaling.DynamicLossScale(2.0**8)


class Pair(keras.Model):
    """A generator of points in the plane and a discriminator."""

    def __init__(self):
        """Smooth layers, so that a float32 reference stays close. Only the generator
        has a penalty.
        """
        super().__init__()
        dense = keras.layers.Dense
        self.generator = keras.Sequential(
            [
                keras.Input([2]),
                dense(5, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
                dense(2),
            ]
        )
        self.discriminator = keras.Sequential(
            [keras.Input([2]), dense(6, activation="tanh"), dense(1)]
        )


def game(model, batch, fake, training):
    """The logistic losses of the generator and the discriminator, one each per example."""
    of_real, of_fake = (
        tf.cast(model.discriminator(points, training=training)[:, 0], tf.float32)
        for points in (batch["real"], fake)
    )
    return {
        "discriminator": tf.nn.softplus(-of_real) + tf.nn.softplus(of_fake),
        "generator": tf.nn.softplus(-of_fake),
    }


class Duel(Trainer):
    """`Pair`, with momentum for the generator and Adam for the discriminator."""

    def build_model(self):
        """Returns both parts."""
        return Pair()

    def build_optimizer(self):
        """Returns an optimizer for each part."""
        return build_optimizers()

    def compute_loss(self, batch, training):
        """The losses, with the noise from the batch."""
        fake = self.model.generator(batch["noise"], training=training)
        return game(self.model, batch, fake, training)

    def example_weights(self, batch):
        """The weights in the batch."""
        return batch["weight"]


def build_optimizers():
    """Adam for the discriminator, momentum for the generator."""
    return {
        "discriminator": keras.optimizers.Adam(0.01),
        "generator": keras.optimizers.SGD(0.1, momentum=0.9),
    }


def batches():
    """Random points, noise and weights. The size of the last batch is not divisible by 3."""
    random = np.random.default_rng(2)
    return [
        {
            "real": random.standard_normal([size, 2]).astype(np.float32) + np.float32([2, 0]),
            "noise": random.standard_normal([size, 2]).astype(np.float32),
            "weight": random.choice([0.5, 1.0, 3.0], size).astype(np.float32),
        }
        for size in (12, 12, 12, 7)
    ]


def reference(alternate):
    """The weights after each batch, in plain TensorFlow and float32.

    No replicas, microbatches or loss scale: tapes, Keras's optimizers, and the order written out.
    """
    keras.utils.set_random_seed(3)
    model, optimizers = Pair(), build_optimizers()
    weights = []
    for batch in batches():
        for group in [[name] for name in NAMES] if alternate else [NAMES]:
            gradients = {}
            for name in group:
                variables = getattr(model, name).trainable_variables
                with tf.GradientTape() as tape:
                    losses = game(model, batch, model.generator(batch["noise"]), training=True)
                    weighted = tf.reduce_sum(losses[name] * batch["weight"])
                    loss = weighted / tf.reduce_sum(batch["weight"]) + tf.add_n(model.losses)
                gradients[name] = tape.gradient(loss, variables)
            for name in group:
                optimizers[name].apply(gradients[name], getattr(model, name).trainable_variables)
        weights.append(model.get_weights())
    return weights


@pytest.fixture(scope="module")
def references():
    """The simultaneous and the alternating reference."""
    return {alternate: reference(alternate) for alternate in (False, True)}


def largest_difference(these, those):
    """The largest difference between two lists of arrays."""
    return max(np.abs(this - that).max() for this, that in zip(these, those, strict=True))


@pytest.mark.slow
@pytest.mark.replicas(1, 3)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("alternate", [False, True])
def test_several_optimizers_agree_with_tensorflow(
    mirrored, references, alternate, replicas, num_microbatches
):
    """L8: the weights after each step are those of a plain float32 loop to 1e-6, on R replicas x M
    microbatches, both if all gradients are taken at the old weights and if the second optimizer's
    are taken after the first has moved. Each order is far from the other's reference.
    """
    trainer = Duel(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        num_microbatches=num_microbatches,
        updates=Updates(alternate_optimizers=alternate),
        seed=3,
        verbose=False,
    )
    reports = attempt(trainer, batches())
    for step, report in enumerate(reports):
        weights = trainer.model.get_weights()
        expected, other = references[alternate][step], references[not alternate][step]

        assert report.grads_finite
        assert largest_difference(weights, expected) <= 1e-6, f"step {step}"
        assert largest_difference(weights, other) > 1e-4, f"step {step}"


class Everywhere(keras.Model):
    """`Pair` with statistics, Dropout and the model's own noise."""

    def __init__(self):
        """Creates every kind of variable that a step moves."""
        super().__init__()
        layers = keras.layers
        self.noise = keras.random.SeedGenerator(4)
        self.generator = keras.Sequential(
            [
                keras.Input([2]),
                layers.Dense(5, use_bias=False),  # BatchNorm would cancel the bias
                layers.BatchNormalization(),
                layers.Dense(2),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input([2]),
                layers.Dense(6, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dropout(0.25, seed=5),
                layers.Dense(1),
            ]
        )


class Poisoned(Duel):
    """Float16. A batch says whose gradient overflows, and for which example."""

    def build_model(self):
        """See `Everywhere`."""
        return Everywhere()

    def build_metrics(self):
        """Returns a mean."""
        return {"mean": keras.metrics.Mean()}

    def update_metrics(self, batch, aux):
        """Updates the mean."""
        self.metrics["mean"].update_state(aux)

    def compute_loss(self, batch, training):
        """A slope of 1e6 leaves the loss finite and overflows float16 in the backward pass."""
        noise = keras.random.normal(tf.shape(batch["real"]), seed=self.model.noise)
        fake = self.model.generator(noise, training=training)
        losses = game(self.model, batch, fake, training)
        return {name: losses[name] * batch[name] for name in losses}, losses["generator"]

    def example_weights(self, batch):
        """Equal weights."""
        return tf.ones_like(batch["generator"])

    def moving(self):
        """Every variable that a step may move, except the loss scale and the counts."""
        slots = [v for name in NAMES for v in self.optimizer[name].variables]
        return [*self.model.variables, *slots, *self.metrics["mean"].variables]

    def bits(self):
        """The bytes of every copy of these variables, by place and name."""
        return {
            f"{place} {variable.path} copy {copy}": value.tobytes()
            for place, variable in enumerate(self.moving())
            for copy, value in enumerate(copies(variable))
        }

    def part_of(self, position):
        """The part that holds the model's variable at this position."""
        variable = self.model.trainable_variables[position]
        [owner] = [
            name
            for name in NAMES
            if any(variable is held for held in getattr(self.model, name).trainable_variables)
        ]
        return owner

    def updates(self):
        """The number of updates that each optimizer has counted, on each copy."""
        return {
            name: [int(copy) for copy in copies(self.optimizer[name].iterations)] for name in NAMES
        }


def moved(before, after):
    """The names whose bits differ."""
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def points(examples, bad=(), place=0, seed=0, slope=1e6):
    """A batch in which the slopes of the parts in `bad` overflow for one example."""
    random = np.random.default_rng(seed)
    batch = {name: np.ones(examples, np.float32) for name in NAMES}
    for name in bad:
        batch[name][place] = slope
    return batch | {"real": random.standard_normal([examples, 2]).astype(np.float32)}


def poisoned(strategy, alternate, **arguments):
    """A float16 trainer that has taken one step."""
    trainer = Poisoned(
        strategy=strategy,
        updates=Updates(alternate_optimizers=alternate),
        precision="mixed_float16",
        jit_compile=False,
        seed=1,
        verbose=False,
        loss_scale=RULE,
        **arguments,
    )
    [report] = attempt(trainer, [points(6)])
    assert report.grads_finite
    return trainer


@pytest.fixture(scope="module")
def duels(mirrored):
    """Trainers, each built and traced once."""
    made = {}

    def of(replicas, alternate):
        if (replicas, alternate) not in made:
            strategy = mirrored(replicas) if replicas > 1 else "default"
            made[replicas, alternate] = poisoned(strategy, alternate)
        return made[replicas, alternate]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("alternate", [False, True])
def test_one_part_that_overflows_stops_both(duels, replicas, alternate):
    """L5, L6: a gradient that overflows in one part, for one example on one replica, moves no
    weight, slot, `iterations`, statistic, seed or metric of either part, bit for bit on every copy.
    In alternating order the second's overflow also rolls back the first's update. The scale halves
    once, and the report names the replica and a variable of the part that overflowed first.
    """
    trainer = duels(replicas, alternate)
    for bad in (["discriminator"], ["generator"], NAMES):
        for place, replica in {0: 0, 5: replicas - 1}.items():
            before, scale = trainer.bits(), trainer.loss_scale
            [report] = attempt(trainer, [points(6, bad, place, seed=1)])

            assert (report.grads_finite, report.cause) == (False, Cause.BACKWARD)
            assert moved(before, trainer.bits()) == []
            assert trainer.loss_scale == scale / 2
            assert report.bad_replica == replica
            assert trainer.part_of(report.bad_variable) == bad[0]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("alternate", [False, True])
def test_an_update_moves_both(duels, replicas, alternate):
    """The converse, without which the test above would show nothing: an applied step moves every
    one of these variables except learning rates and the states of seed generators. All copies agree
    afterwards, except those of the metric, which are summed over replicas.
    """
    trainer = duels(replicas, alternate)
    before = trainer.bits()
    assert any("seed" in variable.path for variable in trainer.model.variables)
    [report] = attempt(trainer, [points(6, seed=2)])
    still = before.keys() - moved(before, trainer.bits())

    assert report.grads_finite
    assert {name.split("/")[-1].split(" copy")[0] for name in still} == {
        "learning_rate",
        "seed_generator_state",
    }
    for variable in trainer.moving():
        different = {copy.tobytes() for copy in copies(variable)}
        assert len(different) == 1 or "mean/" in variable.path, variable.path


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("alternate", [False, True])
def test_each_counts_its_updates(duels, replicas, alternate):
    """L10: the `iterations` of each optimizer count applied steps, whichever part made the others
    skip.
    """
    trainer = duels(replicas, alternate)
    before = trainer.totals
    history = [[], ["generator"], [], ["discriminator"], NAMES, []]
    reports = attempt(trainer, [points(6, bad) for bad in history])

    assert [report.grads_finite for report in reports] == [not bad for bad in history]
    assert trainer.totals.attempted == before.attempted + 6
    assert trainer.totals.applied == before.applied + 3
    assert trainer.updates() == dict.fromkeys(NAMES, [before.applied + 3] * replicas)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "alternate"), [(1, False), (1, True), (3, True)])
def test_a_retry_sees_what_the_first_attempt_saw(mirrored, replicas, alternate):
    """A step that overflows in either part and is retried ends, to the bit, as if its scale had fit
    from the start: same noise, masks, statistics and weights.
    """
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    trainer = poisoned(strategy, alternate, skips=Skips(on_overflow="retry"))
    start, state = read_copies(trainer.moving(), strategy), access.state(trainer).loss_scaler.state
    for bad in NAMES:
        batch = points(6, [bad], slope=1e4)
        access.state(trainer).loss_scaler.assign(state)
        reset_step_count(access.state(trainer))
        [retried] = attempt(trainer, [batch])
        after = trainer.bits()
        write_copies(trainer.moving(), start, strategy)
        reset_step_count(access.state(trainer))
        access.state(trainer).loss_scaler.assign(
            state._replace(loss_scale=tf.constant(retried.loss_scale))
        )
        [at_once] = attempt(trainer, [batch])

        assert (retried.grads_finite, at_once.grads_finite) == (True, True)
        assert (retried.retries > 0, at_once.retries) == (True, 0)
        assert retried.loss_scale == at_once.loss_scale
        assert moved(after, trainer.bits()) == []
        write_copies(trainer.moving(), start, strategy)


class Shared(keras.Model):
    """The discriminator also holds the generator's layer."""

    def __init__(self):
        """Adds one layer to both."""
        super().__init__()
        tied = keras.layers.Dense(2, name="tied")
        tied.build([None, 2])
        self.generator = keras.Sequential([keras.Input([2]), tied])
        self.discriminator = keras.Sequential([keras.Input([2]), tied, keras.layers.Dense(1)])


class Spare(Pair):
    """A third part without an optimizer."""

    def __init__(self):
        """Creates a scale."""
        super().__init__()
        self.gain = self.add_weight(shape=(), initializer="ones", name="gain")


def critic():
    """A name that no part of the model has."""
    return {"critic": keras.optimizers.SGD(0.1)}


def no_part():
    """The name of an attribute that is not a part."""
    return {"name": keras.optimizers.SGD(0.1)}


def frozen():
    """A discriminator without trainable weights."""
    model = Pair()
    model.discriminator.trainable = False
    return model


@pytest.mark.parametrize(
    ("model", "optimizers"),
    [
        (Pair, critic),
        (Pair, no_part),
        (frozen, build_optimizers),
        (Spare, build_optimizers),
        (Shared, build_optimizers),
    ],
)
def test_parts_that_do_not_fit_are_refused(model, optimizers):
    """Each variable must have one optimizer and each optimizer one part; otherwise it is not
    trained, or twice.
    """
    with pytest.raises(ValueError, match="`model` must"):
        objectives_of(model(), optimizers())


def test_turns_of_an_unknown_optimizer_are_refused():
    """A name that is misspelt would count for nothing."""
    with pytest.raises(ValueError, match="`updates_per_step` must"):
        objectives_of(Pair(), build_optimizers(), {"critic": 5})


class Rates(Trainer):
    """Two layers with a learning rate each, and one loss for both."""

    def build_model(self):
        """Two dense layers with one weight each."""
        dense = keras.layers.Dense
        kernel = keras.initializers.Constant(2.0)
        made = keras.Sequential(
            [
                keras.Input([1]),
                dense(1, use_bias=False, name="base", kernel_initializer=kernel),
                dense(1, use_bias=False, name="head", kernel_initializer=kernel),
            ]
        )
        made.base, made.head = made.layers
        return made

    def build_optimizer(self):
        """A low rate for the first layer and a high one for the second."""
        return {"base": keras.optimizers.SGD(0.125), "head": keras.optimizers.SGD(0.5)}

    def compute_loss(self, batch, training):
        """Returns the same losses under both names."""
        losses = tf.cast(self.model(batch["x"], training=training)[:, 0], tf.float32)
        return {"base": losses, "head": losses}


def test_a_shared_loss_out_of_a_compiled_function_is_evaluated_once():
    """A `tf.function` returns one tensor under two names as two outputs, which are still one loss."""
    rates = Rates(jit_compile=True, verbose=False)
    batch = {"x": np.ones([4, 1], np.float32)}
    assert rates.evaluate(batch, global_batch=4, precision="train")["loss"] == 4.0


class Sums(Rates):
    """`Rates`, with a loss of each layer's own, whose sum moves both."""

    def compute_loss(self, batch, training):
        """Returns the sum under both names, as one tensor or added up once for each."""
        out = tf.cast(self.model(batch["x"], training=training)[:, 0], tf.float32)
        own = {"base": out * batch["x"][:, 0], "head": 0.5 * out * out}
        total = own["base"] + own["head"]
        return {"base": total, "head": total if self.once else own["base"] + own["head"]}


@pytest.mark.slow
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("alternate", [False, True])
def test_a_sum_of_losses_moves_both_parts_as_in_a_plain_loop(mirrored, alternate, once):
    """Each part moves by its rate times its gradient of the whole sum, also in microbatches and on
    replicas. The sum is reported once if it is one tensor; two sums are two losses.
    """
    x = np.float32([[0.5], [1.0], [-1.5], [2.0], [0.25], [1.25]])
    sums = Sums(
        strategy=mirrored(3),
        num_microbatches=2,
        updates=Updates(alternate_optimizers=alternate),
        verbose=False,
    )
    sums.once = once
    [report] = attempt(sums, [{"x": x}])

    weights = {"base": tf.Variable(2.0), "head": tf.Variable(2.0)}
    losses = {}
    for names in [["base"], ["head"]] if alternate else [["base", "head"]]:
        with tf.GradientTape() as tape:
            out = x * weights["base"] * weights["head"]
            loss = tf.reduce_mean(out * x + 0.5 * out * out)
        gradients = tape.gradient(loss, [weights[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            weights[name].assign_sub({"base": 0.125, "head": 0.5}[name] * gradient)
            losses[name] = loss.numpy()

    expected = [weight.numpy() for weight in weights.values()]
    found = [weight.numpy().item() for weight in sums.model.trainable_variables]
    assert found == pytest.approx(expected, rel=1e-5)
    reported = losses["base"] if once else sum(losses.values())
    assert report.loss == pytest.approx(reported, rel=1e-5)


def test_a_part_that_was_trained_and_is_frozen_has_no_objective():
    """Its optimizer keeps its slots. One optimizer for all is the objective without a name."""
    model, optimizers = Pair(), build_optimizers()
    model.generator.trainable = False
    optimizers["generator"].build(model.generator.variables)
    [left] = objectives_of(model, optimizers)
    assert (left.name, left.updates) == ("discriminator", 1)
    assert [model.trainable_variables[at] for at in left.positions] == (
        model.discriminator.trainable_variables
    )

    [single] = objectives_of(model, optimizers["discriminator"])
    assert single.name == ONLY
    assert single.positions == tuple(range(len(model.trainable_variables)))
