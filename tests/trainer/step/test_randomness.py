"""Random numbers are a function of (seed, step, replica, microbatch, draw) and nothing else."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, attempt, copies, slopes
from hypothesis import example, given, settings
from hypothesis import strategies as st

import scaling
from trainer import Skips, Updates
from trainer.keras_compat import all_layers
from trainer.step import TrainState, attempt_step, plan_step
from trainer.step.held_back import is_seed_state
from trainer.step.randomness import check_no_stateful_ops, key_source, make_keys, seed_states

pytestmark = pytest.mark.replicas(3)

EXAMPLES = 2  # per microbatch
WIDTH = 64  # per mask; two masks are equal by chance once in 2^64
KINDS = ["model", "module"]


class NoisyModel(keras.Model):
    """A weight, and two of each generator and layer, all with the same seed."""

    def __init__(self, own_seed):
        """Creates the weight with Keras."""
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        give_noise(self, own_seed)
        self.built = True  # no variable is created by a call


class NoisyModule(tf.Module):
    """The same for `tf.Module`."""

    def __init__(self, own_seed):
        """Creates the weight with TensorFlow."""
        super().__init__()
        self.scale = tf.Variable(1.0)
        give_noise(self, own_seed)


def give_noise(model, own_seed):
    """Adds the generators and layers of `NoisyModel`."""
    model.noises = [keras.random.SeedGenerator(own_seed) for _ in range(2)]
    model.dropouts = [keras.layers.Dropout(0.5, seed=own_seed) for _ in range(2)]


class Drawing(Linear):
    """Stores what every forward pass drew in Python, where no rollback can undo it."""

    def __init__(self, kind, own_seed=4, **arguments):
        """Chooses the kind of model."""
        super().__init__(**{"verbose": False, "seed": 0} | arguments)
        self.kind, self.own_seed = kind, own_seed
        self.noted = []

    def build_model(self):
        """Returns a Keras model or a module."""
        return {"model": NoisyModel, "module": NoisyModule}[self.kind](self.own_seed)

    def compute_loss(self, batch, training):
        """Draws from each generator twice and calls each layer twice."""
        count = tf.shape(batch["slope"])[0]
        numbers = [
            keras.random.normal([count], seed=noise)
            for noise in self.model.noises
            for _ in range(2)
        ]
        masks = [
            tf.cast(layer(tf.ones([count, WIDTH]), training=True) > 0, tf.uint8)
            for layer in self.model.dropouts
            for _ in range(2)
        ]
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        noted = tf.numpy_function(self._note, [replica, numbers, masks], tf.float32)
        # In the trainer's precision, which a module does not use by itself.
        half = tf.cast(self.model.scale, self.precision.compute_dtype)
        return tf.cast(half, tf.float32) * batch["slope"] + 0.0 * tf.ensure_shape(noted, [])

    def _note(self, replica, numbers, masks):
        rows = [row.tobytes() for row in masks.reshape([-1, WIDTH])]
        self.noted.append((int(replica), [*numbers.ravel().tolist(), *rows]))
        return np.float32(0)

    def take_notes(self):
        """Returns and clears what has been drawn, by replica, for each forward pass."""
        noted, self.noted = self.noted, []
        replicas = sorted({replica for replica, _ in noted})
        return [[drawn for which, drawn in noted if which == replica] for replica in replicas]

    @property
    def global_batch(self):
        """The number of examples in a global batch."""
        return EXAMPLES * self.strategy.num_replicas_in_sync * self.num_microbatches


def drawn_by(trainer, history=(1.0, 1.0, 1.0)):
    """What was drawn in each step: by step, replica and forward pass, in order.

    Args:
        trainer: takes a step for each slope in `history`.
        history: slopes; inf makes a step that is skipped.
    """
    batches = [slopes(*[slope] * trainer.global_batch) for slope in history]
    found = []
    for report, slope in zip(attempt(trainer, batches), history, strict=True):
        assert report.grads_finite == np.isfinite(slope)
        found.append(trainer.take_notes())
    return found


def flat(drawn):
    """All numbers and masks in one list."""
    return [one for step in drawn for replica in step for passed in replica for one in passed]


@pytest.fixture(scope="module")
def first_runs(mirrored):
    """What three steps draw from seed 0, and a function that builds such a trainer, each once."""
    made = {}

    def of(kind, replicas, num_microbatches):
        key = kind, replicas, num_microbatches
        if key not in made:
            strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
            arguments = {"strategy": strategy, "num_microbatches": num_microbatches}
            made[key] = drawn_by(Drawing(kind, **arguments)), arguments
        return made[key]

    return of


def only_in_full(full, usual):
    """Skips a case unless it is a usual one or this is the full run."""
    if not (usual or full):
        pytest.skip("only with --full")


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_two_draws_are_alike(first_runs, full, kind, replicas, num_microbatches):
    """The draws of a loss and the masks of Dropout differ between steps, replicas, microbatches,
    generators with the same seed=, and draws, for a Keras model and for a `tf.Module`.
    """
    usual = kind == "model" or (replicas, num_microbatches) in [(1, 2), (3, 1)]
    only_in_full(full, usual)
    drawn, _ = first_runs(kind, replicas, num_microbatches)
    shape = [[len(step), *{len(replica) for replica in step}] for step in drawn]
    everything = flat(drawn)

    assert shape == [[replicas, num_microbatches]] * 3
    # Two draws from each of two generators, and as many masks, per example.
    assert len(everything) == 3 * replicas * num_microbatches * EXAMPLES * 8
    assert len(set(everything)) == len(everything)


@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "num_microbatches"), [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same(first_runs, full, kind, replicas, num_microbatches):
    """Another trainer with the same `seed` draws the same numbers in the same step, whatever the
    seed= of its layers and generators is: only their position in the model counts.
    """
    only_in_full(full, (kind, replicas) in [("model", 3), ("module", 1)] and num_microbatches == 2)
    drawn, arguments = first_runs(kind, replicas, num_microbatches)

    assert drawn_by(Drawing(kind, own_seed=5, **arguments)) == drawn


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_draws_others(first_runs, full, kind):
    """Runs with different seeds share no numbers, and without a seed each trainer takes a random
    one, even if Python, NumPy and TensorFlow are seeded alike.
    """
    only_in_full(full, kind == "model")
    drawn, arguments = first_runs(kind, 1, 1)
    runs = [flat(drawn)]
    for seed in (1, None, None):
        keras.utils.set_random_seed(0)
        runs.append(flat(drawn_by(Drawing(kind, seed=seed, **arguments))))
    together = list(itertools.chain(*runs))

    assert len(set(together)) == len(together)


@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "num_microbatches"), [(1, 1), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_attempt_draws_the_same(mirrored, full, kind, replicas, num_microbatches):
    """L6: every attempt of a retried step draws what it would have drawn at a scale that needed no
    retry; so does the step after it.
    """
    only_in_full(full, (kind, replicas, num_microbatches) == ("model", 3, 2))
    arguments = {
        "strategy": mirrored(replicas) if replicas > 1 else "default",
        "num_microbatches": num_microbatches,
        "precision": "mixed_float16",
        "jit_compile": False,
    }
    once = drawn_by(Drawing(kind, loss_scale=1.0, **arguments), [1.0, 4.0])
    rule = scaling.DynamicLossScale(2.0**18)
    trainer = Drawing(kind, loss_scale=rule, skips=Skips(on_overflow="retry"), **arguments)
    batches = [
        slopes(*[slope * trainer.global_batch] * trainer.global_batch) for slope in (1.0, 4.0)
    ]
    for report, expected in zip(attempt(trainer, batches), once, strict=True):
        assert report.grads_finite
        assert report.retries > 0
        attempts = 1 + report.retries
        assert trainer.take_notes() == [replica * attempts for replica in expected]


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_moves_no_seed_state(first_runs, full, kind, replicas):
    """L6: a skipped step moves no seed state on any copy, and neither does an applied step of a
    Keras model. A step draws the same numbers whether it and the steps before it are applied or
    skipped.
    """
    only_in_full(full, (kind, replicas) != ("module", 1))
    expected, arguments = first_runs(kind, replicas, 1)
    trainer = Drawing(kind, **arguments)
    found = [drawn_by(trainer, [1.0])]
    states = seed_states(trainer.model)
    after_one = [copy.tolist() for state in states for copy in copies(state)]
    found.append(drawn_by(trainer, [np.inf]))

    assert len(states) == 4
    assert [copy.tolist() for state in states for copy in copies(state)] == after_one
    assert kind == "module" or after_one == [[4, 0]] * 4 * replicas
    found.append(drawn_by(trainer, [1.0]))
    assert list(itertools.chain(*found)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "num_microbatches"), [(1, 2), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_own_loop_draws_what_the_trainer_draws(
    first_runs, full, kind, replicas, num_microbatches
):
    """L15: `plan_step` and `attempt_step` draw the same numbers for (seed, step) as the trainer,
    and the graph of the step has no op with a counter of its own.
    """
    only_in_full(full, (kind, replicas) in [("model", 3), ("module", 1)])
    expected, arguments = first_runs(kind, replicas, num_microbatches)
    holder = Drawing(kind, **arguments)
    with holder.strategy.scope():
        rule = scaling.NoLossScale()
        plan = plan_step(
            strategy=holder.strategy,
            model=holder.model,
            optimizer=keras.optimizers.SGD(1.0),
            compute_loss=holder.compute_loss,
            rule=rule,
            num_microbatches=num_microbatches,
        )
        run = TrainState(rule, seed=0)
    step = tf.function(lambda batch: attempt_step(batch, plan, run))
    batch = tf.nest.map_structure(tf.constant, slopes(*[1.0] * holder.global_batch))
    for drawn in expected:
        step(batch)
        assert holder.take_notes() == drawn
    check_no_stateful_ops(step.get_concrete_function(batch).graph)


class Two(Drawing):
    """Two models in one, each with its own optimizer."""

    def build_model(self):
        """Both can draw; only the first one does here."""
        model = tf.Module()
        model.first, model.second = super().build_model(), super().build_model()
        for name in ("scale", "noises", "dropouts"):
            setattr(model, name, getattr(model.first, name))
        return model

    def build_optimizer(self):
        """Returns one optimizer each."""
        return {name: keras.optimizers.SGD(1.0) for name in ("first", "second")}

    def compute_loss(self, batch, training):
        """Returns one loss each."""
        losses = super().compute_loss(batch, training)
        return {"first": losses, "second": self.model.second.scale * losses}


@pytest.mark.thorough
def test_alternating_optimizers_draw_different_numbers():
    """Each forward pass of a step draws its own numbers, and no two steps share any."""
    drawn = drawn_by(Two("module", updates=Updates(alternate_optimizers=True)))
    everything = flat(drawn)

    assert [len(replica) for step in drawn for replica in step] == [2] * 3
    assert len(set(everything)) == len(everything)


class Keyed(Drawing):
    """Its metrics get the key with which a forward pass started."""

    def compute_loss(self, batch, training):
        """Also draws a number."""
        [noise, _] = self.model.noises
        key = tf.identity(noise.state.value)
        drawn = keras.random.normal([], seed=noise)
        losses = tf.identity(self.model.scale) * batch["slope"] + 0.0 * drawn
        return losses, tf.ones_like(batch["slope"], tf.int64)[:, None] * key

    def update_metrics(self, batch, aux):
        """Stores the key, outside XLA."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.numpy_function(self._note, [replica, aux], [])

    def _note(self, replica, keys):
        self.noted += [(int(replica), tuple(key)) for key in keys.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_xla_is_handed_the_same_keys(mirrored, full, kind):
    """Keys do not depend on whether XLA compiles the forward pass, for any replica, microbatch or
    step.
    """
    only_in_full(full, kind == "model")
    found = []
    for jit_compile in (False, True):
        trainer = Keyed(kind, strategy=mirrored(2), num_microbatches=2, jit_compile=jit_compile)
        found.append(drawn_by(trainer, [1.0, 1.0]))
    keys = [key for step in found[0] for replica in step for key in replica]

    assert found[0] == found[1]
    assert len(keys) == 2 * 2 * 2 * EXAMPLES
    assert len(set(keys)) == len(keys) / EXAMPLES


def all_keys(seed, step, groups, replicas, num_microbatches, generators):
    """The keys of one step, shape (groups, replicas, num_microbatches, generators, 2)."""
    random = tf.constant([seed, step], tf.int64)
    places = itertools.product(range(groups), range(replicas))
    made = [
        make_keys(
            key_source(random, group, groups), replica, replicas, num_microbatches, generators
        ).numpy()
        for group, replica in places
    ]
    return np.reshape(made, [groups, replicas, num_microbatches, generators, 2])


def test_without_generators_nothing_is_drawn():
    """There are no keys, and the graph has no operation that would compute some."""

    @tf.function(autograph=False)
    def keys(source):
        return make_keys(source, 0, 1, 2, 0)

    graph = keys.get_concrete_function(tf.TensorSpec([2], tf.int64)).graph

    assert keys(tf.constant([0, 0], tf.int64)).shape == (2, 0, 2)
    assert not [each.type for each in graph.get_operations() if "Random" in each.type]


few = st.integers(1, 3)


@pytest.mark.thorough
@settings(max_examples=20)
@given(st.integers(0, 2**62), st.integers(0, 2**32), few, few, few, few)
@example(0, 0, 1, 1, 1, 1)  # all zeros
@example(2**63 - 1, 2**32, 2, 3, 2, 3)  # the largest seed
@example(0, 2, 2, 3, 1, 1)  # positions that products and sums could confuse
def test_no_two_keys_are_near(seed, step, groups, replicas, num_microbatches, generators):
    """Keys lie in [0, 2^62), and no first half occurs twice in three steps, whatever the update
    group, replica, microbatch and generator. Counting changes the second half only, so no generator
    reaches another's numbers.
    """
    sizes = (groups, replicas, num_microbatches, generators)
    keys = np.stack([all_keys(seed, step + later, *sizes) for later in range(3)])
    firsts = keys[..., 0].ravel().tolist()

    assert keys.dtype == np.int64
    assert 0 <= keys.min() <= keys.max() < 2**62
    assert len(set(firsts)) == len(firsts) == 3 * np.prod(sizes)


def test_keys_fill_their_range():
    """All 62 bits of both halves are used: each is 1 in about half of 4096 keys, within 6 standard
    deviations (32 each) of 2048.
    """
    keys = all_keys(0, 0, 1, 1, 64, 64).reshape([-1, 2])
    ones = ((keys[:, :, None] >> np.arange(62)) & 1).sum(axis=0)

    assert np.abs(ones - 2048).max() <= 6 * 32


def test_keys_are_what_they_were():
    """A run that is resumed by a newer version must draw the same numbers: these are the keys of
    seed 1, the step after 5 others, the second of two update groups and the third of four replicas.
    """
    source = key_source(tf.constant([1, 5], tf.int64), 1, 2)

    assert source.numpy().tolist() == [1, 11]
    assert make_keys(source, 2, 4, 2, 1).numpy().tolist() == [
        [[430020770503437102, 4065503198557591561]],
        [[508007716701800110, 1019957207052592209]],
    ]


def in_while(draw):
    """Draws in the body of a loop."""
    return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x + draw()), (0, tf.zeros([2])))


