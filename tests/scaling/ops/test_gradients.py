"""Scaling and unscaling, bit for bit, and the check for inf and NaN."""

import generators
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given

import scaling

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]


def fixed(scale):
    """The state of a fixed scale."""
    return scaling.FixedLossScale(scale).initial_state()


# 2^-100 survives the scale; numbers that overflow or underflow are not compared.
@example(np.array([1.0, -1.5, 2.0**-100], np.float32), 2.0**24)
@given(generators.float32_arrays(), generators.powers_of_two())
def test_unscaling_returns_the_bits(gradient, scale):
    """L1: gradients that neither overflow nor underflow keep their bits."""
    with np.errstate(over="ignore"):
        scaled = gradient * np.float32(scale)
    survives = np.isfinite(scaled) & (
        (np.abs(scaled) >= np.finfo(np.float32).tiny) | (gradient == 0)
    )
    state = fixed(scale)
    actual = scaling.unscale_gradients(scaling.scale_loss(gradient, state), state).numpy()

    assert gradient[survives].tobytes() == actual[survives].tobytes()


def test_a_scale_that_is_not_a_power_of_two_changes_bits():
    """L1: the law needs powers of two: with a scale of 3, a third of a million gradients change."""
    gradient = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    there_and_back = gradient * np.float32(3) * np.float32(1 / np.float32(3))

    assert 0.6 < np.mean(there_and_back == gradient) < 0.75


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_every_dtype_and_rank(dtype, shape):
    """Half precision becomes float32, wider dtypes stay, and shapes of all ranks stay."""
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    ones = tf.ones(shape, dtype)
    scaled = scaling.scale_loss(ones, fixed(8.0))
    unscaled = scaling.unscale_gradients([ones], fixed(8.0))[0]

    assert (scaled.dtype, scaled.shape) == (wide, ones.shape)
    assert (unscaled.dtype, unscaled.shape) == (wide, ones.shape)
    np.testing.assert_array_equal(scaled.numpy(), np.full(shape, 8.0))
    np.testing.assert_array_equal(unscaled.numpy(), np.full(shape, 0.125))


def test_a_half_precision_loss_is_scaled_in_float32():
    """The product is finite although 2^24 is infinite in float16."""
    assert float(scaling.scale_loss(tf.constant(1.0, tf.float16), fixed(2.0**24))) == 2.0**24


def test_none_and_sparse_gradients_survive():
    """None stays None; IndexedSlices stay sparse, with each index once, summed in float32."""
    slices = tf.IndexedSlices(
        tf.constant([[40000.0], [1.0], [40000.0]], tf.float16), tf.constant([2, 0, 2]), [4, 1]
    )
    nothing, sparse = scaling.unscale_gradients([None, slices], fixed(8.0))

    assert nothing is None
    assert isinstance(sparse, tf.IndexedSlices)
    # 80,000 would be infinite in float16.
    assert dict(
        zip(sparse.indices.numpy().tolist(), sparse.values.numpy()[:, 0].tolist(), strict=True)
    ) == {2: 10000.0, 0: 0.125}
    assert list(sparse.dense_shape) == [4, 1]


def test_coalesced_rows_have_the_norm_of_the_gradient():
    """Two rows 3 and 4 with the same index are a gradient of 7; as separate rows their norm is 5."""
    slices = tf.IndexedSlices(tf.constant([3.0, 4.0]), tf.constant([1, 1]))

    assert float(tf.norm(scaling.coalesce(slices).values)) == 7.0


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_may_be_coalesced_again(compiled):
    """Under XLA, whose `tf.unique` reads past the end of what another one has returned."""

    @tf.function(jit_compile=compiled)
    def again(indices):
        once = scaling.coalesce(tf.IndexedSlices(tf.ones([100, 2]), indices))
        unscaled = scaling.unscale_gradients([once], fixed(2.0))
        stats = scaling.gradient_stats(unscaled, fixed(2.0))
        read = tf.gather(tf.ones([9, 2]), tf.reshape(once.indices, [-1]))
        return unscaled[0].indices, unscaled[0].values, stats.size, read

    indices, values, size, read = again(tf.range(100) % 7)

    assert indices.numpy().tolist() == list(range(7))
    assert values.numpy().tolist() == [[7.5, 7.5]] * 2 + [[7.0, 7.0]] * 5
    assert float(size[0]) == 14.0
    assert read.shape == (7, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_places_among_unique_values_are_coalesced(compiled):
    """The second output of `tf.unique` repeats itself: here it reads row 0 three times."""
    table = tf.Variable(tf.ones([3, 2]))

    @tf.function(jit_compile=compiled)
    def step(ids):
        with tf.GradientTape() as tape:
            _, places = tf.unique(ids)
            loss = scaling.scale_loss(tf.reduce_sum(tf.gather(table, places)), fixed(8.0))
        gradients = scaling.unscale_gradients(tape.gradient(loss, [table]), fixed(8.0))
        overflowing = tf.IndexedSlices(tf.fill([4], 3e38), places)
        finite = scaling.all_finite(scaling.unscale_gradients([overflowing], fixed(1.0)))
        return gradients[0].indices, gradients[0].values, finite

    indices, values, finite = step(tf.constant([70, 90, 70, 70]))

    assert indices.numpy().tolist() == [0, 1]
    assert values.numpy().tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert not finite


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_were_left_out_have_no_gradient(compiled):
    """Under XLA, whose `tf.unique` takes all that `tf.boolean_mask` was given for its result."""
    table = tf.Variable(tf.reshape(tf.range(6.0), [3, 2]))

    @tf.function(jit_compile=compiled)
    def step(ids):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, tf.boolean_mask(ids, ids > 1))
            loss = scaling.scale_loss(tf.reduce_sum(rows * rows), fixed(8.0))
        return scaling.unscale_gradients(tape.gradient(loss, [table]), fixed(8.0))

    [gradient] = step(tf.constant([1, 2, 1, 2, 1]))

    assert isinstance(gradient, tf.IndexedSlices) != compiled
    assert tf.convert_to_tensor(gradient).numpy().tolist() == [[0, 0], [0, 0], [16, 20]]


