"""What a Keras model assigns in a forward pass is held back."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Monitoring, Trainer
from trainer.step.held_back import HoldBack, held_back_variables, is_seed_state, leaves


def model():
    """A dense layer, BatchNorm and Dropout."""
    layers = [keras.layers.Dense(1), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input([1]), *layers])


def test_values_are_read_and_writes_are_held_back():
    """Inside the scope a variable has the given value, and writes are visible; the variable itself keeps
    its value.
    """
    variable = keras.Variable(1.0)
    with HoldBack([variable], [(variable, tf.constant(2.0))]) as scope:
        seen = variable + 1.0
        variable.assign(5.0)
        after = scope.get_current_value(variable)

    assert (float(seen), float(after), float(variable)) == (3.0, 5.0, 1.0)


def test_a_variable_without_a_value_is_read_as_itself():
    """L19: a weight that was given no value is a variable to a tape, until it is assigned."""
    variable = keras.Variable(3.0)
    with HoldBack([variable]) as scope, tf.GradientTape() as tape:
        loss = variable * variable
        before = scope.held_value(variable)
        assert scope.get_current_value(variable) is variable.value
        variable.assign(5.0)
        after = scope.held_value(variable)

    assert (before, float(after), float(variable)) == (None, 5.0, 3.0)
    assert float(tape.gradient(loss, variable.value)) == 6.0


def test_other_variables_are_assigned_or_dropped():
    """What is not held back is assigned at once, also in half precision; but not what is dropped."""
    known, other, lost = (keras.Variable(1.0) for _ in range(3))
    with HoldBack([known], dropped=lambda: [lost]):
        other.assign(3.0)
        lost.assign(3.0)
    with HoldBack([known], dropped=None):
        other.assign(4.0)

    assert [float(variable.numpy()) for variable in (known, other, lost)] == [1.0, 3.0, 1.0]


class Cell(keras.layers.Layer):
    """Passes what an inner layer makes of a time step."""

    state_size = output_size = 4

    def __init__(self, inner):
        """Stores the inner layer."""
        super().__init__()
        self.inner = inner

    def build(self, shape):
        """Builds the inner layer."""
        self.inner.build(shape)

    def call(self, x, states, training=False):
        """The inner layer's result, and the state as it was."""
        return self.inner(x, training=training), states


class Branch(keras.layers.Layer):
    """Calls an inner layer where the sum of the inputs is positive."""

    def __init__(self, inner):
        """Stores the inner layer."""
        super().__init__()
        self.inner = inner

    def build(self, shape):
        """Builds the inner layer."""
        self.inner.build(shape)

    def call(self, x, training=False):
        """The inner layer's result, or the inputs."""
        positive = keras.ops.sum(x) > 0
        return keras.ops.cond(positive, lambda: self.inner(x, training=training), lambda: x)


def outputs_of(layer):
    """A layer's outputs for ones, as a step would trace it."""
    layer(tf.ones([2, 5, 4]), training=False)  # builds it

    @tf.function(autograph=False)
    def outputs(x):
        with HoldBack(layer.variables):
            return layer(x, training=True)

    return outputs(tf.ones([2, 5, 4]))


class Function(Branch):
    """Calls an inner layer in a `tf.function`, which is traced once however often it is called."""

    def call(self, x, training=False):
        """The inner layer's result."""
        return tf.function(lambda x: self.inner(x, training=training), autograph=False)(x)


def in_a_cell(inner, *, unroll=False):
    """Returns an RNN that calls an inner layer at each time step."""
    return keras.layers.RNN(Cell(inner), return_sequences=True, unroll=unroll)


@pytest.mark.parametrize("make", [in_a_cell, Function])
def test_a_draw_that_would_be_repeated_is_refused(make):
    """Dropout would have one mask for all time steps, and for all calls of a function."""
    with pytest.raises(ValueError, match="draw") as refused:
        outputs_of(make(keras.layers.Dropout(0.5)))

    start, end = str(refused.value).split("seed_generator_state'")  # Keras adds the layer's call
    assert (
        "`compute_loss` must not draw from a seed generator in a loop of the graph or in a "
        "tf.function of its own; got '"
    ) in start
    assert end.startswith(
        ", for example of a Dropout layer in the cell of an RNN. Every iteration, or call, would "
        "draw the same numbers. Draw outside, unroll the loop (RNN(..., unroll=True)), leave out "
        "@tf.function, or draw from a tf.random.Generator that the model holds."
    )


@pytest.mark.parametrize(
    "make", [functools.partial(in_a_cell, unroll=True), Branch], ids=["unrolled", "condition"]
)
def test_a_draw_that_happens_once_is_a_draw(make):
    """A branch runs at most once, and an unrolled loop draws for each time step."""
    assert outputs_of(make(keras.layers.Dropout(0.5))).shape == (2, 5, 4)


@pytest.mark.parametrize("make", [in_a_cell, Branch, Function])
def test_an_assignment_in_an_inner_graph_is_refused(make):
    """The value would exist in the loop's body, the branch or the function only."""
    with pytest.raises(ValueError, match="assign") as refused:
        outputs_of(make(keras.layers.BatchNormalization(name="norm")))

    start, end = str(refused.value).split("norm/moving_mean'")
    assert (
        "`compute_loss` must not assign Keras variables in a loop, a condition or a tf.function of "
        "its own; got an assignment to '"
    ) in start
    assert end.startswith(
        ". The new value would exist only there, and it is held back until the step is known to be "
        "finite. Assign it outside, for example with keras.ops.where, unroll the loop "
        "(RNN(..., unroll=True)), or leave out @tf.function."
    )


