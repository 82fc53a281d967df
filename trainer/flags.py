"""Defines command-line flags for training scripts, and makes a trainer from them.

A flag has the name of the argument that it sets: of `Trainer`, of its methods, of `Divergence`, or
of the rule of the loss scale. The names of TensorFlow's official models (`--train_steps`,
`--distribution_strategy`, ...) are aliases. Synopsis:

    from absl import app
    from trainer.flags import define_flags, make_trainer, run_mode

    def main(_):
        digits = make_trainer(Digits)
        print(run_mode(digits, train_data, test_data))

    if __name__ == "__main__":
        define_flags(steps=600)
        app.run(main)
"""

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from absl import flags, logging

import scaling
import strategies
from scaling.base.argument_checks import did_you_mean, shown
from trainer.base.argument_checks import check_writable, local_path
from trainer.base.atomic_files import write_atomically
from trainer.callbacks.divergence import Divergence
from trainer.checkpoint.folder import committed
from trainer.checkpoint.saver import PREFIX
from trainer.config.checkpoint_config import CheckpointConfig
from trainer.config.fields import CHOICES, LOWER_BOUND, argument_texts
from trainer.config.groups import (
    MonitorConfig,
    OverflowRecordConfig,
    PrecisionConfig,
    RunConfig,
    UpdateConfig,
)
from trainer.config.resolve import LossScaleArgument, resolve_precision
from trainer.config.skip_policy import SkipPolicy
from trainer.data.batches import needs_batch_size
from trainer.data.sources import is_source
from trainer.evaluation.eval_data import is_named, read_eval_data
from trainer.trainer import Trainer

# Flags defined here belong to the script that calls `define_flags`, so that its
# --helpshort shows them.
flags.disclaim_key_flags()

FLAGS = flags.FLAGS
TRAINING_MODES = ["train_and_eval", "train"]
MODES = [*TRAINING_MODES, "eval", "dry_run", "overfit", "replay"]

# Maps each value of the flag --jit_compile to a value of the argument `jit_compile`.
JIT_COMPILE = {mode: mode for mode in ("auto", "step", "update", "elementwise")} | {
    "true": True,
    "false": False,
}

# fmt: off
# Arguments of the trainer that have a flag of the same name, with the same default and meaning.
COMMON = (
    "model_dir", "precision", "num_microbatches", "global_clipnorm", "steps_per_loop",
    "checkpoint_interval", "record_gradients",
)
RARE = (
    "ema_momentum", "on_overflow", "on_nonfinite_loss", "max_consecutive_skips", "on_stuck",
    "max_overflow_records", "enable_checkpointing", "checkpoint_secs", "max_to_keep",
    "async_checkpoint", "keep_best", "best_metric", "best_is", "check_gradients",
    "check_data", "data_resume", "allow_changes", "init_from", "init_from_skip", "reduce_dtype",
    "reduce_bucket_bytes",
)
GROUPS = (
    PrecisionConfig, UpdateConfig, RunConfig, CheckpointConfig, SkipPolicy, OverflowRecordConfig,
    MonitorConfig,
)
# fmt: on

# Flags that are paths.
PATHS = ("model_dir", "init_from")

# Maps older names of flags, which still work, to the names of the arguments that they set.
ALIASES = {
    "distribution_strategy": "strategy",
    "batch_size": "global_batch",
    "train_steps": "steps",
    "log_steps": "log_interval",
    "validation_interval": "eval_interval",
    "loss_upper_bound": "loss_above",
    "recovery_max_trials": "max_recoveries",
    "eval_timeout_secs": "timeout_secs",
    "initial_loss_scale": "initial_scale",
}

FIELDS = {field.name: field for group in GROUPS for field in dataclasses.fields(group)}
TEXTS = argument_texts(Trainer)

TrainerType = TypeVar("TrainerType", bound=Trainer)


