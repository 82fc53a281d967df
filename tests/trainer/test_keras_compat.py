"""The private names of Keras that the library uses: a test fails if Keras changes one."""

import ast
import contextlib
import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import needs_multi_optimizer

from trainer import keras_compat
from trainer.keras_compat import (
    added_losses_kept,
    all_layers,
    arguments_of_loss,
    atomic_update_count,
    computing_in_float32,
    differentiable_moments,
    gradients_already_reduced,
    inner_optimizer,
    keras_mask,
    layers_under_policy,
    learning_rate_setting,
    means_of_compute_loss,
    outputs_of_called,
    policy_with_dtype,
    recompute_constants,
    regularizers_in_float32,
    replaced_calls,
    slot_variables,
    with_keras_mask,
)


def test_each_private_name_has_a_reason():
    """The list at the top of the file is what the file uses: no name more, and none less."""
    tree = ast.parse(inspect.getsource(keras_compat))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith(("keras.src", "tensorflow."))
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            re.match("_[a-z]", node.attr) or "tf.__internal__." in ast.unparse(node.value) + "."
        ):
            used.add(node.attr)
        elif isinstance(node, ast.Constant) and re.fullmatch("_[a-z_]+", str(node.value)):
            used.add(node.value)
    items = re.findall(r"^- ((?:`\w+`,?\s*)+):", keras_compat.__doc__, re.MULTILINE)
    listed = set(re.findall(r"\w+", " ".join(items)))

    assert listed - {"autocast_scope"} == used - own - {"tracking"}


def test_reduced_gradients_are_not_summed_again(mirrored):
    """Inside the context `apply` does not sum over replicas; afterwards it does again."""
    strategy = mirrored(3)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def apply():
        optimizer.apply([tf.constant(1.0)], [weight])

    with gradients_already_reduced(optimizer):
        tf.function(lambda: strategy.run(apply))()
    assert float(weight.numpy()) == -1.0
    tf.function(lambda: strategy.run(apply))()
    assert float(weight.numpy()) == -4.0


def test_the_replaced_attribute_still_exists():
    """Setting an attribute that Keras no longer reads would have no effect."""
    assert callable(keras.optimizers.SGD()._all_reduce_sum_gradients)


def test_losses_of_a_replica_that_waits_are_kept():
    """Another replica's call of the model makes layers forget what they have added."""

    class Adding(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(keras.ops.sum(inputs))
            return inputs

    model = keras.Sequential([keras.Input([2]), Adding(), keras.layers.Dense(1)])
    weights = [(weight, weight.value) for weight in model.weights]

    def listed(keep):
        with keras.StatelessScope(weights, collect_losses=True) as scope:
            model(tf.ones([1, 2]))
            with keep(model), keras.StatelessScope(weights, collect_losses=True):
                model(tf.zeros([1, 2]))
            assert len(scope.losses) == 1
            return [float(loss) for loss in model.losses]

    assert listed(added_losses_kept) == [2.0]
    assert listed(contextlib.nullcontext) == []


def test_an_average_and_tensorflows_records_have_these_names():
    """Keras names an average after its weight. TensorFlow's records begin with a text."""
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.build([keras.Variable(0.0, name="weight")])
    assert [one.name for one in optimizer.variables[2:]] == ["weight_average"]
    assert isinstance(optimizer, keras_compat.AutoTrackable)
    assert any(name.startswith(keras_compat.RECORDS) for name in vars(optimizer))


def test_a_function_that_is_not_inlined():
    """The graph that calls it has an operation for it after TensorFlow's own optimization, too."""
    inner = tf.function(lambda x: x + 1.0, experimental_attributes=keras_compat.NOT_INLINED)
    graph = tf.function(lambda x: inner(x) * 2.0).get_concrete_function(tf.ones([])).graph
    [name] = {each.get_attr("f").name for each in graph.get_operations() if "Call" in each.type}
    [found] = [
        each for each in graph.as_graph_def().library.function if each.signature.name == name
    ]
    assert found.attr["_noinline"].b


def nested_model():
    """Returns a model of nested layers, with attention and a recurrent layer."""
    inner = keras.Sequential([keras.Input([4, 8]), keras.layers.Dense(8), keras.layers.LSTM(5)])
    inputs = keras.Input([4, 8])
    attended = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(inner(attended)))


def test_all_layers_are_found():
    """Layers of nested models and the cell of a recurrent layer are found too."""
    kinds = {type(layer).__name__ for layer in all_layers(nested_model())}

    assert {"Functional", "Sequential", "Dense", "LSTM", "LSTMCell", "MultiHeadAttention"} <= kinds