def test_weights_come_first_and_seeds_are_left_out():
    """A model's trainable weights come first, then its statistics; a seed generator's state is not held
    back, and neither are the variables of a module.
    """
    made = model()
    found = held_back_variables(made)
    weights, others = made.trainable_variables, made.non_trainable_variables
    seeds = [variable for variable in others if is_seed_state(variable)]

    assert [variable.path for variable in found[: len(weights)]] == [v.path for v in weights]
    assert len(seeds) == 1
    assert {id(v) for v in found} == {id(v) for v in [*weights, *others]} - {id(seeds[0])}
    assert held_back_variables(tf.Module()) == []


def test_variables_of_other_layers_are_held_back_once():
    """Layers other than the model add their variables, in containers too, and each only once."""
    made, other = model(), keras.layers.BatchNormalization()
    other.build([None, 1])
    found = held_back_variables(made, [{"a": [other, made.layers[1]]}, other, made, "text"])

    assert [id(v) for v in found[: len(held_back_variables(made))]] == [
        id(v) for v in held_back_variables(made)
    ]
    assert {id(v) for v in found} - {id(v) for v in held_back_variables(made)} == {
        id(v) for v in other.variables
    }
    assert len({id(v) for v in found}) == len(found)


def test_variables_of_metrics_are_not_held_back_but_those_that_they_watch_are():
    """A metric that keeps a variable of the model counts it among its own."""
    made, metric = model(), keras.metrics.Mean()
    metric.watched = made.layers[1].moving_mean
    assert any(variable is metric.watched for variable in metric.variables)
    found = {id(variable) for variable in held_back_variables(made, [metric])}

    assert found == {id(variable) for variable in held_back_variables(made)}
    assert id(metric.watched) in found


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (1, [1]),
        ([1, (2, {"a": 3, "b": [4]})], [1, 2, 3, 4]),
        ({"a": {}}, []),
        ("text", ["text"]),
    ],
)
def test_leaves(root, expected):
    """Containers are flattened to any depth; anything else is a leaf."""
    assert leaves(root) == expected


def test_a_container_that_holds_itself_ends():
    """It is entered once, and one that stands in two places is entered twice."""
    around, twice = [1], [2]
    around += [{"again": around}, twice, (twice,)]

    assert leaves(around) == [1, 2, 2]


def test_an_array_is_not_a_container():
    """A NumPy array is one item."""
    array = np.zeros(3)

    assert leaves([array])[0] is array


class Both(keras.layers.Layer):
    """Counts its calls in a variable of Keras and in one of TensorFlow."""

    def __init__(self):
        """Begins at 0."""
        super().__init__()
        self.ours = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.plain = tf.Variable(0.0, trainable=False)

    def call(self, inputs):
        """Counts."""
        self.ours.assign_add(1.0)
        self.plain.assign_add(1.0)
        return inputs


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_plain_variable_is_assigned_once_for_each_microbatch(num_microbatches):
    """docs/numerics.md: Keras's variables move once in a step, others on the spot."""
    counts = Both()
    trainer = Trainer(
        model=keras.Sequential([keras.Input([1]), counts, keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        num_microbatches=num_microbatches,
        monitoring=Monitoring(check_gradients=False),
        verbose=False,
    )
    x = np.ones([8, 1], np.float32)
    trainer.train((x, x), 3, global_batch=8)

    assert (float(counts.ours), float(counts.plain)) == (3.0, 3.0 * num_microbatches)


class Centred(keras.Model):
    """Subtracts a running mean of its features, which moves from the second step on."""

    def build(self, input_shape):
        """Two layers, a mean and a counter."""
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.last = keras.layers.Dense(1)
        fixed = {"initializer": "zeros", "trainable": False}
        self.mean = self.add_weight(shape=(4,), name="mean", **fixed)
        self.calls = self.add_weight(shape=(), name="calls", **fixed)

    def call(self, inputs, training=False):
        """Reads the mean after it has been assigned."""
        features = self.hidden(inputs)
        if training:
            moved = 0.5 * self.mean + 0.5 * keras.ops.mean(features, axis=0)
            self.mean.assign(keras.ops.where(self.calls > 0, moved, self.mean))
            self.calls.assign_add(1.0)
        return self.last(features - self.mean)


def twice():
    """A layer that assigns its kernel in each of two calls."""
    inner = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")
    layer, inputs = keras.layers.SpectralNormalization(inner), keras.Input([3])
    calls = [layer(inputs), layer(keras.layers.Rescaling(2.0)(inputs))]
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(calls)))


@pytest.mark.parametrize("make", [Centred, twice])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_gradient_goes_to_the_variable_and_not_into_what_was_assigned(make, compiled):
    """L19: what reads a variable after an assignment has the gradient that it has in Keras's own step,
    also in later steps, and if the variable is assigned twice.
    """
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    start = make()
    start(x)
    models = [keras.models.clone_model(start) if make is twice else make() for _ in range(2)]
    for each in models:
        each(x)
        each.set_weights(start.get_weights())
    theirs, ours = models
    theirs.compile(keras.optimizers.SGD(0.1), "mse")
    trainer = Trainer(
        model=ours,
        optimizer=keras.optimizers.SGD(0.1),
        loss_fn="mse",
        jit_compile=compiled,
        verbose=False,
    )
    for _ in range(4):
        theirs.train_on_batch(x, y[:, :1])
        trainer.train_on_batch((x, y[:, :1]))
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_a_variable_may_be_assigned_to_another():
    """Keras hands over the variable itself."""
    target, online = keras.Variable(1.0), keras.Variable(2.0)
    with HoldBack([target, online]) as scope:
        target.assign(online)
        assert float(scope.get_current_value(target)) == 2.0

    assert float(target.value) == 1.0
