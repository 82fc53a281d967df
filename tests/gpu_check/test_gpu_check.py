"""The step of each benchmark's model, compiled for GPUs that are not there, and what is in the program.

XLA's own compiler for GPUs, that of jaxlib, compiles it from a description of the card. So these tests
know the program, and no time: the step has not been run on a GPU by them. They do not see either

- TensorFlow's own kernels. With one GPU, the step is compiled as a whole, as `jit_compile="step"` has
  it; with other modes TensorFlow runs a part of it. With several, it is one replica's program as it is
  traced for a TPU, because TensorFlow, and not XLA, sums the replicas' gradients.
- which of its kernels for a product XLA would take after trying them on a card, and what cuDNN does.

`pip install -e '.[gpu-check]'` installs what these tests need.
"""

import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))  # the programs are not in a package

from program import HALF, Program, host_reads, host_work, launches  # noqa: E402

ROOT = HERE.parents[1]
MISSING = [name for name in ("jax", "jax_cuda12_plugin") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} missing: pip install -e '.[gpu-check]'"
    ),
]
REPLICAS = 4


class Case(NamedTuple):
    """What is compiled, and for what."""

    model: str
    dtype: str = "float16"
    replicas: int = 1
    card: str = "H100"
    fault: str = "none"

    def __str__(self):
        return "-".join(map(str, self)).removesuffix("-none")


class Compiled(NamedTuple):
    """A compiled step."""

    program: Program
    before: Program  # XLA's passes for GPUs
    launches: list
    instructions: dict  # for tensor cores, and how often each stands in the kernels
    memory: dict
    sizes: dict  # the number of weights