def define_flags(flag_values: flags.FlagValues = FLAGS, **defaults: Any) -> None:
    """Defines the flags of a training script; call it before `app.run`.

    A flag with the name of a trainer's argument has that argument's default and meaning. Older
    names of flags are aliases (`ALIASES`), on command lines, in flag files and in `defaults`.

    Args:
        flag_values: the flags to add to; tests pass their own.
        **defaults: the script's own defaults, keyed by flag name.

    Raises:
        ValueError: if a name in `defaults` is not one of these flags.
    """
    before = set(flag_values)
    for name in COMMON:
        define_setting(name, flag_values)
    define_script_flags(flag_values)
    for name in RARE:
        define_setting(name, flag_values, rare=True)
    define_rare_flags(flag_values)
    ours = sorted(set(flag_values) - before)
    for alias, name in ALIASES.items():
        flags.DEFINE_alias(alias, name, flag_values, __name__)

    # TensorFlow's own messages would drown out the progress lines; --verbosity=0 shows them again.
    # This sets the value and not the default, because app.run would change the default to 0.
    flag_values["verbosity"].value = logging.WARNING
    flag_values["verbosity"].using_default_value = False
    for given, value in defaults.items():
        name = ALIASES.get(given, given)
        if name not in ours:
            raise ValueError(
                f"`define_flags` must be given names of its flags; got {shown(name)}. The flags "
                f"are {', '.join(ours)}. {did_you_mean(name, ours, 'Choose one of these flags.')}"
            )
        flag_values.set_default(name, value)


def define_setting(name: str, flag_values: flags.FlagValues, *, rare: bool = False) -> None:
    """Defines the flag for an argument of `Trainer`, from the argument's field and docstring text.

    Args:
        name: the name of the argument and of the flag.
        flag_values: the flags to add to.
        rare: whether the flag is shown by --helpfull only, with the whole text as its help. Other
            flags are also shown by --helpshort, with the first sentence.
    """
    field = FIELDS[name]
    where = {"flag_values": flag_values} | ({"module_name": __name__} if rare else {})
    text = TEXTS[name] if rare else first_sentence(TEXTS[name])
    choices, kind = field.metadata.get(CHOICES), field.type
    if choices and field.default == ():
        flags.DEFINE_multi_enum(name, [], list(choices), text, **where)
    elif field.default == ():
        flags.DEFINE_multi_string(name, [], text, **where)
    elif choices:
        flags.DEFINE_enum(name, field.default, list(choices), text, **where)
    elif kind is bool:
        flags.DEFINE_boolean(name, field.default, text, **where)
    elif LOWER_BOUND in field.metadata:
        bound = field.metadata[LOWER_BOUND]
        flags.DEFINE_integer(name, field.default, text, lower_bound=bound, **where)
    elif kind == float | None:
        flags.DEFINE_float(name, field.default, text, **where)
    else:
        flags.DEFINE_string(name, field.default, text, **where)


def first_sentence(text: str) -> str:
    """Returns a text up to the end of its first sentence.

    Example:
        >>> first_sentence("Folder for files. None writes nothing.")
        'Folder for files.'
    """
    return text.partition(". ")[0].removesuffix(".") + "."


def define_script_flags(flag_values: flags.FlagValues) -> None:
    """Defines the script's other flags, which do not simply set an argument of `Trainer`."""
    where = {"flag_values": flag_values}
    flags.DEFINE_enum(
        "mode",
        "train_and_eval",
        MODES,
        "What to do with the trainer.",
        **where,
    )
    flags.DEFINE_string(
        "strategy",
        RunConfig.strategy,
        f"Where the replicas run: one of {', '.join(strategies.names())}.",
        **where,
    )
    flags.DEFINE_string(
        "tpu",
        None,
        "Address of the TPU: its name, local, or grpc://HOST:PORT.",
        **where,
    )
    flags.DEFINE_string(
        "loss_scale",
        PrecisionConfig.loss_scale,
        "auto, none, a power of two, or the name of a rule or preset, such as pytorch or "
        "headroom:headroom_bits=3.",
        **where,
    )
    define_amount_flags(flag_values)


