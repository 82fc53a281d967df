"""Runs the commands in the READMEs and docs as they are written there."""

import pathlib
import re
import shlex
import shutil

import pytest
from helpers import printed

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("*/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# Placeholders in the commands, and what the tests put in their place.
FILLED_IN = {"RUN": "run", "SCRIPT": "examples/digits.py"}
NOT_RUN = {
    "python -P train.py": "the reader's own script",
    **dict.fromkeys(
        (
            "python benchmarks/first_step.py",
            "python benchmarks/gpu_cost.py",
            "python benchmarks/growth.py",
            "python benchmarks/input_path.py",
            "python benchmarks/onednn.py",
            "python benchmarks/all_reduce.py",
            "python benchmarks/start_up.py",
            "python benchmarks/step_time.py",
        ),
        "takes minutes, and its figures mean nothing on a busy machine",
    ),
    "python -m strategies.launch": "incomplete; the complete commands run",
    "python -m trainer.tune": "incomplete; test_tune.py runs it",
    "python -m trainer.tune my_module:make": "the reader's own module",
    "python -m scaling.simulate": "incomplete; the complete commands run",
    "python -m scaling.float8.simulate": "incomplete; test_simulate.py runs it",
    "python -m scaling.float8.simulate RUN/metrics.jsonl --float8_rules=delayed,"
    "delayed:history_length=16:margin=1,keras3,current": "test_simulate.py simulates such rules",
    **dict.fromkeys(
        (
            "python -m strategies.launch --workers=2 examples/mnist.py --dataset=digits "
            "--strategy=multi_worker_mirrored",
            "python -m strategies.launch --workers=2 --ps=1 examples/mnist.py --dataset=digits "
            "--strategy=parameter_server",
        ),
        "test_examples.py runs it and checks its accuracy",
    ),
    "python -m proofs": "tests/proofs runs it",
    "python -m proofs.protocols": "the same",
    "python -m pytest -n0 --full tests/gpu_check": "part of the test suite",
    "python -m pytest -n0 --full tests/tpu_check": "part of the test suite",
}


def commands():
    """Returns every `python ...` command in the pages, from code spans and fenced blocks."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        spans = re.findall(
            r"`([^`\n]*)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        )
        # Blocks of every language are found, so that the end of one is not taken for a beginning.
        fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        blocks = [block for language, block in fenced if language in {"", "sh", "text"}]
        lines = [line for block in blocks for line in block.splitlines()]
        for command in [*spans, *lines]:
            parts = command.split(" && ")
            found |= {part for part in parts if re.match(r"python (-|examples/|benchmarks/)", part)}
    return sorted(found)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A copy of the repository's root, with two runs in it."""
    folder = tmp_path_factory.mktemp("root")
    for name in ("benchmarks", "examples", "scaling", "strategies", "trainer"):
        shutil.copytree(ROOT / name, folder / name)
    digits = "python examples/digits.py --steps=60 --monitoring.record_gradients --model_dir="
    run(f"{digits}run", folder)
    run(f"{digits}runs/digits", folder)
    return folder


def run(command, folder):
    """Runs a `python ...` command in a folder and returns its output."""
    return printed(shlex.split(command)[1:], folder, seconds=400)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(commands()) - NOT_RUN.keys()))
def test_commands_run_as_written(root, command):
    """Every command, with its placeholders filled in, succeeds and prints something."""
    for word, value in FILLED_IN.items():
        command = command.replace(word, value)

    assert run(command, root).strip()