def test_the_arguments_of_a_loss_are_found():
    """The axis of a Keras loss is found, even if the loss has no attribute of that name."""
    assert arguments_of_loss(keras.losses.CosineSimilarity(axis=1)) == {"axis": 1}
    assert arguments_of_loss(keras.losses.Dice(axis=(1, 2))) == {"axis": (1, 2)}
    assert arguments_of_loss(keras.losses.mean_squared_error) == {}


def test_the_mask_of_outputs_is_found():
    """A layer that supports masking passes its mask on with its outputs; a plain tensor has none."""
    layers = [keras.layers.Masking(), keras.layers.Dense(1)]
    outputs = keras.Sequential([keras.Input([2, 1]), *layers])(tf.constant([[[0.0], [1.0]]]))

    assert keras_mask(outputs).numpy().tolist() == [[False, True]]
    assert keras_mask(tf.ones([1])) is None


def test_a_call_leads_to_the_graph_of_its_function():
    """The outputs of a function that is called in another one are tensors of its own graph."""
    inner = tf.function(lambda x: (x, x + 1.0))

    @tf.function
    def outer(x):
        found.extend(outputs_of_called(inner(x)[1].op))
        return x

    found = []
    outer(tf.ones([2]))
    assert [each.op.type for each in found] == ["Identity", "Identity"]
    assert found[1].op.inputs[0].op.type == "AddV2"


def test_the_means_of_a_models_own_loss_are_found():
    """A compiled model's `compute_loss` updates variables that `fit` logs."""
    x = np.ones([2, 1], np.float32)
    inputs = keras.Input([1])
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    assert means_of_compute_loss(model) == []
    model.compile("sgd", ["mse", "mse"])
    model.compute_loss(x, [x, x], model(x))

    assert len(means_of_compute_loss(model)) == 4
    assert means_of_compute_loss(tf.Module()) == []


def test_a_metric_reads_a_mask():
    """A metric of Keras leaves out what the mask of the predictions leaves out."""
    metric = keras.metrics.MeanSquaredError()
    metric.update_state(
        tf.zeros([1, 2, 1]), with_keras_mask(tf.constant([[[3.0], [5.0]]]), [[False, True]])
    )
    assert float(metric.result()) == 25.0
    assert with_keras_mask(metric, None) is metric


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_half_model_computes_exactly_in_float32(policy):
    """Inside the context a mixed model gives the bits of a float32 model with the same weights."""
    keras.config.set_dtype_policy(policy)
    try:
        half = nested_model()
    finally:
        keras.config.set_dtype_policy("float32")
    full = nested_model()
    full.set_weights(half.get_weights())
    x = np.random.default_rng(0).standard_normal([2, 4, 8]).astype(np.float32)
    with computing_in_float32(half):
        ours = tf.function(half)(x)

    assert ours.dtype == tf.float32
    np.testing.assert_array_equal(ours, tf.function(full)(x))
    assert half.layers[-1].dtype_policy.name == policy


def test_updates_are_counted_atomically():
    """Inside the context `apply` increments `iterations` with the variable's own `assign_add`."""
    weight = keras.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    with atomic_update_count(optimizer):
        graph = tf.function(lambda: optimizer.apply([tf.constant(1.0)], [weight]))
        operations = {each.type for each in graph.get_concrete_function().graph.get_operations()}
        graph()

    assert "AssignAddVariableOp" in operations
    assert optimizer.iterations.numpy() == 1
    assert "assign_add" not in vars(optimizer.iterations)


def test_calls_are_replaced_and_restored():
    """A layer whose `call` was replaced before gets that one back, and others their class's."""
    plain, patched = keras.layers.Activation("relu"), keras.layers.Activation("relu")
    patched.call = lambda x: x + 1.0
    x = tf.constant([1.0])
    with replaced_calls([plain, patched], lambda layer: lambda x: x * 10.0):  # noqa: ARG005
        inside = [float(layer(x)[0]) for layer in (plain, patched)]

    assert inside == [10.0, 10.0]
    assert [float(layer(x)[0]) for layer in (plain, patched)] == [1.0, 2.0]
    assert "call" not in vars(plain)