def in_condition(draw):
    """Draws in one branch of a condition."""
    return tf.cond(tf.timestamp() > 0, draw, lambda: tf.zeros([2]))


def in_function(draw):
    """Draws in a function that a function calls."""
    inner = tf.function(draw, autograph=False)
    return tf.function(lambda: inner() + 1.0, autograph=False)()


def in_compiled(draw):
    """Draws in a function that XLA compiles."""
    return tf.function(draw, autograph=False, jit_compile=True)()


def in_gradient(draw):
    """Draws in the backward pass only."""
    drawing = tf.custom_gradient(lambda x: (x, lambda upstream: upstream * draw()))
    x = tf.ones([2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = drawing(x)
    return tape.gradient(y, x)


def graph_of(function):
    """The graph of a traced function."""
    return tf.function(function, autograph=False).get_concrete_function().graph


def uniform():
    """The usual stateful draw."""
    return tf.random.uniform([2])


@pytest.mark.parametrize(
    "draw",
    [
        uniform,
        lambda: tf.random.normal([2], seed=3),
        lambda: tf.random.uniform([2], 0, 5, tf.int32),
        lambda: tf.random.shuffle([1.0, 2.0]),
        lambda: tf.random.categorical([[1.0, 1.0]], 1),
        lambda: tf.nn.dropout([1.0, 2.0], 0.5),
        lambda: in_while(uniform),
        lambda: in_condition(uniform),
        lambda: in_function(uniform),
        lambda: in_compiled(uniform),
        lambda: in_gradient(uniform),
    ],
)
def test_a_stateful_random_op_is_refused(draw):
    """A stateful random op is refused, with a seed or without, wherever in the graph it is."""
    with pytest.raises(ValueError, match="`train_step`"):
        check_no_stateful_ops(graph_of(draw))


def test_random_ops_without_hidden_state_are_accepted():
    """Generators of Keras and TensorFlow, Keras's layers and stateless draws are accepted. So are
    two ops that have seeds but do not draw from them: cuDNN's, and a search for equal classes.
    """
    seed, generator = keras.random.SeedGenerator(1), tf.random.Generator.from_seed(1)
    ones = tf.ones([1, 2, 2])
    layers = [
        keras.layers.Dropout(0.5),
        keras.layers.GaussianNoise(1.0),
        keras.layers.SpatialDropout1D(0.5),
        keras.layers.LSTM(2, dropout=0.5, recurrent_dropout=0.5),
    ]
    for layer in layers:
        layer.build(ones.shape)

    def draw():
        for layer in layers:
            layer(ones, training=True)
        for name in ("normal", "uniform", "truncated_normal"):
            getattr(keras.random, name)([2], seed=seed)
        keras.random.randint([2], 0, 4, seed=seed)
        keras.random.gamma([2], 1.0, seed=seed)
        keras.random.categorical([[1.0, 1.0]], 1, seed=seed)
        keras.random.shuffle(ones, seed=seed)
        keras.random.dropout(ones, 0.5, seed=seed)
        generator.normal([2])
        tf.random.stateless_uniform([2], [1, 2])
        tf.random.stateless_categorical([[1.0, 1.0]], 1, [1, 2])
        tf.random.experimental.stateless_shuffle(ones, [1, 2])
        tf.nn.experimental.stateless_dropout(ones, 0.5, [1, 2])
        cell = {"input": ones[:, :1, :1], "input_h": ones[:, :1, :1], "input_c": ones[:, :1, :1]}
        tf.raw_ops.CudnnRNNV3(**cell, params=tf.ones([16]), sequence_lengths=[1], dropout=0.5)
        return tf.nn.compute_accidental_hits(tf.constant([[1]], tf.int64), [1, 2], 1)[0]

    assert len(graph_of(draw).get_operations()) > 100
    check_no_stateful_ops(graph_of(draw))


def test_the_states_of_seed_generators_are_recognized():
    """Exactly the states of seed generators are recognized, and no weight, statistic, slot or
    metric.
    """
    inputs = keras.Input([4, 3])
    x = keras.layers.MultiHeadAttention(1, 2, dropout=0.5)(inputs, inputs)
    x = keras.layers.LSTM(2, dropout=0.5)(x)
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.5)(x))
    x = keras.Sequential([keras.Input([2]), keras.layers.GaussianNoise(1.0)])(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.own = keras.random.SeedGenerator(1)
    model.compile("adam", "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    # Keras does not document the attribute; if none is found, it has moved.
    generators = [getattr(layer, "seed_generator", None) for layer in all_layers(model)]
    states = [generator.state for generator in [*generators, model.own] if generator]
    everyone = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    found = [variable for variable in everyone if is_seed_state(variable)]

    assert len(states) == 5
    assert {id(state) for state in states} == {id(variable) for variable in found}
    assert len(found) == len(states) < len(everyone)


def test_every_generator_in_reach_is_found_once():
    """Generators in a model, in nested modules, in their layers and in containers are found once
    each, the nearest first, in an order that does not change: it decides the key that each gets.
    """
    shared = keras.random.SeedGenerator(1)
    model = NoisyModel(4)
    outer, inner = tf.Module(), NoisyModule(4)
    outer.inner = [inner]
    outer.layer = {"a": [keras.Sequential([keras.Input([1]), keras.layers.Dropout(0.5)])]}
    outer.shared = shared
    others = {"b": (shared, outer), "c": keras.layers.GaussianNoise(1.0), "d": [model], "e": 1}
    states = seed_states(model, [others])
    of_model = [id(noise.state) for noise in model.noises]
    of_model += [id(layer.seed_generator.state) for layer in model.dropouts]

    assert len(states) == len({id(state) for state in states}) == 4 + 1 + 1 + 4 + 1
    assert {id(state) for state in states[:4]} == set(of_model)
    assert states[4] is shared.state
    assert states[5] is others["c"].seed_generator.state
    assert [state.path for state in states] == [
        state.path for state in seed_states(model, [others])
    ]