def define_amount_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags for the amount of training, the frequency of reports, and the seed."""
    where = {"flag_values": flag_values}
    count = {"lower_bound": 1, **where}
    flags.DEFINE_integer("global_batch", 64, "Number of examples in a global batch.", **count)
    flags.DEFINE_integer(
        "steps", 1000, "The step to train to, counted from the beginning of the run.", **count
    )
    flags.DEFINE_integer("log_interval", MonitorConfig.log_interval, TEXTS["log_interval"], **count)
    flags.DEFINE_enum(
        "verbose",
        "normal",
        ["quiet", "normal", "detailed"],
        "How much to print.",
        **where,
    )
    flags.DEFINE_integer(
        "eval_interval",
        None,
        "Number of steps between evaluations during training.",
        **count,
    )
    flags.DEFINE_integer("seed", 0, first_sentence(TEXTS["seed"]), **where)


def define_rare_flags(flag_values: flags.FlagValues) -> None:
    """Defines the script's rarely needed flags, which only --helpfull shows."""
    where = {"flag_values": flag_values, "module_name": __name__}
    count = {"lower_bound": 1, **where}
    flags.DEFINE_integer(
        "logical_cpus",
        None,
        "Number of devices to divide the CPU into on a machine without a GPU: mirrored then has "
        "as many replicas. If not set, the CPU is one device, and mirrored has one replica.",
        **count,
    )
    flags.DEFINE_float(
        "initial_scale",
        scaling.DynamicLossScale.initial_scale,
        "The initial scale with --loss_scale=auto or dynamic.",
        **where,
    )
    flags.DEFINE_enum(
        "jit_compile", RunConfig.jit_compile, list(JIT_COMPILE), TEXTS["jit_compile"], **where
    )
    flags.DEFINE_string(
        "overflow",
        None,
        "The record that --mode=replay runs again: a folder MODEL_DIR/overflows/step-STEP.",
        **where,
    )
    flags.DEFINE_list("profile_steps", None, TEXTS["profile_steps"], **where)
    flags.DEFINE_float(
        "loss_above",
        None,
        "A loss above this counts as divergence and rolls the run back to its last good "
        "checkpoint. If not set, no loss counts as divergence.",
        **where,
    )
    flags.DEFINE_integer(
        "max_recoveries",
        Divergence.max_recoveries,
        "Maximum number of rollbacks with --loss_above. The next divergence ends the run.",
        **count,
    )
    define_evaluation_flags(flag_values)


def define_evaluation_flags(flag_values: flags.FlagValues) -> None:
    """Defines the rarely needed flags for evaluations."""
    where = {"flag_values": flag_values, "module_name": __name__}
    flags.DEFINE_integer(
        "eval_steps",
        None,
        "The largest number of batches to evaluate. If not set, all are evaluated.",
        lower_bound=1,
        **where,
    )
    flags.DEFINE_boolean(
        "evaluate_at_start",
        False,
        "Whether to evaluate before the first step, and every --eval_interval steps or at the end.",
        **where,
    )
    flags.DEFINE_boolean(
        "continuous",
        False,
        "Whether --mode=eval evaluates each checkpoint that another process writes to --model_dir, "
        "up to --steps, and not only the newest one.",
        **where,
    )
    flags.DEFINE_float(
        "timeout_secs",
        None,
        "Number of seconds without a new checkpoint after which --continuous ends. If not set, it "
        "waits without limit.",
        **where,
    )


def make_trainer(
    trainer_class: type[TrainerType], flag_values: flags.FlagValues = FLAGS, **arguments: Any
) -> TrainerType:
    """Makes the trainer that the flags describe, and writes the flags to `model_dir/flags.cfg`.

    If that file exists, it is replaced when training begins: a run that is refused, or that only
    evaluates, leaves it as it is. A `--mode` that does not train the run never writes it.

    `SCRIPT --flagfile=MODEL_DIR/flags.cfg` repeats the run, with the flags that follow it on the
    command line in place of the file's. On a machine without a GPU,
    `--logical_cpus` divides the CPU for `--strategy=mirrored`, so call this function
    before anything uses a device.

    Args:
        trainer_class: `Trainer` or a subclass that takes the same arguments.
        flag_values: the parsed flags.
        **arguments: further arguments; they take precedence over the flags.

    Raises:
        TypeError, ValueError: for arguments that `Trainer` refuses, flags that contradict each
            other, or flags that a flag file after them has replaced.
    """
    check_flag_file_first(sys.argv[1:], flag_values)
    if not callable(trainer_class):
        raise TypeError(
            f"`trainer_class` must be Trainer or a subclass; got {shown(trainer_class)}. The class "
            "is called with arguments from the flags. Pass the class itself."
        )
    no_gpu = not tf.config.list_physical_devices("GPU")
    count = flag_values.logical_cpus
    if flag_values.strategy == "mirrored" and no_gpu and count:
        strategies.split_cpu(count)
    from_flags = {name: flag_values[name].value for name in (*COMMON, *RARE, "verbose", "seed")} | {
        "strategy": parse_strategy(flag_values),
        "loss_scale": parse_loss_scale(flag_values),
        "log_interval": flag_values.log_interval,
        "profile_steps": parse_profile(flag_values),
        "divergence": parse_divergence(flag_values),
        "jit_compile": JIT_COMPILE[flag_values.jit_compile],
        "max_to_keep": flag_values.max_to_keep or None,
    }
    made = trainer_class(**from_flags | arguments)
    if flag_values.model_dir and made.is_chief and flag_values.mode in TRAINING_MODES:
        model_dir = local_path(flag_values.model_dir)
        check_writable(model_dir)
        write = functools.partial(write_atomically, model_dir / "flags.cfg", text_of(flag_values))
        if (model_dir / "flags.cfg").exists():  # the run may yet be refused, or only evaluate
            made.when_training_begins.append(write)
        else:
            write()
    return made


