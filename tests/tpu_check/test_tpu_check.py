"""The step compiles for TPUs, and four emulated replicas compute the right numbers with it.

It has not been run on a TPU: nothing here claims so. `pip install -e '.[tpu-check]'` installs what
it takes; libtpu is Google's, under its own terms, and is used by nothing else.
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
sys.path.insert(0, str(HERE))  # the two programs are no package

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
    """Runs one of the two programs."""
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
    """The step in one precision, lowered; what is to be said of it."""
    out = tmp_path_factory.mktemp(request.param)
    result = program("lower.py", out, request.param)
    assert result.returncode == 0, result.stderr
    return request.param, out, json.loads((out / "facts.json").read_text())


def outputs(out, what):
    """Runs the step on emulated replicas; returns each output of the first, when all agree."""
    result = program("compiled.py", out, what)
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(out / f"{what}.npz") as saved:
        stacked = [saved[f"arr_{index}"] for index in range(len(saved.files))]
    for each in stacked:
        assert all(replica.tobytes() == each[0].tobytes() for replica in each)
    return [each[0] for each in stacked]


def test_it_is_one_program(lowered):
    """And no replica can miss a collective."""
    assert lowered[2]["programs"] == 1
    assert lowered[2]["missed"] == []


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_it_compiles(lowered, topology):
    """By Google's own compiler, for four replicas."""
    precision, out, _ = lowered
    result = program("compiled.py", out, topology)
    assert result.returncode == 0, result.stderr[-3000:]
    facts = json.loads(result.stdout.splitlines()[-1])
    print(precision, topology, facts)  # noqa: T201

    assert facts["code_bytes"] > 0


def test_the_numbers_are_those_of_mirrored(lowered, mirrored):
    """To float rounding: loss, norm, weights, slots, statistics and averages, alike on all replicas."""
    precision, out, facts = lowered
    found = outputs(out, "run")
    outcome = dict(zip(facts["outcome"], found, strict=False))
    # Compiled, too: XLA draws other numbers from the same keys.
    trainer = lower.Checked(precision, mirrored(lower.CORES), jit_compile=True)
    trainer.train(tf.data.Dataset.from_tensors(lower.example(poisoned=False)), steps=1)
    # By their order: the names of layers are counted on in a process.
    values = [copies[0].numpy() for _, copies in lower.copies(trainer)]
    expected = dict(zip(facts["paths"], values, strict=True))
    far = 1e-2 if precision == "mixed_bfloat16" else 1e-3

    assert outcome["grads_finite"]
    assert len(facts["written"]) > 15
    for path, output, _ in facts["written"]:
        np.testing.assert_allclose(found[output], expected[path], rtol=far, atol=far, err_msg=path)
    with np.load(out / "arguments.npz") as saved:
        moved = [
            bool((found[output] != saved[f"arr_{argument}"]).any())
            for _, output, argument in facts["written"]
        ]
    assert all(moved)


def test_one_poisoned_replica_stops_all(lowered):
    """All four skip, and move nothing; all know that it was the third, and why."""
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
    """The host is not in a TPU's program."""
    result = program("lower.py", tmp_path, "prints")

    assert result.returncode != 0
    assert "unsupported operations" in result.stderr
    assert "StringFormat" in result.stderr or "PrintV2" in result.stderr


def test_a_step_that_is_too_large_is_refused(tmp_path):
    """It asks for more memory than there is."""
    assert program("lower.py", tmp_path, "huge").returncode == 0
    result = program("compiled.py", tmp_path, "v5e:2x2")

    assert result.returncode != 0
    assert "hbm" in result.stderr.lower()


def test_a_step_in_which_one_decides_alone_never_ends(tmp_path):
    """It compiles cleanly; with one replica poisoned the others wait for it, and XLA gives up."""
    result = program("lower.py", tmp_path, "alone")
    assert result.returncode == 0, result.stderr
    assert program("compiled.py", tmp_path, "run").returncode == 0
    result = program("compiled.py", tmp_path, "run-poisoned")

    assert result.returncode != 0
    assert "rendezvous" in result.stderr.lower()
