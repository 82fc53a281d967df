"""What a Keras model assigns in a forward pass is held back."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Monitoring, Trainer
from trainer.step.held_back import HoldBack, LoopCasts, held_back_variables, is_seed_state


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
    with pytest.raises(ValueError, match="draw"):
        outputs_of(make(keras.layers.Dropout(0.5)))


@pytest.mark.parametrize(
    "make", [functools.partial(in_a_cell, unroll=True), Branch], ids=["unrolled", "condition"]
)
def test_a_draw_that_happens_once_is_a_draw(make):
    """A branch runs at most once, and an unrolled loop draws for each time step."""
    assert outputs_of(make(keras.layers.Dropout(0.5))).shape == (2, 5, 4)


@pytest.mark.parametrize("make", [in_a_cell, Branch, Function])
def test_an_assignment_in_an_inner_graph_is_refused(make):
    """The value would exist in the loop's body, the branch or the function only."""
    with pytest.raises(ValueError, match="assign"):
        outputs_of(make(keras.layers.BatchNormalization(name="norm")))


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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


class Rows(keras.layers.Layer):
    """A cell that adds rows of a table, so that its gradient is sparse within a step in time."""

    state_size = output_size = 4

    def build(self, _):
        """Adds the table."""
        self.table = self.add_weight(shape=[8, 4], name="table")

    def call(self, x, states):
        """The rows that the inputs number, added to the state."""
        row = tf.gather(tf.convert_to_tensor(self.table), tf.cast(x[:, 0] * 7, tf.int32))
        return states[0] + row, [states[0] + row]


class Branches(keras.layers.Layer):
    """A loop in a branch of a condition, and a condition in a loop."""

    def build(self, _):
        """Adds a weight."""
        self.kernel = self.add_weight(shape=[4, 4], name="kernel")

    def loop(self, x, change):
        """Three changes of the inputs."""
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, change(x)), [0, x])[1]

    def call(self, x):
        """Both."""
        positive = tf.reduce_sum(x) > 0
        x = tf.cond(positive, lambda: self.loop(x, lambda y: y @ self.kernel), lambda: x)
        branch = lambda y: tf.cond(positive, lambda: y @ self.kernel, lambda: y)  # noqa: E731
        return self.loop(x, branch)


class Recomputed(keras.layers.Layer):
    """An LSTM that runs again in the backward pass."""

    def build(self, shape):
        """Builds the LSTM."""
        self.lstm = keras.layers.LSTM(5)
        self.lstm.build(shape)

    def call(self, x):
        """The LSTM's result."""
        return keras.remat(self.lstm)(x)


class Doubled(keras.layers.Layer):
    """A cell with a product whose gradient is doubled by a function that looks for variables."""

    state_size = output_size = 4

    def build(self, shape):
        """Adds the weight."""
        self.kernel = self.add_weight(shape=[shape[-1], 4], name="kernel")

    def call(self, x, states):
        """The sum of the product and the state."""

        @tf.custom_gradient
        def product(x):
            kernel = tf.convert_to_tensor(self.kernel)

            def gradient(upstream, variables):
                assert [one.shape for one in variables] == [self.kernel.shape]
                of_kernel = 2.0 * tf.cast(tf.transpose(x) @ upstream, tf.float32)
                return upstream @ tf.transpose(kernel), [of_kernel]

            return x @ kernel, gradient

        total = product(x) + states[0]
        return total, [total]


LAYERS = {  # layers with a loop, and the shape of an example
    "lstm": (lambda: keras.layers.LSTM(5), [6, 4]),
    "gru": (lambda: keras.layers.GRU(5, return_sequences=True), [6, 4]),
    "simple": (lambda: keras.layers.SimpleRNN(5), [6, 4]),
    "stacked": (lambda: keras.layers.RNN([keras.layers.LSTMCell(3) for _ in range(2)]), [6, 4]),
    "both ways": (lambda: keras.layers.Bidirectional(keras.layers.LSTM(3)), [6, 4]),
    "images": (lambda: keras.layers.ConvLSTM2D(2, 3), [3, 5, 5, 2]),
    "sparse": (lambda: keras.layers.RNN(Rows()), [6, 4]),
    "branches": (Branches, [4]),
    "doubled": (lambda: keras.layers.RNN(Doubled()), [6, 4]),
    "recomputed": (Recomputed, [6, 4]),
}