CASES = [
    *(Case(model, dtype) for model in ("mlp", "cnn") for dtype in HALF),
    *(Case(model, dtype) for model in ("resnet", "transformer") for dtype in ("float16",)),
    Case("transformer", "bfloat16", card="A100"),
    Case("resnet", "bfloat16", card="H200"),
    Case("mlp", card="A100"),
    *(Case(model, replicas=REPLICAS) for model in ("mlp", "cnn", "resnet", "transformer")),
    Case("mlp", "bfloat16", REPLICAS, "A100"),
    Case("mlp", "float32", REPLICAS, "H200"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(script, *arguments, flags=""):
    """Runs one of the two programs, with flags for XLA's compiler."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "benchmarks")))
    result = subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)],
        env=os.environ
        | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3", "GPU_CHECK_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@functools.cache
def lowered(model, dtype, replicas, fault):
    """Returns the step as HLO, and the sizes of the model."""
    with tempfile.TemporaryDirectory() as folder:
        run("lower.py", folder, model, dtype, replicas, fault)
        out = pathlib.Path(folder)
        return (out / "step.hlo").read_bytes(), json.loads((out / "sizes.json").read_text())


@functools.cache
def compiled(case):
    """Returns the program of a case."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        at_compile = case.fault == "outfeed"
        fault = "none" if at_compile or case.fault == "triton" else case.fault
        libraries = case.dtype == "float8" and case.fault != "triton"
        flags = "--xla_gpu_enable_triton_gemm=false" if libraries else ""
        hlo, sizes = lowered(case.model, case.dtype, case.replicas, fault)
        (out / "step.hlo").write_bytes(hlo)
        run("compiled.py", out, case.card, case.replicas, *(["outfeed"] * at_compile), flags=flags)
        return Compiled(
            program=Program((out / "program.txt").read_text()),
            before=Program((out / "before.txt").read_text()),
            launches=launches((out / "thunks.txt").read_text()),
            instructions=json.loads((out / "products.json").read_text()),
            memory=json.loads((out / "memory.json").read_text()),
            sizes=sizes,
        )


def wrong_products(found, dtype):
    """Returns the products that do not run in a dtype, and instructions that do not sum in float32.

    What cuDNN sums a convolution in is not in the program, so it is not known here.
    """
    short = HALF[dtype]
    products = [*found.before.products(), *found.program.products()]
    wrong = [each for each in products if each.operands != (short, short)]
    operand = "tf32" if dtype == "float32" else short  # TensorFlow's default on these cards
    right = re.compile(rf"mma\S*\.f32\.{operand}\.{operand}(\.f32)?$")
    return wrong, [each for each in found.instructions if not right.search(each)]


@every_case
def test_every_product_runs_in_the_model_s_dtype(case):
    """No product or convolution is computed in another dtype, and the kernels sum in float32."""
    found = compiled(case)
    before, after = found.before.products(), found.program.products()

    assert wrong_products(found, case.dtype) == ([], [])
    assert found.instructions
    # XLA joins products of matrices and pads them, but none has become something else.
    counted = [
        (
            sum(each.flops for each in products if not each.convolution),
            sum(each.convolution for each in products),
        )
        for products in (before, after)
    ]
    assert counted[1][0] >= counted[0][0] > 0
    assert counted[1][1] == counted[0][1]


def test_a_layer_in_float32_is_found():
    """Its product, and those of its gradients, are not in half precision."""
    products, instructions = wrong_products(compiled(Case("mlp", fault="float32-layer")), "float16")

    assert {each.operands for each in products} == {("f32", "f32")}
    # Forward and for the weights, in the step and where its finding is made; and before XLA's passes.
    assert len(products) == 2 * 2 * 2
    assert all("tf32" in each for each in instructions)


def float8_products(case):
    """Returns the calls of float8 products of cuBLASLt."""
    instructions = compiled(case).program.instructions()
    return [each for _, each in instructions if each.target == "__cublas$lt$matmul$f8"]


def float8_arrays(case):
    """Returns the float8 dtypes of all results in a program."""
    instructions = compiled(case).program.instructions()
    dtypes = {array.dtype for _, each in instructions for array in each.arrays}
    return {dtype for dtype in dtypes if dtype.startswith("f8")}


@pytest.mark.parametrize(("model", "layers"), [("mlp", 1), ("transformer", 24)])
def test_products_of_float8_layers_run_in_float8(model, layers):
    """Each converted layer has one product forward and two backward, and all are float8 products."""
    assert len(float8_products(Case(model, "float8"))) == 3 * layers


def test_kernels_of_triton_have_no_float8():
    """XLA's own kernels for products, which it takes if it cannot try any, leave the casts out.

    Then nothing is in float8, neither rounding nor products, and no message says so.
    """
    found, lost = Case("mlp", "float8"), Case("mlp", "float8", fault="triton")
    assert float8_products(lost) == []
    assert float8_arrays(found) == {"f8e4m3fn", "f8e5m2"}
    assert float8_arrays(lost) == set()


@every_case
def test_the_step_asks_the_host_for_nothing(case):
    """No infeed, outfeed, send, receive, callback or array in the host's memory."""
    found = compiled(case)

    assert host_work(found.program, found.launches) == []


def test_a_step_that_sends_to_the_host_is_found():
    """It is in the program, and in what the host launches."""
    found = compiled(Case("mlp", fault="outfeed"))
    kinds = host_work(found.program, found.launches)

    assert any("outfeed" in each for each in kinds)
    assert "kOutfeed" in kinds


def test_a_step_that_asks_the_host_is_not_compiled():
    """TensorFlow refuses it, because XLA has no such operation."""
    with pytest.raises(AssertionError, match="unsupported operations"):
        compiled(Case("mlp", fault="host"))


def expected_reads(case):
    """Returns how often the host reads a verdict in a step that goes well.

    A step in float16 that goes wrong takes its pass again to find out why, on one GPU. Of a model with
    convolutions, cuDNN's are in that branch, and XLA puts none of them into a CUDA graph. So the
    condition around it is in none either, and the host has to read the verdict: one byte in each step.
    """
    convolutions = case.model in {"cnn", "resnet"}
    return int(convolutions and case.dtype == "float16" and case.replicas == 1)


@every_case
def test_the_card_reads_the_verdict(case):
    """The condition is part of a CUDA graph, except in `expected_reads`' case."""
    found = compiled(case)

    assert any(each.kind == "kConditional" for each in found.launches)
    assert host_reads(found.program, found.launches) == expected_reads(case)


@pytest.mark.parametrize(("driver", "reads"), [("12.2.0", 1), ("12.3.0", 0)])
def test_an_old_driver_lets_the_host_read_the_verdict(driver, reads):
    """A driver before CUDA 12.3 has no conditions in graphs: XLA reads the verdict on the host."""
    found = compiled(Case("mlp", card=f"H100:{driver}"))

    assert host_reads(found.program, found.launches) == reads


@pytest.mark.parametrize("case", [case for case in CASES if case.replicas > 1], ids=str)
def test_one_sum_over_replicas(case):
    """All gradients and flags are in one all-reduce. It does not overlap the backward pass.

    XLA joins them into one because they are small, and the flags are known at the end only. So it
    waits for all, and nothing but the inverse of the scale is left to compute meanwhile.
    """
    found = compiled(case)
    (sum_of_all,) = found.program.all_reduces()
    trained, statistics = (4 * found.sizes[name] for name in ("trained", "other"))

    assert 0 < sum_of_all.bytes - trained <= statistics + 16 * REPLICAS + 12
    assert found.program.computed_while_summing() <= 4


def test_a_second_sum_is_found():
    """Losses that are summed on their own cannot join the sum of the gradients."""
    assert (
        len(compiled(Case("mlp", replicas=REPLICAS, fault="second-sum")).program.all_reduces()) == 2
    )


# What the scale may add to the bytes that a step moves. In ResNet, XLA computes the updates of twenty
# convolutions in the layout of cuDNN's gradients once they are unscaled beside them, and transposes
# both moments of Adam and the weights where it would otherwise transpose the gradient alone.
SCALE_ADDS = {"mlp": 0.01, "cnn": 0.01, "resnet": 0.02, "transformer": 0.01}


def added_by_scale(model, fault="none"):
    """Returns the part that the loss scale adds to the bytes that a step moves, in float16."""
    plain = compiled(Case(model, fault="no-scale")).program.moved()
    return compiled(Case(model, fault=fault)).program.moved() / plain - 1


@pytest.mark.parametrize("model", SCALE_ADDS)
def test_what_the_loss_scale_moves(model):
    """The scale of the loss and of the gradients is part of other kernels."""
    added = added_by_scale(model)
    print(f"{model}: the loss scale adds {added:.2%} to the bytes that a step moves")  # noqa: T201

    assert 0 < added <= SCALE_ADDS[model]


def test_gradients_that_are_unscaled_apart_are_found():
    """A pass of its own over the gradients moves more."""
    assert added_by_scale("mlp", "apart") > 2 * SCALE_ADDS["mlp"]
