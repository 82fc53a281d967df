"""The flags, and the trainer that they build."""

import contextlib
import dataclasses
import re
from unittest import mock

import pytest
import tensorflow as tf
from absl import flags
from helpers import Linear, slopes

import scaling
from trainer import Checkpoints, Divergence, Skips, Updates
from trainer.base.fields import argument_texts
from trainer.flags import DIVERGENCE, GROUPS, define_flags, make_trainer, run_mode


def parse(*arguments, **defaults):
    """Defines the flags in a new registry, as a script would, and parses a command line."""
    values = flags.FlagValues()
    flags.DEFINE_integer("verbosity", 0, "absl's own", flag_values=values)
    define_flags(values, **defaults)
    values(["script.py", *arguments])
    return values


def test_every_flag_reaches_the_trainer():
    """Each flag sets the argument of its name, or a field of that group."""
    values = parse(
        "--precision=mixed_bfloat16",
        "--loss_scale=1024",
        "--num_microbatches=2",
        "--updates.global_clipnorm=0.5",
        "--steps_per_loop=7",
        "--log_interval=14",
        "--checkpoints.interval=21",
        "--jit_compile=false",
        "--seed=3",
        "--updates.ema_momentum=0.9",
        "--skips.on_overflow=retry",
        "--skips.on_nonfinite_loss=raise",
        "--skips.max_consecutive=9",
        "--skips.on_stuck=hold",
        "--losses.reduction=mean",
    )
    made = make_trainer(Linear, values, checkpoints=Checkpoints(max_to_keep=2))

    assert made.precision == scaling.Precision("mixed_bfloat16")
    assert made.rule == scaling.FixedLossScale(1024.0)
    assert (made.num_microbatches, made.steps_per_loop, made.log_interval) == (2, 7, 14)
    assert made.updates == Updates(global_clipnorm=0.5, ema_momentum=0.9)
    assert made.skips == Skips("retry", 40, "raise", 9, "hold")
    assert made.checkpoints == Checkpoints(interval=21, max_to_keep=2)
    assert (made.jit_compile, made.seed, made.model_dir) == (False, 3, None)


def test_flags_that_say_more_than_a_value(tmp_path):
    """0 keeps all checkpoints, and flags of a divergence make one."""
    values = parse(
        f"--model_dir={tmp_path}",
        "--checkpoints.max_to_keep=0",
        "--checkpoints.allow_changes=seed",
        "--monitoring.profile_steps=3,9",
        "--divergence.loss_above=100",
        "--divergence.window=7",
    )
    made = make_trainer(Linear, values)

    assert made.checkpoints.max_to_keep is None
    assert made.checkpoints.allow_changes == ("seed",)
    assert made.monitoring.profile_steps == [3, 9]
    assert made.monitoring.divergence == Divergence(loss_above=100.0, window=7)
    assert make_trainer(Linear, parse()).monitoring.divergence is None


def test_a_subclass_may_choose_its_own_group():
    """A group is passed on only if a flag or the script says more than its defaults."""

    class Retrying(Linear):
        def __init__(self, **arguments):
            super().__init__(skips=Skips(on_overflow="retry"), **arguments)

    assert make_trainer(Retrying, parse()).skips.retries == 40
    with pytest.raises(TypeError, match="multiple values"):
        make_trainer(Retrying, parse("--skips.max_retries=3"))


# Fields that no flag can hold: dicts, and a group in a group, which has flags of its own.
WITHOUT_FLAG = {
    "losses.weights",
    "losses.class_weight",
    "updates.updates_per_step",
    "monitoring.divergence",
}


def test_every_field_of_a_group_has_a_flag():
    """A new field has one, with its default and its text, without another line."""
    values = parse()
    for name, group in (GROUPS | DIVERGENCE).items():
        texts = argument_texts(group)
        for field in dataclasses.fields(group):
            flag = f"{name}.{field.name}"
            assert (flag in values) == (flag not in WITHOUT_FLAG), flag
            if flag in values:
                expected = [] if field.default == () else field.default
                assert (values[flag].default, help_text(values[flag])) == (
                    expected,
                    texts[field.name],
                )


def test_mirrored_runs_on_the_logical_cpus():
    """Without a GPU, mirrored uses logical CPU devices, and divides nothing by itself; the tests have
    split the CPU into four.
    """
    for flag, expected in ((["--logical_cpus=4"], [mock.call(4)]), ([], [])):
        with mock.patch("strategies.split_cpu") as split:
            made = make_trainer(Linear, parse("--strategy=mirrored", *flag))

        assert split.call_args_list == expected
        assert made.strategy.num_replicas_in_sync == 4


