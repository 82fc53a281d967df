"""The commands that README, cards and docs show, run as they are written there."""

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
# What a reader puts in, and what is put in here.
FILLED_IN = {"RUN": "run", "SCRIPT": "examples/digits.py"}
NOT_RUN = {
    "python -P train.py": "a script of the reader's",
    **dict.fromkeys(
        (
            "python benchmarks/growth.py",
            "python benchmarks/profile_step.py --model=cnn --dtype=bfloat16",
            "python benchmarks/scale.py",
            "python benchmarks/start_up.py",
            "python benchmarks/step_time.py",
        ),
        "takes minutes, and its figures say nothing on a busy machine",
    ),
    "python -m strategies.launch": "a part of the others",
    "python -m strategies.launch --workers=2 SCRIPT --flags...": "the same as without flags",
    "python -m scaling.simulate": "a part of the others",
    **dict.fromkeys(
        (
            "python -m strategies.launch --workers=2 examples/mnist.py --dataset=digits "
            "--distribution_strategy=multi_worker_mirrored",
            "python -m strategies.launch --workers=2 --ps=1 examples/mnist.py --dataset=digits "
            "--distribution_strategy=parameter_server",
        ),
        "test_examples.py runs it, and looks at what it learns",
    ),
    "python -m pytest -n0 --full tests/tpu_check": "one of the tests beside this",
}


def commands():
    """Every command of Python's in the pages: in code spans, and on lines of fenced blocks."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        spans = re.findall(
            r"`([^`\n]*)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        )
        fenced = re.findall(r"^```(?:sh|text)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        lines = [line for block in fenced for line in block.splitlines()]
        for command in [*spans, *lines]:
            parts = command.split(" && ")
            found |= {part for part in parts if re.match(r"python (-|examples/|benchmarks/)", part)}
    return sorted(found)


def test_there_are_commands():
    """They are found, those that are not run too."""
    found = commands()

    assert len(found) >= 10
    assert NOT_RUN.keys() <= set(found)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder as the repository's root is, with a run in it."""
    folder = tmp_path_factory.mktemp("root")
    for name in ("examples", "scaling", "strategies", "trainer"):
        shutil.copytree(ROOT / name, folder / name)
    shown = "examples/digits.py --train_steps=60 --record_gradients --model_dir="
    run(f"python {shown}run", folder)
    run(f"python {shown}runs/digits", folder)
    return folder


def run(command, folder):
    """Runs a command of Python's; returns what it printed."""
    return printed(shlex.split(command)[1:], folder, seconds=400)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(commands()) - NOT_RUN.keys()))
def test_a_command_runs_as_it_is_written(here, command):
    """With a run of ours in the place of RUN; it ends well, and says something."""
    for word, ours in FILLED_IN.items():
        command = command.replace(word, ours)

    assert run(command, here).strip()
