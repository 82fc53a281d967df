"""`benchmarks/gpu_kit.py` on the CPU: the way that a step takes to a machine with a card."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax") is None, reason="jax missing: pip install -e '.[gpu-check]'"
    ),
]
NO_TENSORFLOW = "import sys; sys.modules |= dict.fromkeys(['tensorflow', 'keras'])\n"


def kit(*arguments, folder, before=""):
    """Runs the kit's script, in a folder, after other statements; returns the finished process."""
    script = ROOT / "benchmarks" / "gpu_kit.py"
    code = f"import runpy, sys; sys.argv = {[str(script), *map(str, arguments)]!r}\n"
    code += f"sys.path.insert(0, {str(script.parent)!r})\n"
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", before + code],
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The perceptron's step in float16, packed."""
    folder = tmp_path_factory.mktemp("kit")
    done = kit("pack", folder, "--models", "mlp", "--dtypes", "float16", folder=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def run(packed, tmp_path):
    """Runs the kit without TensorFlow, for a few steps of each contender."""
    few = ("--rounds", 2, "--turn_secs", 0.01)
    return kit(
        "run", packed, tmp_path / "results.json", *few, folder=tmp_path, before=NO_TENSORFLOW
    )


def test_a_packed_step_runs_without_tensorflow(packed, tmp_path):
    """The kit is small, JAX runs its step to the recorded losses and weights, and the page gets what
    was measured, and that a CPU is no GPU.
    """
    assert sum(file.stat().st_size for file in packed.iterdir()) < 500_000
    done = run(packed, tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    [case] = results["cases"].values()
    assert {"halfstep", "JAX"} <= {*case["turns"]}
    assert case["apart"]["loss"] < 0.01

    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- gpu_kit.py writes this -->\nold\n<!-- gpu_kit.py ends here -->\nend"
    )
    done = kit("write", tmp_path / "results.json", "--page", page, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "| mlp, float16 |" in text
    assert "trial of the kit on a CPU" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nend")


@pytest.mark.parametrize("what", ["losses", "norms", "seed"])
def test_a_step_that_computes_something_else_is_not_measured(packed, tmp_path, what):
    """If losses or weights differ from the record, or the weights are drawn from another seed, the
    kit stops and names the program.
    """
    folder = tmp_path / "kit"
    folder.mkdir()
    for file in packed.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "mlp-float16.json"
    case = json.loads(path.read_text())
    if what == "seed":
        next(each for each in case["inputs"] if each.get("seed", 0) >= 100)["seed"] += 1
    else:
        shapes = [case["inputs"][argument]["shape"] for argument, _ in case["written"]]
        place = next(i for i, each in enumerate(shapes) if len(each) > 1) if what == "norms" else 0
        case[what][place] = 1.05 * case[what][place] + 0.1
    path.write_text(json.dumps(case))
    done = run(folder, tmp_path)

    assert done.returncode == 1
    assert "mlp-float16.mlir does not compute what it did where it was packed" in done.stderr
    assert not (tmp_path / "results.json").exists()