def test_flags_cfg_repeats_a_run(tmp_path, monkeypatch):
    """`flags.cfg` holds every flag, defaults included."""
    monkeypatch.setattr("sys.argv", [__name__])  # flags.cfg holds the flags of this module
    values = parse("--loss_scale=1024", f"--model_dir={tmp_path}", "--updates.clipnorm=2")
    make_trainer(Linear, values)
    reread = parse(f"--flagfile={tmp_path / 'flags.cfg'}")

    assert reread.flag_values_dict() == values.flag_values_dict()
    made = make_trainer(Linear, reread)
    assert (made.rule, made.updates.clipnorm) == (scaling.FixedLossScale(1024.0), 2.0)


def test_flags_cfg_means_the_same_run_from_every_folder(tmp_path, monkeypatch):
    """Paths are absolute, and a permission to change something is not kept for later runs."""
    monkeypatch.setattr("sys.argv", [__name__])
    monkeypatch.chdir(tmp_path)
    values = parse("--model_dir=run", "--checkpoints.allow_changes=seed")
    make_trainer(Linear, values)
    lines = (tmp_path / "run" / "flags.cfg").read_text().split("\n")

    assert f"--model_dir={tmp_path / 'run'}" in lines
    assert not [line for line in lines if "allow_changes" in line]


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (["--mode=eval"], [], True),
        (["--steps", "9"], ["--mode=eval"], True),
        ([], ["--mode=eval", "--steps=9"], False),
        ([], ["--", "--flagfile"], False),
    ],
    ids=str,
)
def test_a_flag_before_the_flag_file_is_not_lost(tmp_path, monkeypatch, before, after, refused):
    """The file has a value for each flag, and the last one counts: --mode=eval would train."""
    monkeypatch.setattr("sys.argv", [__name__])
    make_trainer(Linear, parse(f"--model_dir={tmp_path}", "--steps=3"))
    command = [*before, f"--flagfile={tmp_path / 'flags.cfg'}", *after]
    monkeypatch.setattr("sys.argv", [__name__, *command])
    expected = pytest.raises(ValueError, match="`--flagfile` must be the first")
    with expected if refused else contextlib.nullcontext():
        make_trainer(Linear, parse(*command))


@pytest.mark.thorough
def test_a_refused_run_leaves_flags_cfg_alone(tmp_path, monkeypatch):
    """`flags.cfg` is replaced when training begins: not by a run that is refused, nor by an
    evaluation, nor by a call that takes no step, whose settings are compared with none.
    """
    monkeypatch.setattr("sys.argv", [__name__])
    written, data = tmp_path / "flags.cfg", slopes(2.0, 2.0, 2.0, 2.0)

    def run(*arguments):
        values = parse(
            f"--model_dir={tmp_path}",
            "--global_batch=4",
            "--verbose=quiet",
            *arguments,
            steps=2,
        )
        return run_mode(make_trainer(Linear, values), data, data, values)

    run("--seed=1")
    first = written.read_text()
    with pytest.raises(ValueError, match="`seed` must"):
        run("--seed=2", "--steps=4")
    run("--mode=eval", "--log_interval=7")
    assert written.read_text() == first
    lines = (tmp_path / "metrics.jsonl").read_text()
    run("--global_batch=2", "--seed=2")  # whose steps have all been taken
    assert written.read_text() == first
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    run("--seed=1", "--steps=4")
    assert "--steps=4" in written.read_text().split("\n")


def test_a_script_has_its_own_defaults():
    """A script's default applies unless the flag is given; an unknown name is refused."""
    assert parse(steps=7).steps == 7
    assert parse("--steps=9", steps=7).steps == 9
    own = Updates(global_clipnorm=0.5, ema_momentum=0.9)
    made = make_trainer(Linear, parse("--updates.ema_momentum=0.8", updates=own))
    assert made.updates == Updates(global_clipnorm=0.5, ema_momentum=0.8)
    with pytest.raises(ValueError, match=r"Did you mean 'steps'\?"):
        parse(step=7)


