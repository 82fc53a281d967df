"""Tests of the examples, which run as scripts, as a user runs them."""

import ast
import functools
import pathlib
import re

import pytest
from helpers import printed

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / "datasets.py"})


def run(script, *arguments, seconds=300):
    """Runs an example and returns the lines of its output."""
    path = str(ROOT / "examples" / script)
    return printed([path, *arguments], ROOT, seconds).splitlines()


def accuracy(lines):
    """Returns the held-out accuracy of the last line, in percent."""
    return float(re.match(r"held-out accuracy ([\d.]+)%", lines[-1])[1])


def first_step(lines):
    """Returns the first log line that reports steps."""
    return next(line for line in lines if line.startswith("step "))


@functools.cache
def float32_digits():
    """Returns the output of digits.py in float32, the same under either strategy up to rounding."""
    return run("digits.py", "--precision=float32")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_digits_learns_in_float16(strategy):
    """digits.py reaches at least 98% in float16, within a point of float32 on the same seed; its
    skipped steps are shown and counted.
    """
    arguments = [f"--strategy={strategy}"]
    arguments += ["--logical_cpus=2"] if strategy == "mirrored" else []
    half, full = run("digits.py", *arguments), float32_digits()
    skipped = int(re.search(r"(\d+) skipped \(\d+ backward\)", first_step(half))[1])
    summary = re.search(r"600 steps in ([\d.]+) s: (\d+) applied, (\d+) skipped", half[-2])

    assert accuracy(half) >= 98.0
    assert accuracy(half) >= accuracy(full) - 1.0
    assert skipped > 0
    assert int(summary[2]) + int(summary[3]) == 600
    assert int(summary[3]) >= skipped


@pytest.mark.slow
def test_loss_scaling_restores_vanishing_gradients():
    """At a loss scale of 1 every gradient is 0 and nothing is learned; with `dynamic`, the weight is
    learned after a few overflows.
    """
    lost, found = run("vanishing.py", "--loss_scale=1"), run("vanishing.py")

    assert all(re.search(r"gradient -?0\.0e\+00 .*weight 0\.000$", line) for line in lost)
    assert [line.split()[-3] for line in found[:4]] == ["skipped"] * 3 + ["applied"]
    assert float(found[-1].split()[-1]) == pytest.approx(3.0, abs=0.01)


