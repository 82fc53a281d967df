"""30 steps of each set-up end with the bits in expected.json."""

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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns the results of all set-ups, by name; those of several workers by name and worker."""
    out = tmp_path_factory.mktemp("bits")
    subprocess.run(
        [sys.executable, HERE / "setups.py", out, *setups.IN_ONE_PROCESS],
        check=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
    )
    with workers(out, 2, "bits/setups.py", out, *setups.IN_TWO_PROCESSES) as job:
        assert job.wait(300) == [0, 0], job.output()
    return {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


@pytest.fixture(scope="module")
def expected(found, request):
    """Returns what stands in the file, after writing it with `--regenerate`."""
    if request.config.getoption("--regenerate"):
        content = {"computed with": computed_with(), "results": found}
        EXPECTED.write_text(json.dumps(content, indent=1) + "\n")
    return json.loads(EXPECTED.read_text())


NAMES = [
    *setups.IN_ONE_PROCESS,
    *(f"{name}-{at}" for name in setups.IN_TWO_PROCESSES for at in "01"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_after_thirty_steps(name, found, expected):
    """Steps are counted and the scale moves as expected on any machine; all other bits are the same
    with the same versions and instruction sets.
    """
    result, wanted = found[name], expected["results"][name]

    assert result["counts"] == wanted["counts"]
    assert result["loss_scale"] == wanted["loss_scale"]
    if computed_with() != expected["computed with"]:
        pytest.skip(f"the digests are of another machine: {expected['computed with']}")
    assert result["digests"] == wanted["digests"]


def test_every_result_is_expected(found, expected):
    """The file has the results of these set-ups, and no others."""
    assert found.keys() == expected["results"].keys() == set(NAMES)
