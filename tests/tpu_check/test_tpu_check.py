"""The step compiles for TPUs, and four emulated replicas compute the right numbers with it.

The step has not been run on a TPU. `pip install -e '.[tpu-check]'` installs what these tests need.
libtpu is Google's, has its own license terms, and is used only here.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import scaling

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))  # the two programs are not in a package

import lower  # noqa: E402

ROOT = HERE.parents[1]
MISSING = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} missing: pip install -e '.[tpu-check]'"
    ),
]
STEPS = ["mixed_bfloat16", "mixed_float16"]


def program(script, *arguments, seconds=200):
    """Runs one of the two programs and returns its result."""
    return subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.fixture(scope="module", params=STEPS)
def lowered(request, tmp_path_factory):
    """Lowers the step in each precision; returns precision, folder and facts."""
    out = tmp_path_factory.mktemp(request.param)
    result = program("lower.py", out, request.param)
    assert result.returncode == 0, result.stderr
    return request.param, out, json.loads((out / "facts.json").read_text())


def outputs(out, what):
    """Runs the step on emulated replicas, checks that all agree, and returns their outputs."""
    result = program("compiled.py", out, what)
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(out / f"{what}.npz") as saved:
        stacked = [saved[f"arr_{index}"] for index in range(len(saved.files))]
    for each in stacked:
        assert all(replica.tobytes() == each[0].tobytes() for replica in each)
    return [each[0] for each in stacked]


def test_the_step_is_one_program(lowered):
    """The step is one TPU program, and no collective in it is behind a divergent condition."""
    assert lowered[2]["programs"] == 1
    assert lowered[2]["divergent"] == []


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_the_step_compiles_for_tpus(lowered, topology):
    """Google's compiler compiles the step for four replicas."""
    precision, out, _ = lowered
    result = program("compiled.py", out, topology)
    assert result.returncode == 0, result.stderr[-3000:]
    facts = json.loads(result.stdout.splitlines()[-1])
    print(precision, topology, facts)  # noqa: T201

    assert facts["code_bytes"] > 0


def test_the_numbers_are_those_of_mirrored(lowered, mirrored):
    """Weights, slots, statistics and averages are those of a mirrored strategy, up to rounding, and
    the same on all replicas.
    """
    precision, out, facts = lowered
    found = outputs(out, "run")
    outcome = dict(zip(facts["outcome"], found, strict=False))
    # Compiled as well, because XLA draws other random numbers from the same keys.
    trainer = lower.Checked(precision, mirrored(lower.CORES), jit_compile=True)
    trainer.train(tf.data.Dataset.from_tensors(lower.example(poisoned=False)), steps=1)
    # Matched by order, because Keras numbers the names of layers within a process.
    values = [copies[0].numpy() for _, copies in lower.copies(trainer)]
    expected = dict(zip(facts["paths"], values, strict=True))
    tolerance = 1e-2 if precision == "mixed_bfloat16" else 1e-3

    assert outcome["grads_finite"]
    assert len(facts["written"]) > 15
    for path, output, _ in facts["written"]:
        np.testing.assert_allclose(
            found[output], expected[path], rtol=tolerance, atol=tolerance, err_msg=path
        )
    with np.load(out / "arguments.npz") as saved:
        moved = [
            bool((found[output] != saved[f"arr_{argument}"]).any())
            for _, output, argument in facts["written"]
        ]
    assert all(moved)


def test_one_poisoned_replica_stops_all(lowered):
    """All four replicas skip and change nothing; all report the third replica and the cause."""
    _, out, facts = lowered
    found = outputs(out, "run-poisoned")
    outcome = dict(zip(facts["outcome"], found, strict=False))

    assert not outcome["grads_finite"]
    assert scaling.Cause(int(outcome["cause"])) is scaling.Cause.FORWARD
    assert (outcome["bad_replica"], outcome["inf_count"]) == (2, 1)
    with np.load(out / "arguments.npz") as saved:
        for path, output, argument in facts["written"]:
            assert found[output].tobytes() == saved[f"arr_{argument}"].tobytes(), path


def test_a_step_that_prints_is_refused(tmp_path):
    """Printing needs the host, which a TPU's program cannot call."""
    result = program("lower.py", tmp_path, "prints")

    assert result.returncode != 0
    assert "unsupported operations" in result.stderr
    assert "StringFormat" in result.stderr or "PrintV2" in result.stderr


def test_a_step_that_is_too_large_is_refused(tmp_path):
    """The compiler refuses a step that needs more memory than a TPU has."""
    assert program("lower.py", tmp_path, "huge").returncode == 0
    result = program("compiled.py", tmp_path, "v5e:2x2")

    assert result.returncode != 0
    assert "hbm" in result.stderr.lower()


def test_a_collective_behind_a_divergent_condition_hangs(tmp_path):
    """The step compiles and runs; with one poisoned replica the others wait, and XLA gives up."""
    result = program("lower.py", tmp_path, "divergent")
    assert result.returncode == 0, result.stderr
    assert program("compiled.py", tmp_path, "run").returncode == 0
    result = program("compiled.py", tmp_path, "run-poisoned")

    assert result.returncode != 0
    assert "rendezvous" in result.stderr.lower()