@pytest.mark.slow
def test_every_rule_learns_what_float16_flushes_to_zero():
    """Every rule except a fixed scale of 1 learns weights whose gradients underflow at 1 and overflow
    from 2^29 on. From 2^40, `headroom` skips at most 2 steps and `dynamic` more than 10. The README of
    `scaling` shows the same table.
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
        # Another processor sums in another order.
        assert shown[name][2] == pytest.approx(loss, rel=2), name
    assert rows["headroom, from 2^40"][0] <= 2
    assert rows["dynamic, from 2^40"][0] > 10


def table(lines):
    """Returns (skipped steps, last scale, final loss) of each rule that `rules.py` prints."""
    found = [
        re.fullmatch(r"(\S.*?)  +(\d+)  +(2\^-?\d+)  +(\d\.\de[+-]\d+)", line) for line in lines
    ]
    return {row[1]: (int(row[2]), row[3], float(row[4])) for row in found if row}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["", "--alternate"])
def test_two_networks_learn_in_float16(order):
    """With two optimizers under one verdict, jointly or in turn, the generator's distance from the true
    distribution falls to less than a third, although the first steps are skipped.
    """
    lines = run("gan.py", *([order] if order else []))
    found = re.match(r"distance from the ring: ([\d.]+) before, ([\d.]+) after", lines[-1])
    skipped = int(re.search(r"(\d+) skipped \(", first_step(lines))[1])

    assert float(found[2]) < float(found[1]) / 3
    assert skipped > 0


@pytest.mark.slow
def test_a_run_is_repeated_from_its_flags(tmp_path):
    """flags.cfg repeats the run, which is complete already. With a larger --steps, over which the
    rate decays, it continues if that is allowed.
    """
    settings = ["--steps=20", "--seed=7", "--log_interval=20", "--precision=float32"]
    first = run("digits.py", f"--model_dir={tmp_path}", *settings)
    repeated = run("digits.py", f"--flagfile={tmp_path}/flags.cfg")
    more = ["--steps=30", "--checkpoints.allow_changes=optimizer"]
    longer = run("digits.py", f"--flagfile={tmp_path}/flags.cfg", *more)

    assert first[-1] == repeated[-1]
    assert "at step 20 after 0 steps" in repeated[-2]
    assert "at step 30 after 10 steps" in longer[-2]


@pytest.mark.slow
def test_a_registered_strategy_trains():
    """A strategy that the script registers trains by its name, on the devices that it chooses."""
    lines = run("own_strategy.py")

    assert lines[-1] == "y = 3.00 x + 1.00, found by 3 replicas"


@pytest.mark.slow
def test_the_perceptron_uses_the_best_available_device():
    """Without a TPU it says so and learns on the CPU."""
    lines = run("mnist.py", "--dataset=digits", "--steps=300")

    assert "strategy: DefaultDistributionStrategy (found no TPU and no GPU)" in lines
    assert accuracy(lines) >= 95.0


@pytest.mark.slow
def test_linear_regression_needs_loss_scaling():
    """At a loss scale of 1 nothing is learned; from 2^40, slope and intercept are found after a few
    overflows.
    """
    lost = run("linear_regression.py", "--loss_scale=1", "--steps=10")
    found = run("linear_regression.py")

    assert lost == ["y = 0.00 x + 0.00 after 10 steps, 0 skipped"]
    assert re.fullmatch(r"y = 3.00 x \+ 1.00 after 200 steps, [1-9]\d* skipped", found[-1])


@pytest.mark.slow
def test_lenet_learns_on_two_replicas():
    """Plain SGD in float16 under `mirrored` reaches at least 80% after 500 steps."""
    lines = run("lenet.py", "--dataset=digits", "--steps=500")

    assert accuracy(lines) >= 80.0
    assert lines[-1].endswith("% on 2 replicas")


@pytest.mark.slow
def test_float16_weights_lose_what_master_weights_keep():
    """At a small learning rate most updates are too small to change a float16 weight, but hardly any
    is too small for a float32 weight, so the loss falls more slowly in float16.
    """
    header, *rows = run("lenet_half.py", "--dataset=digits", "--steps=500")
    found = {row.split()[0]: re.findall(r"[\d.]+(?=%| |$)", row)[1:] for row in rows}
    lost, loss, _ = ({name: float(row[i]) for name, row in found.items()} for i in range(3))

    assert header.split()[:2] == ["weights", "updates"]
    assert lost["float16"] > 50.0
    assert lost["float32"] < 1.0
    assert loss["float16"] > loss["float32"]


@pytest.mark.slow
def test_cifar10_adapts_to_its_images():
    """The network learns the 8 x 8 digits, and also takes synthetic images of CIFAR-10's shape."""
    small = ["--global_batch=32", "--log_interval=5"]
    digits = run("cifar10.py", "--dataset=digits", "--steps=60", *small)
    synthetic = run("cifar10.py", "--use_synthetic_data", "--steps=5", *small)

    assert accuracy(digits) >= 85.0
    assert any("at step 5 after 5 steps" in line for line in synthetic)


@pytest.mark.slow
def test_the_language_model_learns():
    """It gets from 8 bits per byte to less than 4.5 in 100 steps, and continues the prompt."""
    arguments = ["--steps=100", "--bytes=300000", "--prompt=import "]
    lines = run("language_model.py", *arguments)

    assert re.match(r"it writes: ['\"]import ", lines[-2])
    assert 1.0 < float(re.fullmatch(r"held out: ([\d.]+) bits per byte", lines[-1])[1]) < 4.5


@pytest.mark.slow
def test_float8_learns_as_the_others():
    """In 100 steps, the losses of the three precisions are nearly the same."""
    lines = run("float8.py", "--steps=100")[-3:]
    rows = [re.fullmatch(r"(\w+) +([\d.]+) bits per byte", line) for line in lines]

    assert [row[1] for row in rows] == ["float32", "mixed_bfloat16", "mixed_float8"]
    losses = [float(row[2]) for row in rows]
    assert max(losses) < 4.0
    assert max(losses) - min(losses) < 0.2


@pytest.mark.slow
def test_a_custom_rule_moves_the_scale():
    """`Patient` trains as well as `dynamic`, and skips fewer than half as many steps because it waits
    longer and longer.
    """
    rows = [
        re.fullmatch(r"(\w+): (\d+) of 600 steps skipped, held-out accuracy ([\d.]+)%", line)
        for line in run("custom_rule.py")
    ]
    skipped = {row[1]: int(row[2]) for row in rows}

    assert all(float(row[3]) >= 94.0 for row in rows)
    assert 0 < skipped["Patient"] < skipped["DynamicLossScale"] / 2