def test_replicas_may_leave_in_any_order():
    """The last one restores the layer's own `call`, and what the first one made serves all."""
    plain, patched = keras.layers.Activation("relu"), keras.layers.Activation("relu")
    patched.call = lambda x: x + 1.0
    x = tf.constant([1.0])

    def block(number):
        return replaced_calls([plain, patched], lambda layer: lambda x: x * number)  # noqa: ARG005

    first, second = block(10.0), block(20.0)
    first.__enter__()
    second.__enter__()
    found = [[float(layer(x)[0]) for layer in (plain, patched)]]
    for leaves in (first, second):
        leaves.__exit__(None, None, None)
        found.append([float(layer(x)[0]) for layer in (plain, patched)])

    assert found == [[10.0, 10.0], [10.0, 10.0], [1.0, 2.0]]
    assert "call" not in vars(plain)


def test_activity_regularizers_see_float32():
    """A sum of squares that overflows float16 is finite inside the context."""
    regularizer = keras.regularizers.L2(1.0)
    layer = keras.layers.Activation("linear", activity_regularizer=regularizer, dtype="float16")
    model = keras.Sequential([keras.Input([2], dtype="float16"), layer])
    x = tf.constant([[300.0, 300.0]], tf.float16)
    with regularizers_in_float32(model):
        model(x)
        penalty = float(model.losses[0])

    assert penalty == 2 * 300.0**2
    assert layer.activity_regularizer is regularizer


def test_layers_get_their_policy_back():
    """An exception inside the context restores every layer's policy too."""
    layer = keras.layers.Dense(1)
    seen = []

    def fail():
        with layers_under_policy("float16", [layer]):
            seen.append(layer.compute_dtype)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert seen == ["float16"]
    assert layer.dtype_policy.name == "float32"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("int8_from_mixed_bfloat16", "int8_from_float32"),
        ("int4/128_from_mixed_float16", "int4/128_from_float32"),
        ("gptq/4/8_from_mixed_bfloat16", "gptq/4/8_from_float32"),
        ("awq/4/8_from_mixed_float16", "awq/4/8_from_float32"),
        ("float8_from_mixed_bfloat16", "float8_from_float32"),
        ("mixed_float16", "float32"),
    ],
)
def test_a_policy_keeps_its_quantization(before, after):
    """L21: another dtype leaves the mode, the block size and the length of histories alone."""
    policy = keras.dtype_policies.get(before)
    found = policy_with_dtype(policy, "float32")

    assert found == keras.dtype_policies.get(after)
    assert type(found) is type(policy)


def test_a_map_of_policies_stays_as_it_is():
    """L21: layers that share a map of policies compute in float32 without a change to the map."""
    half = keras.DTypePolicy("mixed_float16")
    policies = keras.dtype_policies.DTypePolicyMap(half, {"other": keras.DTypePolicy("float32")})
    layers = [keras.layers.Dense(1, dtype=policies) for _ in range(2)]
    model = keras.Sequential([keras.Input([2]), *layers])
    with computing_in_float32(model):
        inside = [layer.compute_dtype for layer in layers]

    assert inside == ["float32", "float32"]
    assert [layer.compute_dtype for layer in layers] == ["float16", "float16"]
    assert layers[0].dtype_policy is layers[1].dtype_policy is policies
    assert list(policies) == ["other"]


def test_statistics_are_those_of_the_variables():
    """The tensors of a `Normalization` layer follow its variables when they are recomputed."""
    layer = keras.layers.Normalization()
    model = keras.Sequential([keras.Input([2]), layer])
    layer.adapt_mean.assign([3.0, 4.0])
    recompute_constants(model)

    np.testing.assert_array_equal(layer.mean, [[3.0, 4.0]])


def test_a_normalization_that_was_never_called_has_no_constants():
    """A model may hold such a layer for a case that does not occur."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.spare = keras.layers.Normalization()
    model.given = keras.layers.Normalization(mean=1.0, variance=2.0)
    model(np.ones([1, 1]))

    assert not recompute_constants(model)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: keras.optimizers.SGD(momentum=0.9), ["momentum"]),
        (keras.optimizers.Adam, ["momentum", "velocity"]),
    ],
)
def test_slots_belong_to_their_variable(make, names):
    """The slots are those of the second variable, in the order of the update rule."""
    variables = [keras.Variable(np.zeros(size), name=f"weight_{size}") for size in (2, 3)]
    optimizer = make()
    optimizer.build(variables)
    slots = slot_variables(optimizer, variables[1])

    assert [slot.shape for slot in slots] == [(3,)] * len(names)
    for slot, name in zip(slots, names, strict=True):
        assert f"weight_3_{name}" in slot.name


@needs_multi_optimizer
def test_the_inner_optimizer_of_a_variable():
    """Each variable belongs to the optimizer that the map names for it."""
    first, second = keras.Variable(0.0, name="first"), keras.Variable(0.0, name="second")
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD()
    optimizers = keras.optimizers.OptimizerMap(sgd, {"first": adam})
    optimizer = keras.optimizers.MultiOptimizer(optimizers)
    optimizer.build([first, second])

    assert inner_optimizer(optimizer, first) is adam
    assert inner_optimizer(optimizer, second) is sgd


def test_what_a_learning_rate_was_set_to():
    """A number is a variable, whose value may change; a schedule is itself."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    number = keras.optimizers.SGD(0.1)
    before = learning_rate_setting(number)
    number.learning_rate = 0.2

    assert learning_rate_setting(number) is before
    assert isinstance(before, keras.Variable)
    assert learning_rate_setting(keras.optimizers.SGD(schedule)) is schedule