def network(name):
    """A model with one of the layers, and its inputs."""
    keras.utils.set_random_seed(1)
    make, shape = LAYERS[name]
    inputs = keras.Input(shape)
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(make()(inputs))))
    return model, tf.random.stateless_uniform([3, *shape], (1, 2))


def passed(model, inputs):
    """A traced function: loss and gradients of a pass, which holds back what the model assigns."""
    weights = [variable.value for variable in model.trainable_variables]
    frozen = [(variable, variable.value) for variable in model.non_trainable_variables]

    @tf.function
    def run():
        with tf.GradientTape() as tape, HoldBack(model.variables, frozen):
            loss = tf.reduce_sum(tf.cast(model(inputs, training=True), tf.float32) ** 2)
        with HoldBack(model.variables, frozen):
            gradients = tape.gradient(loss, weights)
        return loss, [tf.convert_to_tensor(each) for each in gradients]

    return run


def casts_in_loops(run, dtype):
    """The number of casts from float32 to a dtype in the bodies of loops."""
    library = run.get_concrete_function().graph.as_graph_def().library
    return sum(
        node.op == "Cast"
        and node.attr["SrcT"].type == tf.float32.as_datatype_enum
        and node.attr["DstT"].type == dtype.as_datatype_enum
        for function in library.function
        if "while" in function.signature.name and "body" in function.signature.name
        for node in function.node_def
    )


@pytest.fixture(params=["mixed_bfloat16", "mixed_float16"])
def policy(request):
    """A policy of half precision, in force."""
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def casts_of_layers(monkeypatch):
    """A function after which layers cast in their loops, as without this file."""

    def keep(_, source, dtype):
        del dtype
        return source

    return lambda: monkeypatch.setattr(LoopCasts, "cast", keep)


def assert_same(before, after):
    """Raises AssertionError unless two lists of float32 arrays have the same bits."""
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))