def run_mode(
    trainer: Trainer,
    train_data: Any,
    test_data: Any = None,
    flag_values: flags.FlagValues = FLAGS,
) -> dict[str, float] | None:
    """Runs the mode that `--mode` selects.

    "train" trains up to `--steps`, and evaluates every `--eval_interval` steps. With
    `--keep_best` but no `--eval_interval`, it evaluates once, at the end. "eval" evaluates
    the newest checkpoint; with `--continuous`, each checkpoint while another process trains the
    run (see `Trainer.evaluate_continuously`). "train_and_eval" does both. "dry_run" tries
    everything that a run does, "overfit" trains on one batch for `--steps` steps, and
    "replay" repeats the skipped step in the record `--overflow`. The last three print their
    findings.

    Args:
        trainer: the trainer that `make_trainer` returned.
        train_data: as for `Trainer.train`; arrays are cut into batches of `--global_batch`.
        test_data: as for `Trainer.evaluate`; arrays are cut in the same way. With None, nothing is
            evaluated, and --mode=eval is an error.
        flag_values: the parsed flags.

    Returns:
        The results of the final evaluation, on every worker; None if there was no evaluation. With
        `--continuous`, the results of the last checkpoint.

    Raises:
        TypeError: if `trainer` is not a trainer.
        Exception: whatever `Trainer.train`, `Trainer.evaluate` and `Trainer.replay` raise.

    Example:
        >>> import keras, numpy as np
        >>> own_flags = flags.FlagValues()
        >>> _ = flags.DEFINE_integer("verbosity", 0, "absl's own", flag_values=own_flags)
        >>> define_flags(own_flags, steps=20)
        >>> _ = own_flags(["script.py"])
        >>> line = make_trainer(
        ...     Trainer, own_flags, verbose=False, optimizer="sgd", loss_fn="mse",
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]))
        >>> data = np.ones([64, 1], np.float32), np.ones([64, 1], np.float32)
        >>> sorted(run_mode(line, data, data, own_flags))
        ['loss']
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"`trainer` must be a Trainer; got {type(trainer).__name__}. Each mode calls one "
            "of its methods. Pass the trainer that make_trainer returned."
        )
    check_eval_mode(test_data, flag_values)
    check_in_use(flag_values)
    batch_size = flag_values.global_batch if needs_batch_size(train_data) else None
    finds: dict[str, Callable[[], object]] = {
        "dry_run": lambda: trainer.dry_run(
            train_data, global_batch=batch_size, eval_data=test_data
        ),
        "overfit": lambda: trainer.overfit_one_batch(
            train_data, flag_values.steps, global_batch=batch_size
        ),
        "replay": lambda: trainer.replay(flag_values.overflow),
    }
    if flag_values.mode in finds:
        found = finds[flag_values.mode]()
        if trainer.is_chief:
            print(found)  # noqa: T201  # the purpose of these modes
        return None
    batched = not is_named(test_data) and not needs_batch_size(test_data)
    eval_batch_size = None if batched else flag_values.global_batch
    evaluates = flag_values.mode != "train" and test_data is not None
    if evaluates:
        check_test_data(trainer, test_data, eval_batch_size, flag_values)
    if flag_values.mode != "eval":
        train(trainer, train_data, test_data, flag_values)
    return evaluate(trainer, test_data, eval_batch_size, flag_values) if evaluates else None


def train(trainer: Trainer, train_data: Any, test_data: Any, flag_values: flags.FlagValues) -> None:
    """Trains as the flags say."""
    interval, at_start = flag_values.eval_interval, flag_values.evaluate_at_start
    evaluated = test_data if interval or at_start or flag_values.keep_best else None
    trainer.train(
        train_data,
        flag_values.steps,
        global_batch=flag_values.global_batch if needs_batch_size(train_data) else None,
        eval_data=evaluated,
        eval_interval=interval,
        eval_steps=None if evaluated is None else flag_values.eval_steps,
        evaluate_at_start=at_start,
    )


def evaluate(
    trainer: Trainer, test_data: Any, batch_size: int | None, flag_values: flags.FlagValues
) -> dict[str, float] | None:
    """Evaluates the newest checkpoint or, with `--continuous`, all of them as they are written.

    Raises:
        ValueError: if --continuous is given with a mode that trains.
    """
    amount = {"global_batch": batch_size, "steps": flag_values.eval_steps}
    if not flag_values.continuous:
        return trainer.evaluate(test_data, **amount)
    results = trainer.evaluate_continuously(
        test_data,
        **amount,
        last_step=flag_values.steps,
        timeout_secs=flag_values.timeout_secs,
    )
    return results[max(results)] if results else None


def check_eval_mode(test_data: Any, flag_values: flags.FlagValues) -> None:
    """Raises ValueError for --continuous without --mode=eval, and for that mode without data."""
    if flag_values.continuous and flag_values.mode != "eval":
        raise ValueError(
            "`--continuous` must be left out unless --mode is eval; got it with --mode="
            f"{flag_values.mode}. It follows a run that another process trains. Pass --mode=eval."
        )
    if flag_values.mode == "eval" and test_data is None:
        raise ValueError(
            "`test_data` must be given with --mode=eval; got None. There is nothing to evaluate "
            "on. Pass it to run_mode, or choose --mode=train."
        )
    folder = flag_values.model_dir and local_path(flag_values.model_dir).absolute()
    waits = flag_values.continuous or flag_values.init_from
    if flag_values.mode == "eval" and folder and not waits and not committed(folder, PREFIX):
        raise ValueError(
            f"`--model_dir` must hold a checkpoint with --mode=eval; got {folder}, which has none. "
            "The model would be evaluated untrained. Check the path, or leave out --model_dir to "
            "evaluate a model that is trained already."
        )


def check_test_data(
    trainer: Trainer, test_data: Any, batch_size: int | None, flag_values: flags.FlagValues
) -> None:
    """Raises what evaluation would raise for its data, by the name it has here, and before hours of
    training and not after.

    Functions without parameters, and what Python reads batch by batch, are left to the evaluation:
    their data may be readable only once.
    """
    parts = test_data.values() if is_named(test_data) else [test_data]
    if not any(is_source(part) for part in parts):
        limit = "--eval_steps", flag_values.eval_steps
        read_eval_data(test_data, "test_data", trainer.strategy, batch_size, limit=limit)


def check_in_use(flag_values: flags.FlagValues) -> None:
    """Raises ValueError for a flag that has no effect without another one."""
    needs = {
        "overflow": ("--mode=replay", flag_values.mode == "replay"),
        "timeout_secs": ("--continuous", flag_values.continuous),
        "max_recoveries": ("--loss_above", flag_values.loss_above is not None),
        "logical_cpus": ("--strategy=mirrored", flag_values.strategy == "mirrored"),
    }
    for name, (other, given) in needs.items():
        flag = flag_values[name]
        if not given and flag.value != flag.default:  # flags.cfg also holds default values
            raise ValueError(
                f"`--{name}` must be left out without {other}; got {shown(flag.value)}. It would "
                f"have no effect. Pass {other} as well."
            )


def check_flag_file_first(arguments: Sequence[str], flag_values: flags.FlagValues) -> None:
    """Raises ValueError if a flag file has replaced a flag that was given before it.

    absl takes the last value of a flag, and `flags.cfg` has a value for every flag.

    Args:
        arguments: the command line, without the script's name.
        flag_values: the parsed flags.
    """
    arguments = [*itertools.takewhile(lambda text: text != "--", arguments)]
    for place, text in enumerate(arguments):
        if not re.match("--?flagfile(=|$)", text):
            continue
        behind = place + (1 if "=" in text else 2)
        before = given_in(arguments[:place], flag_values)
        read = flag_values.read_flags_from_files(arguments[place:behind])
        in_file = given_in(read, flag_values)
        after = given_in(arguments[behind:], flag_values)
        for name in sorted((before.keys() & in_file.keys()) - after.keys()):
            flag = flag_values[name]
            same = flag.parser.parse(before[name]) == flag.parser.parse(in_file[name])
            if same or isinstance(flag, flags.MultiFlag):
                continue
            raise ValueError(
                f"`--{name}={before[name]}` must come after --flagfile; got it before, and the "
                f"file sets --{name}={in_file[name]}. The last value of a flag counts. Put "
                "--flagfile first."
            )


def given_in(arguments: Sequence[str], flag_values: flags.FlagValues) -> dict[str, str]:
    """Returns the texts of the flags on a part of a command line, keyed by name, not by alias."""
    given = {}
    for text, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, separator, value = text.lstrip("-").partition("=")
        if not text.startswith("-"):
            continue
        if name in flag_values:
            alone = "true" if flag_values[name].boolean else following
            given[ALIASES.get(name, name)] = value if separator else alone
        elif name.startswith("no") and name[2:] in flag_values:
            given[name[2:]] = "false"
    return given


def parse_strategy(flag_values: flags.FlagValues) -> str | tf.distribute.Strategy:
    """Returns the value of the trainer's argument `strategy`.

    Raises:
        ValueError: if --tpu is given with a strategy that does not use it.
    """
    strategy = flag_values.strategy
    if flag_values.tpu is None:
        return strategy
    if strategy not in ("tpu", "auto"):
        raise ValueError(
            f"`--tpu` must be left out unless --strategy is tpu or auto; got "
            f"{shown(flag_values.tpu)} with {strategy!r}. No other strategy runs on a TPU. Pass "
            "--strategy=tpu."
        )
    return strategies.create(strategy, [flag_values.tpu])


def parse_divergence(flag_values: flags.FlagValues) -> Divergence | None:
    """Returns the value of the trainer's argument `divergence`."""
    bound = flag_values.loss_above
    if bound is None:
        return None
    return Divergence(loss_above=bound, max_recoveries=flag_values.max_recoveries)