NORMALIZATIONS = {
    "batch, 2-D": (keras.layers.BatchNormalization, (6, 3)),
    "batch, 3-D": (keras.layers.BatchNormalization, (4, 5, 3)),
    "batch, images": (keras.layers.BatchNormalization, (2, 3, 3, 2)),
    "batch, channels first": (
        lambda **kw: keras.layers.BatchNormalization(axis=1, **kw),
        (2, 2, 3, 3),
    ),
    "layer": (keras.layers.LayerNormalization, (4, 5)),
    "group": (lambda **kw: keras.layers.GroupNormalization(2, **kw), (3, 5, 4)),
}


def second_derivatives(layer, x, direction):
    """The product of a Hessian and a direction: by tapes, and by finite differences."""
    arguments = {"training": True} if isinstance(layer, keras.layers.BatchNormalization) else {}
    factors = tf.constant(np.random.default_rng(1).normal(size=x.shape))

    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sin(layer(x, **arguments)) * factors)
        return tape.gradient(y, x)

    with tf.GradientTape() as tape:
        tape.watch(x)
        along = tf.reduce_sum(slope(x) * direction)
    step = 1e-5 * direction
    return tape.gradient(along, x), (slope(x + step) - slope(x - step)) / 2e-5


@pytest.mark.sampled
@pytest.mark.parametrize("what", NORMALIZATIONS)
def test_normalization_layers_have_right_second_derivatives(what):
    """Inside the context second derivatives equal finite differences in float64; outside of it
    they are off by more than 1%, until Keras is mended.
    """
    make, shape = NORMALIZATIONS[what]
    layer, generator = make(dtype="float64"), np.random.default_rng(0)
    x, direction = (tf.constant(generator.normal(1.0, 2.0, shape)) for _ in range(2))

    def error():
        found, wanted = second_derivatives(layer, x, direction)
        return float(tf.norm(found - wanted) / tf.norm(wanted))

    with differentiable_moments():
        inner = error()
        with differentiable_moments():
            pass
        nested = error()

    assert max(inner, nested) < 1e-8
    assert error() > 0.01


def test_first_derivatives_of_moments_keep_their_bits():
    """Values and first derivatives have the bits of Keras's own formula."""
    x = tf.random.stateless_normal([7, 5], [0, 1])

    def computed():
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, variance = keras.ops.moments(x, [0])
            y = tf.reduce_sum(tf.sin(mean) + tf.math.rsqrt(variance))
        return [mean, variance, tape.gradient(y, x)]

    with differentiable_moments():
        ours = computed()
    for one, other in zip(ours, computed(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_activity_regularizers_see_complex_numbers():
    """Their imaginary part would be lost in a cast to float32."""
    seen = []
    layer = keras.layers.Layer(activity_regularizer=lambda x: seen.append(x) or 0.0)
    model = keras.Sequential([layer])
    with regularizers_in_float32(model):
        layer.activity_regularizer(tf.constant(3.0 + 4.0j))

    assert seen[0].numpy() == 3.0 + 4.0j


def test_inputs_that_keras_casts_to_half_precision_are_found():
    """Those that no `keras.Input` declares."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inputs = keras.Input([3])
        blind = keras.Sequential([keras.layers.Dense(2)])
        model = keras.Model(inputs, blind(inputs))
        declared = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    finally:
        keras.config.set_dtype_policy("float32")

    assert [each.dtype for each in keras_compat.inputs_in_half(blind)] == ["float16"]
    for other in (model, declared, declared.layers[0], keras.Sequential([keras.layers.Dense(2)])):
        assert keras_compat.inputs_in_half(other) == []