def gradients_and_loss(run):
    """What a traced function of `passed` returns, as one list of arrays."""
    loss, gradients = run()
    assert all(np.any(each) for each in gradients)
    return [each.numpy() for each in (loss, *gradients)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_are_those_of_casts_in_the_loop(name, policy, casts_of_layers):
    """Loss and gradients have the same bits; no loop casts a weight any more."""
    model, inputs = network(name)
    new = passed(model, inputs)
    after = gradients_and_loss(new)
    casts_of_layers()
    old = passed(model, inputs)

    dtype = tf.as_dtype(policy.removeprefix("mixed_"))
    assert (casts_in_loops(new, dtype), casts_in_loops(old, dtype) > 0) == (0, True)
    assert_same(gradients_and_loss(old), after)


@pytest.mark.thorough
def test_a_frozen_weight_is_cast_once(policy, casts_of_layers):
    """A weight that is not trained reaches the pass as a given value, and is cast before the loop."""
    model, inputs = network("lstm")
    model.layers[1].trainable = False
    new = passed(model, inputs)
    dtype = tf.as_dtype(policy.removeprefix("mixed_"))
    assert casts_in_loops(new, dtype) == 0
    casts_of_layers()
    assert new()[0].numpy() == passed(model, inputs)()[0].numpy()


@pytest.mark.thorough
def test_a_trainer_computes_the_same_bits(policy, casts_of_layers):
    """Microbatches, a dynamic scale and evaluation: weights and results have the same bits."""

    def trained():
        trainer = Trainer(
            model=lambda: network("lstm")[0],
            optimizer="adam",
            loss_fn="mse",
            precision=policy,
            num_microbatches=2,
            verbose=False,
        )
        keras.utils.set_random_seed(1)
        x = np.random.default_rng(0).normal(size=[8, 6, 4]).astype(np.float32)
        data = (x, x[:, 0, :2])
        trainer.train(data, steps=4, global_batch=4)
        return trainer.model.get_weights(), trainer.evaluate(data, global_batch=4)["loss"]

    weights, loss = trained()
    casts_of_layers()
    weights_before, loss_before = trained()
    assert loss == loss_before
    assert_same(weights_before, weights)


@pytest.mark.thorough
def test_a_gradient_of_gradients_is_that_of_casts_in_the_loop(policy, casts_of_layers):
    """A penalty on the inputs' gradient, through an RNN."""
    del policy
    model, inputs = network("simple")
    weights = [variable.value for variable in model.trainable_variables]

    def penalty():
        with tf.GradientTape() as outer, HoldBack(model.variables):
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                loss = tf.reduce_sum(tf.cast(model(inputs), tf.float32))
            result = tf.reduce_sum(inner.gradient(loss, inputs) ** 2)
        return result, *map(tf.convert_to_tensor, outer.gradient(result, weights[:2]))

    after = [each.numpy() for each in tf.function(penalty)()]
    casts_of_layers()
    assert all(np.any(each) for each in after)
    assert_same([each.numpy() for each in tf.function(penalty)()], after)


class Assigning(keras.layers.Layer):
    """Two loops, each of which reads a variable after another value was assigned to it."""

    def build(self, _):
        """Adds the variable."""
        self.state = self.add_weight(shape=[], initializer="zeros", trainable=False)

    def call(self, x):
        """The sums of both loops."""
        found = []
        for value in (2.0, 3.0):
            self.state.assign(value)
            found.append(loop_of(lambda: tf.cast(self.state.value, tf.float32)))
        return tf.cast(x, tf.float32) + tf.stack(found)


def test_a_value_that_the_pass_assigned_is_what_a_loop_reads(policy):
    """An assignment between two loops reaches the second."""
    layer = Assigning(dtype=policy)
    layer.build(None)

    @tf.function
    def run():
        with HoldBack([layer.state]):
            return layer(tf.zeros([2]))

    assert run().numpy().tolist() == [4.0, 6.0]


class Uncast(keras.layers.Layer):
    """Reads a weight as it is, whatever the policy."""

    def __init__(self, dtype):
        """Turns casts off."""
        super().__init__(dtype=dtype, autocast=False)

    def build(self, _):
        """Adds the weight."""
        self.scale = self.add_weight(shape=[], initializer="ones", trainable=False)

    def call(self, x):
        """The dtype in which a loop reads the weight, and its product with a number."""
        seen = []
        loop_of(lambda: seen.append(tf.convert_to_tensor(self.scale).dtype.name) or 0.0)
        return seen


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float32"])
def test_a_layer_that_casts_nothing_reads_its_weights_as_they_are(dtype, policy):
    """Keras gives such a variable the default dtype, `variable.dtype`, and reads it without a cast."""
    del policy
    layer = Uncast(dtype)
    layer.build(None)

    def run():
        with HoldBack([layer.scale]):
            found.extend(layer(tf.zeros([2])))
        return 0

    found = []
    tf.function(run, autograph=False)()
    assert found == [dtype]


def loop_of(value):
    """The sum of a value over two iterations."""
    return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + value()), [0, 0.0])[1]


@pytest.mark.parametrize(
    ("source", "dtype"), [(1.0, "float32"), (1, "float16"), (1.0, "int32"), (1, "int32")]
)
def test_what_needs_no_cast_is_read_as_it_is(source, dtype):
    """The same dtype, or one that is not floating-point: Keras casts neither."""
    source = tf.constant(source)
    seen = []

    @tf.function
    def run():
        casts = LoopCasts(tf.compat.v1.get_default_graph())
        return loop_of(lambda: seen.append(casts.cast(source, dtype)) or 0.0)

    run()
    assert seen == [source]


def test_outside_of_a_loop_layers_cast():
    """Nothing is cast here: each layer casts where it reads."""
    source = tf.constant(1.0)
    with tf.Graph().as_default() as graph:
        assert LoopCasts(graph).cast(source, "float16") is source
