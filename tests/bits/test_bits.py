"""30 steps of each set-up end with the bits in expected.json."""

import functools
import json
import os
import pathlib
import platform
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from bits import setups
from jobs import workers

HERE = pathlib.Path(__file__).parent
EXPECTED = HERE / "expected.json"
VECTORS = ("amx", "avx", "f16c", "fma", "sse4")  # with which Eigen, oneDNN and XLA compute


def computed_with():
    """Returns what the bits of a sum or a product may depend on, besides this project."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    vectors = [flag for flag in flags if flag.startswith(VECTORS)]
    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}"
    return f"{versions}; {platform.machine()} {' '.join(sorted(vectors))}"


# The set-ups that one call runs, and whether the default run calls it; CI calls the others.
FEW = ("retry", "nan_alone", "critic", "two_replicas_two_microbatches")
OTHERS = tuple(name for name in setups.IN_ONE_PROCESS if name not in FEW)
OF_WORKERS = tuple(f"{name}-{worker}" for name in setups.IN_TWO_PROCESSES for worker in "01")
NAMES = [*FEW, *OTHERS, *OF_WORKERS]


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """Returns a function of a name: the result of that set-up, which is run with the others of its
    group. With `--regenerate` all are run, and written to the file.
    """
    program = HERE / "setups.py"

    @functools.cache
    def of_group(group):
        out = tmp_path_factory.mktemp("bits")
        if group is OF_WORKERS:
            with workers(out, 2, program, out, *setups.IN_TWO_PROCESSES) as job:
                assert job.wait(300) == [0, 0], job.output()
        else:
            paths = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
            command = [sys.executable, program, out, *group]
            subprocess.run(command, check=True, timeout=300, env=paths)
        return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}

    if request.config.getoption("--regenerate"):
        results = {
            n: result for g in (FEW, OTHERS, OF_WORKERS) for n, result in of_group(g).items()
        }
        content = {"computed with": computed_with(), "results": dict(sorted(results.items()))}
        EXPECTED.write_text(json.dumps(content, indent=1) + "\n")
    return lambda name: of_group(next(g for g in (FEW, OTHERS, OF_WORKERS) if name in g))[name]


@pytest.mark.parametrize(
    "name",
    [*FEW, *(pytest.param(name, marks=pytest.mark.thorough) for name in (*OTHERS, *OF_WORKERS))],
)
def test_the_bits_after_thirty_steps(name, found):
    """Steps are counted and the scale moves as expected on any machine; all other bits are the same
    with the same versions and instruction sets.
    """
    result = found(name)
    expected = json.loads(EXPECTED.read_text())
    wanted = expected["results"][name]

    assert result["counts"] == wanted["counts"]
    assert result["loss_scale"] == wanted["loss_scale"]
    if computed_with() != expected["computed with"]:
        pytest.skip(f"the digests are of another machine: {expected['computed with']}")
    assert result["digests"] == wanted["digests"]


def test_every_result_is_expected():
    """The file has the results of these set-ups, and no others."""
    assert json.loads(EXPECTED.read_text())["results"].keys() == set(NAMES)