def commands_of_jobs():
    """Returns the commands in the examples' table that start several processes."""
    text = (ROOT / "examples" / "README.md").read_text()
    return re.findall(r"`python (-m strategies\.launch [^`]+)`", text)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of_jobs())
def test_jobs_of_several_processes_learn(command):
    """The jobs of two workers, and of workers with a parameter server, learn the digits."""
    out = printed(command.split(), ROOT, seconds=300)

    [found] = re.findall(r"held-out accuracy ([\d.]+)%", out)
    assert float(found) >= 95.0


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_example_shows_its_command(path):
    """Every example has its command in its docstring, and a row in the table of examples."""
    docstring = path.read_text().split('"""')[1]

    assert f"python examples/{path.name}" in docstring
    assert f"]({path.name})" in (ROOT / "examples" / "README.md").read_text()


# What defines a training step in each script of the table of statements.
STEPS = {
    "vae.py": {"Vae", "vae_losses"},
    "distillation.py": {"Student", "distillation_losses"},
    "simclr.py": {"SimClr", "nt_xent"},
    "seq2seq.py": {"make_loss"},
    "maml.py": {"Learner", "predict", "maml_losses", "Maml"},
    "fine_tuning.py": set(),  # the trainer's own
    "wgan_gp.py": {"Wgan", "wgan_losses", "judged"},
    "ppo.py": {"Ppo", "ppo_losses"},
    "pinn.py": {"Oscillator", "pinn_losses", "value_and_slope"},
}


def statements(tree):
    """Returns the number of statements below a node, without docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


def test_the_table_of_statements_is_that_of_the_scripts():
    """The examples' table counts the statements of each script, and of its training step."""
    text = (ROOT / "examples" / "README.md").read_text()
    rows = re.findall(r"^\| \[`(\w+\.py)`\]\(\w+\.py\) \| (\d+) \| (\S+) \|", text, re.MULTILINE)
    assert {script for script, *_ in rows} == set(STEPS)
    for script, whole, step in rows:
        tree = ast.parse((ROOT / "examples" / script).read_text())
        parts = [node for node in tree.body if getattr(node, "name", "") in STEPS[script]]
        assert int(whole) == statements(tree), script
        assert step == (str(sum(map(statements, parts))) if parts else "`train`"), script


# What each published loop must reach in a short run, as (arguments, pattern, check of its numbers).
PUBLISHED = {
    "vae.py": (300, r"held out: ([\d.]+) nats", lambda nats: nats < 30),
    "distillation.py": (
        300,
        r"held out: teacher ([\d.]+)%, student alone ([\d.]+)%, taught ([\d.]+)%",
        lambda teacher, alone, taught: alone < taught < teacher,
    ),
    "simclr.py": (
        200,
        r"nearest of 30 labeled digits: ([\d.]+)% right before, ([\d.]+)% after",
        lambda before, after: before < after,
    ),
    "seq2seq.py": (300, r"loss ([\d.]+) per token", lambda loss: loss < 0.5),
    "maml.py": (
        500,
        r"error on new tasks: ([\d.]+) at the start, ([\d.]+) after one step",
        lambda start, adapted: adapted < start / 2,
    ),
    "fine_tuning.py": (
        200,
        r"held out: ([\d.]+)% frozen, ([\d.]+)% fine-tuned",
        lambda frozen, tuned: tuned > frozen,
    ),
    "wgan_gp.py": (
        300,
        r"distance from the ring: ([\d.]+) before, ([\d.]+) after",
        lambda before, after: after < before / 2,
    ),
    "ppo.py": (
        640,
        r"falls in 1,000 moves: ([\d.]+) at first, ([\d.]+) at last",
        lambda first, last: last < first / 3,
    ),
    "pinn.py": (1000, r"largest distance from the sine: ([\d.]+)", lambda error: error < 0.02),
}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("script", PUBLISHED)
def test_published_loops_learn_in_float16(script, replicas):
    """Each published loop learns in float16 with a loss scale, on one replica and on two."""
    steps, pattern, holds = PUBLISHED[script]
    several = ["--strategy=mirrored", f"--logical_cpus={replicas}"]
    shown = ["--verbose=normal", f"--steps={steps}"]
    lines = run(script, *shown, *(several if replicas > 1 else []))

    assert any("mixed_float16, DynamicLossScale" in line for line in lines)
    assert holds(*map(float, re.match(pattern, lines[-1]).groups())), lines[-1]