def test_rows_from_outside_of_a_function_are_coalesced():
    """A function may read slices that have values already."""
    slices = tf.IndexedSlices(tf.constant([3.0, 4.0]), tf.constant([1, 1]))
    found = tf.function(lambda: scaling.coalesce(slices))()

    assert (found.indices.numpy().tolist(), found.values.numpy().tolist()) == ([1], [7.0])


def test_no_loss_scale_returns_the_same_tensors():
    """With `NoLossScale`, loss and gradients are returned as the same tensors."""
    state, loss = scaling.NoLossScale().initial_state(), tf.constant(2.0)

    assert scaling.scale_loss(loss, state) is loss
    assert scaling.unscale_gradients([loss], state)[0] is loss


def test_unscaling_is_exact_in_a_graph_at_every_power_of_two():
    """L1: TensorFlow's graphs make an approximate reciprocal of 1 / x, which is exact for a scalar only."""
    unscale = tf.function(scaling.unscale_gradients)
    gradient = tf.constant([1.0, -1.7, 2.0**-20])
    for exponent in range(-100, 101):
        rule = scaling.FixedLossScale(2.0**exponent)
        found = unscale(gradient * 2.0**exponent, rule.initial_state())
        assert found.numpy().tobytes() == gradient.numpy().tobytes()


@pytest.mark.parametrize("dtype", [*FLOATS, tf.complex64])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_one_bad_element_is_enough(dtype, bad, shape):
    """An inf or NaN is found at any position, in tensors of any float dtype and rank."""
    good = np.ones(shape)
    for place in np.ndindex(*shape):
        values = good.copy()
        values[place] = bad

        assert not scaling.all_finite([tf.ones([2]), tf.cast(values, dtype)])
    assert scaling.all_finite([tf.cast(good, dtype)])


@given(st.lists(st.sampled_from([0.0, 1.0, 6e4, np.inf, np.nan])), st.integers(0, 3))
def test_agrees_with_numpy(values, nesting):
    """For any values at any depth of a structure, the result is that of NumPy."""
    structure = tf.constant(values, tf.float32)
    for _ in range(nesting):
        structure = {"a": [structure, None]}

    assert bool(np.isfinite(values).all()) == bool(scaling.all_finite(structure))


def test_none_integers_and_empty_structures_are_finite():
    """None, integers, strings, empty tensors and empty structures are finite; sparse values count."""
    assert scaling.all_finite([None, tf.constant([2**31 - 1]), tf.zeros([0]), "text"])
    assert scaling.all_finite([])
    assert not scaling.all_finite([None, tf.constant(np.nan)])
    assert not scaling.all_finite([tf.IndexedSlices(tf.constant([np.nan]), tf.constant([0]))])


def test_a_nan_that_a_compiled_graph_computes_is_found():
    """A NaN that is computed inside a compiled graph is found there."""

    @tf.function(jit_compile=True)
    def check(x):
        return scaling.all_finite([x / x])

    assert check(tf.constant(1.0))
    assert not check(tf.constant(0.0))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_finite_or_not(dtype):
    """TensorFlow has no kernel that looks at float8."""
    for value, finite in ((1.0, True), (np.nan, False)):
        tensor = tf.cast(tf.constant([0.0, value]), tf.as_dtype(dtype))
        assert bool(scaling.all_finite([tensor])) is finite


def test_other_dtypes_are_an_error():
    """A cast to float32 would silently drop the imaginary part of a complex gradient."""
    with pytest.raises(TypeError, match=r"^`loss`"):
        scaling.scale_loss(tf.constant(3), fixed(2.0))
    with pytest.raises(TypeError, match=r"^`gradients`"):
        scaling.unscale_gradients([tf.constant(4 + 8j, tf.complex64)], fixed(4.0))
