"""`BlockScaling` against NumPy and torchao, its laws over blocks and shares, and its errors."""

import contextlib
import math
import warnings

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from versions import XLA_ROUNDS_ONCE

from scaling.float8 import BlockScaling, CurrentScaling, dequantize, losses_of_cast, quantize
from scaling.float8.block import maximum_of_blocks
from scaling.float8.formats import FORMATS

NUMPY = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


@st.composite
def rules_and_tensors(draw, odd=True):
    """A rule with small blocks over any axes, and a tensor that they often do not divide. If it is not
    odd, the tensor is finite and the scales are powers of two.
    """
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    number = draw(st.integers(1, len(shape)))
    axes = draw(st.one_of(st.none(), st.permutations(range(-len(shape), 0))))
    rule = BlockScaling(
        dtype=draw(st.sampled_from([*FORMATS])),
        block=tuple(draw(st.lists(st.integers(1, 4), min_size=number, max_size=number))),
        axes=None if axes is None else tuple(axes[:number]),
        margin=draw(st.integers(0, 2)),
        power_of_two=not odd or draw(st.booleans()),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = np.float32(rng.normal(size=shape) * 2.0 ** rng.uniform(-60, 60, shape))
    x[rng.random(shape) < draw(st.sampled_from([0.0, 0.9]))] = 0.0
    if odd and draw(st.booleans()):
        x[rng.random(shape) < 0.1] = np.inf
        x[rng.random(shape) < 0.1] = np.nan
    return rule, x


def blocks(rule, x):
    """The index of each block with the slices that cut it out of the tensor, in plain Python."""
    sizes = [1] * x.ndim
    axes = rule.axes if rule.axes is not None else range(-len(rule.block), 0)
    for axis, size in zip(axes, rule.block, strict=True):
        sizes[axis] = size
    counts = [math.ceil(length / size) for length, size in zip(x.shape, sizes, strict=True)]
    for index in np.ndindex(*counts):
        yield (
            index,
            tuple(slice(at * size, (at + 1) * size) for at, size in zip(index, sizes, strict=True)),
        )


def cast(rule, x):
    """The blocks' magnitudes and scales, what a product sees, and the counts of what is lost."""
    amax = rule.amax(x)
    scale = rule.choose_scale(rule.initial_state(), amax)
    spread = rule.spread(scale, x)
    seen = dequantize(quantize(x, spread, rule.dtype), spread)
    return [each.numpy() for each in (amax, scale, seen, *losses_of_cast(x, spread, rule.dtype))]


@settings(max_examples=40)
@given(rules_and_tensors())
def test_every_block_is_cast_as_a_tensor_of_its_own(rule_and_tensor):
    """Its magnitude is NumPy's, its scale and numbers are those of `CurrentScaling` for the block
    alone; zeros, inf and NaN in one block change nothing in another; the counts add up.
    """
    rule, x = rule_and_tensor
    alone = CurrentScaling(rule.dtype, rule.margin, rule.power_of_two)
    amax, scale, seen, *lost = cast(rule, x)
    expected = np.zeros(2, np.int32)
    for index, place in blocks(rule, x):
        of_block = alone.choose_scale(alone.initial_state(), alone.amax(x[place]))
        np.testing.assert_array_equal(amax[index], np.max(np.abs(x[place])))
        np.testing.assert_array_equal(scale[index], of_block)
        quantized = dequantize(quantize(x[place], of_block, rule.dtype), of_block)
        np.testing.assert_array_equal(seen[place], quantized)
        expected += [int(each) for each in losses_of_cast(x[place], of_block, rule.dtype)]
    assert lost == expected.tolist()
    assert amax.shape == scale.shape == tuple(np.array([*dict(blocks(rule, x))][-1]) + 1)


@settings(max_examples=40)
@given(rules_and_tensors(odd=False))
def test_a_cast_is_as_exact_as_the_format_in_every_block(rule_and_tensor):
    """The error is at most eps / 2 of the number, or half of the smallest number times the scale of
    its block; nothing saturates.
    """
    rule, x = rule_and_tensor
    info = ml_dtypes.finfo(NUMPY[rule.dtype])
    _, scale, seen, saturated, _ = cast(rule, x)
    spread = rule.spread(scale, x).numpy().astype(np.float64)
    bound = np.maximum(
        np.abs(x) * (float(info.eps) / 2), spread * float(info.smallest_subnormal) / 2
    )
    assert (np.abs(seen.astype(np.float64) - x) <= bound).all()
    assert not saturated


@settings(max_examples=40)
@given(rules_and_tensors(), st.randoms(use_true_random=False))
def test_an_order_within_blocks_does_not_matter(rule_and_tensor, chance):
    """Elements that change places in their block leave every scale as it is, and keep their values;
    blocks that change places take their scales along.
    """
    rule, x = rule_and_tensor
    _, scale, seen, *_ = cast(rule, x)
    places = dict(blocks(rule, x))
    shuffled, expected = x.copy(), seen.copy()
    for place in places.values():
        order = chance.sample(range(x[place].size), x[place].size)
        shuffled[place] = x[place].ravel()[order].reshape(x[place].shape)
        expected[place] = seen[place].ravel()[order].reshape(x[place].shape)
    _, again, found, *_ = cast(rule, shuffled)
    np.testing.assert_array_equal(again, scale)
    np.testing.assert_array_equal(found, expected)

    one, other = chance.choice([*places]), chance.choice([*places])
    if x[places[one]].shape == x[places[other]].shape:
        swapped, wanted = x.copy(), scale.copy()
        swapped[places[one]], swapped[places[other]] = x[places[other]], x[places[one]]
        wanted[one], wanted[other] = scale[other], scale[one]
        np.testing.assert_array_equal(cast(rule, swapped)[1], wanted)


@settings(max_examples=40)
@given(rules_and_tensors(), st.integers(1, 3), st.data())
def test_shares_that_are_cut_between_blocks_need_no_agreement(rule_and_tensor, number, data):
    """A tensor that is concatenated from shares of whole blocks has the concatenated scales, bit for
    bit, along every axis.
    """
    rule, x = rule_and_tensor
    axis = data.draw(st.integers(-x.ndim, -1))
    axes = rule.axes if rule.axes is not None else range(-len(rule.block), 0)
    size = dict(zip(axes, rule.block, strict=True)).get(axis, 1)
    cuts = [size * at for at in range(1, x.shape[axis]) if size * at < x.shape[axis]][:number]
    whole = cast(rule, x)
    shares = [cast(rule, share) for share in np.split(x, cuts, axis)]
    for at in range(3):
        together = np.concatenate([share[at] for share in shares], axis)
        assert together.tobytes() == whole[at].tobytes()
    assert [sum(share[at] for share in shares) for at in (3, 4)] == whole[3:]


@settings(max_examples=40)
@given(rules_and_tensors(), st.integers(0, 2**32 - 1))
def test_the_maximum_over_shares_gives_the_scales_of_one_device(rule_and_tensor, seed):
    """Also of shares that divide blocks in any way: the numbers of a share are 0 where they belong to
    another.
    """
    rule, x = rule_and_tensor
    owner = np.random.default_rng(seed).integers(0, 3, x.shape)
    shares = [rule.amax(np.where(owner == at, x, np.float32(0))).numpy() for at in range(3)]
    assert np.maximum.reduce(shares).tobytes() == rule.amax(x).numpy().tobytes()


@pytest.mark.parametrize(
    ("dtype", "block", "axes"),
    [("float8_e4m3fn", (1, 16), None), ("float8_e5m2", (4, 32), (0, -2))],
)
def test_graphs_and_xla_give_the_same_bits(dtype, block, axes):
    """Also of zeros, inf, NaN and subnormal numbers, of a ragged last block, and of sizes that are
    not known in advance.
    """
    rng, shape = np.random.default_rng(0), (5, 70, 19)
    x = np.float32(rng.normal(size=shape) * 2.0 ** rng.uniform(-145, 40, shape))
    x[0], x[1, 3, 5], x[2, 0, 0] = 0.0, np.inf, np.nan
    rule = BlockScaling(dtype, block, axes)

    def both(x):
        spread = rule.spread(rule.choose_scale(rule.initial_state(), rule.amax(x)), x)
        quantized = quantize(x, spread, dtype)
        counts = losses_of_cast(x, spread, dtype)
        return tf.cast(quantized, tf.float32), dequantize(quantized, spread), spread, *counts

    unknown = [tf.TensorSpec([None] * 3)]
    expected = both(tf.constant(x))
    compiled = [tf.function(both, jit_compile=True)] if XLA_ROUNDS_ONCE else []
    for function in (*compiled, tf.function(both, input_signature=unknown)):
        for one, other in zip(function(tf.constant(x)), expected, strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes()


def test_blocks_of_deepseek():
    """Inputs have a scale for each token and 128 channels, kernels one for 128 x 128; the last block
    is smaller.
    """
    inputs, kernel = np.ones([2, 3, 300], np.float32), np.ones([300, 130], np.float32)
    assert BlockScaling().amax(inputs).shape == (2, 3, 3)
    assert BlockScaling(block=(128, 128)).amax(kernel).shape == (3, 2)
    assert BlockScaling(block=(128,)).amax(kernel[0]).shape == (2,)
    assert BlockScaling().amax(np.ones([2, 0], np.float32)).shape == (2, 0)
    assert BlockScaling(block=(np.int64(2),), axes=(np.int64(0),)) == BlockScaling(
        block=(2,), axes=(0,)
    )


@given(st.integers(1, 9), st.integers(1, 12))
def test_the_maximum_of_blocks_along_an_axis(length, size):
    """Blocks may be larger than the tensor."""
    x = np.random.default_rng(length).integers(0, 100, (2, length, 3), np.int32)
    expected = [x[:, at : at + size].max(axis=1) for at in range(0, length, size)]
    found = maximum_of_blocks(tf.constant(x), 1, size)
    np.testing.assert_array_equal(found, np.stack(expected, axis=1))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (64, 32)])