def parse_profile(flag_values: flags.FlagValues) -> list[int] | None:
    """Returns the value of the trainer's argument `profile_steps`."""
    steps = flag_values.profile_steps
    if steps is None:
        return None
    return [int(step) if step.isdecimal() else step for step in steps]


def parse_loss_scale(flag_values: flags.FlagValues) -> LossScaleArgument:
    """Returns the value of the trainer's argument `loss_scale`.

    Raises:
        ValueError: if the flag is neither a known name nor a power of two, or if --initial_scale is
            given and there is no rule that it belongs to.
    """
    text, precision = flag_values.loss_scale, resolve_precision(flag_values.precision)
    unscaled = text == "auto" and not precision.needs_loss_scale
    if text in ("auto", "dynamic") and not unscaled:
        scale = flag_values.initial_scale
        ceiling = max(scale, scaling.DynamicLossScale.max_scale)
        return scaling.DynamicLossScale(initial_scale=scale, max_scale=ceiling)
    initial = flag_values["initial_scale"]
    if initial.value != initial.default:  # flags.cfg also holds default values
        refused = f"`--initial_scale` must be left out unless {{}}; got {initial.value:g} with "
        if unscaled:
            raise ValueError(
                refused.format("there is a loss scale")
                + f"--precision={precision.name}. Only float16 "
                "has one by default. Pass --precision=mixed_float16 or --loss_scale=dynamic."
            )
        raise ValueError(
            refused.format("--loss_scale is auto or dynamic") + f"--loss_scale={text}. Other rules "
            "do not use it. Give the initial scale as a field of the rule, as in "
            "dynamic:initial_scale=2^20."
        )
    return None if unscaled else scaling.parse_rule(text)


def text_of(flag_values: flags.FlagValues) -> str:
    """Returns the script's flags as a flag file, one per line.

    Paths are absolute, so that the file means the same run from every folder. `allow_changes` is
    left out: it permits one change, not those of every later run.
    """
    written = [
        flag
        for module in (sys.argv[0], __name__)
        for flag in flag_values.get_key_flags_for_module(module)
        if flag.value is not None and flag.name not in (*ALIASES, "allow_changes")
    ]
    lines = [
        f"--{flag.name}={local_path(flag.value).absolute()}"
        if flag.name in PATHS and flag.value
        else flag.serialize()
        for flag in written
    ]
    return "\n".join(lines) + "\n"
