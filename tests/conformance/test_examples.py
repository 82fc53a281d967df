"""The examples, run as a user runs them: as programs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(script, *arguments, seconds=300):
    """Runs an example; returns its output lines."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def accuracy(lines):
    """The held-out accuracy in the last line, in percent."""
    return float(re.match(r"held-out accuracy ([\d.]+)%", lines[-1])[1])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_digits_learns_in_float16(strategy):
    """The main job: at least 98% in float16, within a point of float32 on the same seed, with skipped
    steps visible and counted.
    """
    arguments = [f"--distribution_strategy={strategy}"]
    half = run("digits.py", *arguments)
    wide = run("digits.py", *arguments, "--precision=float32")
    skipped = int(re.search(r"(\d+) skipped \(\d+ backward\)", half[0])[1])
    summary = re.search(r"600 steps in ([\d.]+) s: (\d+) applied, (\d+) skipped", half[-2])

    assert accuracy(half) >= 98.0
    assert accuracy(half) >= accuracy(wide) - 1.0
    assert skipped > 0
    assert int(summary[2]) + int(summary[3]) == 600
    assert int(summary[3]) >= skipped


def test_vanishing_comes_back():
    """At a loss scale of 1 every gradient is 0 and nothing is learned; with `dynamic` the first scales
    overflow, and then the weight is found.
    """
    lost, found = run("vanishing.py", "--loss_scale=1"), run("vanishing.py")

    assert all(re.search(r"gradient -?0\.0e\+00 .*weight 0\.000$", line) for line in lost)
    assert [line.split()[-3] for line in found[:4]] == ["skipped"] * 3 + ["applied"]
    assert float(found[-1].split()[-1]) == pytest.approx(3.0, abs=0.01)


@pytest.mark.slow
def test_every_rule_learns_what_float16_flushes():
    """Weights that are known, gradients that underflow at a scale of 1 and overflow from 2^29 on: every
    rule but that one learns them; `headroom` from 2^40 skips at most 2 steps, `dynamic` more than 10.
    The card of `scaling` shows the same table.
    """
    rows, shown = (
        table(run("rules.py")),
        table((ROOT / "scaling" / "README.md").read_text().split("\n")),
    )

    assert rows.keys() == shown.keys()
    for name, (skipped, last, loss) in rows.items():
        learned = name != "fixed, 1"
        assert (loss < 1e-6) == learned, name
        assert shown[name][:2] == (skipped, last), name
        # Sums are in another order on another processor.
        assert shown[name][2] == pytest.approx(loss, rel=2), name
    assert rows["headroom, from 2^40"][0] <= 2
    assert rows["dynamic, from 2^40"][0] > 10


def table(lines):
    """The rows that `rules.py` prints, by rule: skipped steps, last scale, final loss."""
    found = [
        re.fullmatch(r"(\S.*?)  +(\d+)  +(2\^-?\d+)  +(\d\.\de[+-]\d+)", line) for line in lines
    ]
    return {row[1]: (int(row[2]), row[3], float(row[4])) for row in found if row}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["", "--alternate"])
def test_two_networks_learn_in_float16(order):
    """Two optimizers under one verdict, together or in turn: the generator comes at least three times
    as near to the true distribution, though the first steps are skipped.
    """
    lines = run("gan.py", *([order] if order else []))
    found = re.match(r"distance from the ring: ([\d.]+) before, ([\d.]+) after", lines[-1])
    skipped = int(re.search(r"(\d+) skipped \(", lines[0])[1])

    assert float(found[2]) < float(found[1]) / 3
    assert skipped > 0


@pytest.mark.slow
def test_a_run_is_repeated_from_its_flags(tmp_path):
    """flags.cfg brings the same run to the same step; the same command with a later one goes on."""
    first = run(
        "digits.py", f"--model_dir={tmp_path}", "--train_steps=20", "--seed=7", "--log_steps=20"
    )
    again = run("digits.py", f"--flagfile={tmp_path}/flags.cfg")
    longer = run("digits.py", f"--flagfile={tmp_path}/flags.cfg", "--train_steps=30")

    assert first[-1] == again[-1]
    assert "at step 20 after 0 steps" in again[-2]
    assert "at step 30 after 10 steps" in longer[-2]


def test_a_registered_strategy_trains():
    """One that is in nobody's list: by its name, on the devices it chooses."""
    lines = run("own_strategy.py")

    assert lines[-1] == "y = 3.00 x + 1.00, found by 3 replicas"


@pytest.mark.slow
def test_the_perceptron_takes_what_there_is():
    """Without a TPU it says so and learns on the CPU; an address that leads to none is an error."""
    lines = run("mnist.py", "--dataset=digits", "--train_steps=300")
    assert "strategy: DefaultDistributionStrategy: there is neither a TPU nor a GPU" in lines
    assert accuracy(lines) >= 95.0

    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "mnist.py", "--dataset=digits", "--tpu=grpc://x"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 1
    assert (
        "`devices` must lead to a TPU; got 'grpc://x': it is no grpc://HOST:PORT." in result.stderr
    )


def test_help_fits_a_screen():
    """--helpshort shows the script's own flags and no others."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "digits.py"), "--helpshort"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert "--train_steps" in result.stdout
    assert "--verbosity" not in result.stdout
    assert len(result.stdout.splitlines()) < 80


@pytest.mark.parametrize(
    ("script", "most"),
    [
        ("vanishing.py", 29),
        ("rules.py", 100),
        ("digits.py", 104),
        ("gan.py", 110),
        ("own_loop.py", 60),
        ("own_strategy.py", 70),
        ("mnist.py", 95),
        ("own_loop_bare.py", 60),
    ],
)
def test_examples_are_short(script, most):
    """An example is read in one go."""
    assert len((ROOT / "examples" / script).read_text().splitlines()) <= most