def test_blocks_are_those_of_torchao(dtype, block):
    """Scales that are quotients, and what a product sees, bit for bit."""
    torch = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[oracles]'")
    with warnings.catch_warnings(), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")  # of its own code, while it is imported
        theirs = pytest.importorskip("torchao.quantization.quant_primitives")
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(256, 512)) * 2.0 ** rng.uniform(-20, 20, (256, 512)))
    rule, wanted = BlockScaling(dtype, block, power_of_two=False), getattr(torch, dtype)
    _, scale, seen, *_ = cast(rule, x)
    other = theirs._choose_scale_float8(torch.tensor(x), list(block), wanted)
    quantized = theirs._quantize_affine_float8(torch.tensor(x), other, wanted)
    np.testing.assert_array_equal(scale, other.numpy())
    np.testing.assert_array_equal(seen, theirs._dequantize_affine_float8(quantized, other).numpy())


OF_BLOCK = (
    ". It is the size of a block along each axis. Use (1, 128) for inputs and gradients, (128, 128) "
    "for kernels."
)
OF_AXES = ". They are the axes that a block extends over. Use None, the default, for the last axes."
OF_X = (
    ". A block extends over these axes, each once. Make the rule with other `axes`, and a `block` of "
    "as many sizes."
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (
                lambda block=block: BlockScaling(block=block),
                f"`block` must be a tuple of 1 to 8 ints from 1 to 2^20; got {block!r}{OF_BLOCK}",
            )
            for block in (128, [1, 128], (), (0,), (2**20 + 1,), (1.0,), (True,), (1,) * 9)
        ),
        *(
            (
                lambda axes=axes: BlockScaling(axes=axes),
                "`axes` must be None or as many different ints as `block` has; got "
                f"{axes!r} for (1, 128){OF_AXES}",
            )
            for axes in ((-1,), (0, 0), (0, 9), "01", ([], 0))
        ),
        (
            lambda: BlockScaling().amax([1.0]),
            f"`x` must have the axes of the rule's blocks, (-2, -1); got shape (1,){OF_X}",
        ),
        (
            lambda: BlockScaling(axes=(0, -1)).amax([1.0]),
            f"`x` must have the axes of the rule's blocks, (0, -1); got shape (1,){OF_X}",
        ),
        (
            lambda: BlockScaling(block=(2,)).spread([1.0], [1.0] * 3),
            "`scale` must have a number for each block, shape (2,); got (1,). A tensor of shape (3,) "
            "is divided into such blocks. Pass what choose_scale() returned for this tensor.",
        ),
        (
            lambda: BlockScaling().choose_scale(CurrentScaling().initial_state(), 1.0),
            "`state` must be a BlockScalingState; got CurrentScalingState. Each rule has a state "
            "type of its own. Pass what initial_state() or advance() returned.",
        ),
        (
            lambda: BlockScaling().advance(BlockScaling().initial_state(), 1),
            "`amax` must have a float dtype; got int32. It is the largest magnitude of a tensor. "
            "Pass tf.reduce_max(tf.abs(tensor)).",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(call, message):
    """An error names the argument, its value, why, and what to do."""
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert str(error.value) == message


def test_a_rank_that_is_not_known_is_refused():
    """In a graph, blocks need to know which axes there are."""
    with pytest.raises(ValueError, match="must have the axes of the rule's blocks"):
        tf.function(BlockScaling().amax).get_concrete_function(tf.TensorSpec(None))


def test_a_block_may_be_larger_than_the_tensor():
    """One scale for each row: nothing in the graph is larger than the tensor."""
    x = tf.constant(np.arange(12).reshape(4, 3), tf.int32)
    traced = tf.function(lambda x: maximum_of_blocks(x, 1, 2**20)).get_concrete_function(x)
    assert traced(x).numpy().tolist() == [[2], [5], [8], [11]]
    sizes = [out.shape.num_elements() for op in traced.graph.get_operations() for out in op.outputs]
    assert max(sizes) <= 12