HELD_OUT = slopes(2.0, 2.0, 2.0, 2.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "steps", "loss"),
    [
        ("train_and_eval", 3, 8.0),
        pytest.param("train", 3, None, marks=pytest.mark.thorough),
        ("eval", 0, 2.0),
    ],
)
def test_mode(capsys, mode, steps, loss):
    """Each mode trains, evaluates or both. Each step adds 1 to the weight, which starts at 1; the
    held-out loss is twice the weight.
    """
    values = parse("--steps=3", "--global_batch=4", f"--mode={mode}")
    made = make_trainer(Linear, values, verbose=False)
    results = run_mode(made, slopes(*[-1.0] * 8), HELD_OUT, values)

    assert results == (None if loss is None else {"loss": loss})
    assert made.weight == 1 + steps
    assert capsys.readouterr().out == ""
    if mode != "train":
        assert made.totals.attempted == steps


@pytest.mark.thorough
# Raised by Keras when it saves a .keras file.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize(("interval", "evaluated"), [([], [2]), (["--eval_interval=1"], [1, 2])])
def test_evaluations_during_training(tmp_path, interval, evaluated):
    """Without an evaluation interval, `--checkpoints.keep_best` evaluates once at the end."""
    arguments = ["--steps=2", "--global_batch=4", "--mode=train", *interval]
    values = parse(*arguments, "--checkpoints.keep_best=2", f"--model_dir={tmp_path}")
    run_mode(make_trainer(Linear, values, verbose=False), slopes(-1.0), HELD_OUT, values)

    kept = sorted(path.name for path in (tmp_path / "best").iterdir() if path.is_dir())
    assert kept == [f"step-{step}" for step in evaluated]


@pytest.mark.thorough
def test_a_dataset_is_batched_already():
    """`--global_batch` applies to arrays; a dataset keeps its own batches."""
    values = parse("--steps=2", "--global_batch=64")
    made = make_trainer(Linear, values, verbose=False)
    train, test = (
        tf.data.Dataset.from_tensor_slices(slopes(*[slope] * 4)).batch(2) for slope in (-1.0, 2.0)
    )

    assert run_mode(made, train, test, values) == {"loss": 6.0}


@pytest.mark.thorough
def test_data_of_python_are_read_after_training():
    """They may be readable once only."""
    values = parse("--steps=2", "--global_batch=4")
    made = make_trainer(Linear, values, verbose=False)
    reads = []

    def held_out():
        reads.append(made.totals.attempted)
        yield HELD_OUT

    assert run_mode(made, slopes(-1.0), held_out, values)["loss"] > 0
    assert set(reads) == {2}


@pytest.mark.thorough
def test_without_test_data_nothing_is_evaluated():
    """Without test data, training returns None."""
    values = parse("--steps=2", "--global_batch=4")
    made = make_trainer(Linear, values, verbose=False)
    assert run_mode(made, slopes(*[-1.0] * 8), flag_values=values) is None
    assert made.weight == 3.0


@pytest.mark.slow
def test_replay_runs_a_recorded_step_again(tmp_path, capsys):
    """Replay mode prints the recorded and the new verdict on the chief only, and does not train."""
    first = parse("--steps=1", "--global_batch=4", "--precision=mixed_float16")
    first.model_dir, first["skips.max_records"].value = str(tmp_path), 1
    skipping = make_trainer(Linear, first, verbose=False)
    run_mode(skipping, slopes(*[1e6] * 4), None, first)
    assert skipping.totals.skipped == 1
    capsys.readouterr()

    [record] = (tmp_path / "overflows").iterdir()
    replaying = parse("--mode=replay", f"--overflow={record}", "--precision=mixed_float16")
    made = make_trainer(Linear, replaying, verbose=False)
    assert run_mode(made, slopes(1.0), HELD_OUT, replaying) is None

    said = capsys.readouterr().out
    assert "backward" in said
    vars(made)["is_chief"] = False  # as in a process that is not the chief
    assert run_mode(made, slopes(1.0), HELD_OUT, replaying) is None
    assert capsys.readouterr().out == ""


def help_text(flag):
    """The help text of a flag on one line, without what absl adds about choices."""
    text = re.sub(r"^<.*?>: ", "", " ".join(flag.help.split()))
    return text.removesuffix("; repeat this option to specify a list of values")


def test_rare_flags_are_only_in_the_full_help():
    """Common flags belong to the script, and those of groups to `trainer.flags`."""
    script = {flag.name for flag in parse().get_key_flags_for_module("trainer.flags")}

    assert {"jit_compile", "checkpoints.interval"} <= script
    assert not {"steps", "model_dir"} & script
