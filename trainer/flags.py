"""Defines command-line flags for training scripts, and makes a trainer from them.

A flag has the name of the argument that it sets, of `Trainer` or of its methods. The settings in a
group are flags with the group's name: `Checkpoints(interval=500)` is `--checkpoints.interval=500`.
They are made from the groups' fields, so a new field has a flag. Synopsis:

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
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import tensorflow as tf
from absl import flags, logging

import strategies
from scaling.base.argument_checks import did_you_mean
from scaling.ops.precision import COMPUTE_DTYPES
from trainer.base.argument_checks import local_path
from trainer.base.atomic_files import write_atomically
from trainer.base.fields import CHOICES, LEAST, argument_texts
from trainer.callbacks.divergence import Divergence
from trainer.data.batches import needs_batch_size
from trainer.evaluation.eval_data import is_named
from trainer.step.xla import COMPILE_MODES
from trainer.trainer import Trainer

# Flags defined here belong to the script that calls `define_flags`, so that its
# --helpshort shows them.
flags.disclaim_key_flags()

FLAGS = flags.FLAGS
TRAINING_MODES = ["train_and_eval", "train"]
MODES = [*TRAINING_MODES, "eval", "dry_run", "overfit", "replay"]
PATHS = ("model_dir", "checkpoints.init_from")
BOOLS = {"true": True, "false": False}

TEXTS = argument_texts(Trainer)
DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()
}
# The classes of the groups, by the name of the trainer's argument; and of one that is nested.
GROUPS: dict[str, type] = {
    name: type(default) for name, default in DEFAULTS.items() if dataclasses.is_dataclass(default)
}
DIVERGENCE = {"divergence": Divergence}

TrainerType = TypeVar("TrainerType", bound=Trainer)


def define_flags(flag_values: flags.FlagValues = FLAGS, **defaults: Any) -> None:
    """Defines the flags of a training script; call it before `app.run`.

    Args:
        flag_values: the flags to add to; tests pass their own.
        **defaults: the script's own defaults: values of flags, keyed by name, and groups of
            settings, such as `updates=Updates(global_clipnorm=1.0)`.

    Raises:
        ValueError: if a name in `defaults` is not one of these flags.
    """
    before = set(flag_values)
    define_common_flags(flag_values)
    define_rare_flags(flag_values)
    ours = set(flag_values) - before
    # TensorFlow's own messages would drown out the progress lines; --verbosity=0 shows them again.
    # This sets the value and not the default, because app.run would change the default to 0.
    flag_values["verbosity"].value = logging.WARNING
    flag_values["verbosity"].using_default_value = False
    for name, value in defaults.items():
        if name in GROUPS:
            for flag in ours:
                group, _, field = flag.partition(".")
                if group == name:
                    flag_values.set_default(flag, getattr(value, field))
        elif name in ours:
            flag_values.set_default(name, value)
        else:
            remedy = did_you_mean(name, [*ours, *GROUPS], "See --helpfull.")
            raise ValueError(f"`define_flags` must be given its flags' names; got {name}. {remedy}")


def define_common_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags that --helpshort shows."""
    where = {"flag_values": flag_values}
    count = {"lower_bound": 1, **where}
    flags.DEFINE_enum("mode", "train_and_eval", MODES, "What to do with the trainer.", **where)
    flags.DEFINE_integer("global_batch", 64, "Number of examples in a global batch.", **count)
    flags.DEFINE_integer(
        "steps", 1000, "The step to train to, counted from the beginning of the run.", **count
    )
    flags.DEFINE_integer(
        "eval_interval", None, "Number of steps between evaluations during training.", **count
    )
    flags.DEFINE_enum(
        "precision", None, list(COMPUTE_DTYPES), first_sentence(TEXTS["precision"]), **where
    )
    flags.DEFINE_string(
        "loss_scale",
        "auto",
        "auto, none, a power of two, or the name of a rule or preset, such as pytorch or "
        "dynamic:initial_scale=2^20.",
        **where,
    )
    flags.DEFINE_string("model_dir", None, first_sentence(TEXTS["model_dir"]), **where)
    flags.DEFINE_string(
        "strategy",
        DEFAULTS["strategy"],
        f"Where the replicas run: one of {', '.join(strategies.names())}.",
        **where,
    )
    flags.DEFINE_string(
        "tpu", None, "Address of the TPU: its name, local, or grpc://HOST:PORT.", **where
    )
    for name in ("num_microbatches", "steps_per_loop", "log_interval"):
        flags.DEFINE_integer(name, DEFAULTS[name], first_sentence(TEXTS[name]), **count)
    flags.DEFINE_enum(
        "verbose", "normal", ["quiet", "normal", "detailed"], "How much to print.", **where
    )
    flags.DEFINE_integer("seed", 0, first_sentence(TEXTS["seed"]), **where)


def first_sentence(text: str) -> str:
    """Returns a text up to the end of its first sentence.

    Example:
        >>> first_sentence("Folder for files. None writes nothing.")
        'Folder for files.'
    """
    return text.partition(". ")[0].removesuffix(".") + "."


def define_rare_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags that only --helpfull shows, among them those of the groups."""
    where = {"flag_values": flag_values, "module_name": __name__}
    count = {"lower_bound": 1, **where}
    modes = [str(mode).lower() for mode in ("auto", *COMPILE_MODES)]
    flags.DEFINE_enum("jit_compile", DEFAULTS["jit_compile"], modes, TEXTS["jit_compile"], **where)
    flags.DEFINE_integer(
        "logical_cpus",
        None,
        "Number of devices to divide the CPU into on a machine without a GPU: mirrored then has "
        "as many replicas. If not set, the CPU is one device, and mirrored has one replica.",
        **count,
    )
    flags.DEFINE_string(
        "overflow",
        None,
        "The record that --mode=replay runs again: a folder MODEL_DIR/overflows/step-STEP.",
        **where,
    )
    flags.DEFINE_integer(
        "eval_steps",
        None,
        "The largest number of batches to evaluate. If not set, all are evaluated.",
        **count,
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
    for name, group in (GROUPS | DIVERGENCE).items():
        texts = argument_texts(group)
        for field in dataclasses.fields(group):
            define_field(f"{name}.{field.name}", field, texts[field.name], where)


def define_field(
    name: str, field: dataclasses.Field[Any], text: str, where: dict[str, Any]
) -> None:
    """Defines the flag of a group's field, unless a flag cannot hold its type, such as a dict.

    Args:
        name: the name of the flag.
        field: the field.
        text: the help.
        where: where the flag belongs, as for absl's functions.
    """
    choices = field.metadata.get(CHOICES)
    union = isinstance(field.type, types.UnionType)  # such as float | None
    kinds = get_args(field.type) if union else (field.type,)
    if field.default == ():  # a sequence, of which each item is a flag
        if choices:
            flags.DEFINE_multi_enum(name, [], list(choices), text, **where)
        else:
            flags.DEFINE_multi_string(name, [], text, **where)
    elif choices:
        flags.DEFINE_enum(name, field.default, list(choices), text, **where)
    elif bool in kinds:
        flags.DEFINE_boolean(name, field.default, text, **where)
    elif int in kinds:
        # 0 stands for None, which a flag cannot say.
        least = 0 if field.default and type(None) in kinds else field.metadata.get(LEAST, 1)
        flags.DEFINE_integer(name, field.default, text, lower_bound=least, **where)
    elif float in kinds:
        flags.DEFINE_float(name, field.default, text, **where)
    elif str in kinds:
        flags.DEFINE_string(name, field.default, text, **where)
    elif name == "monitoring.profile_steps":
        flags.DEFINE_list(name, None, text, **where)


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
        **arguments: further arguments; they take precedence over the flags. Of a group, those
            fields do that are not at their defaults.

    Raises:
        TypeError, ValueError: for arguments that `Trainer` refuses, or if a flag stands before
            --flagfile.
    """
    # absl takes the last value of a flag, and `flags.cfg` has a value for every flag.
    given = list(itertools.takewhile(lambda text: text != "--", sys.argv[1:]))
    if any(re.match("--?flagfile(=|$)", text) for text in given[1:]) and given[0].startswith("-"):
        raise ValueError(f"`--flagfile` must be the first flag; got {given[0]} first")
    no_gpu = not tf.config.list_physical_devices("GPU")
    if flag_values.strategy == "mirrored" and no_gpu and flag_values.logical_cpus:
        strategies.split_cpu(flag_values.logical_cpus)
    same = ("model_dir", "precision", "num_microbatches", "steps_per_loop", "log_interval", "seed")
    from_flags = {name: flag_values[name].value for name in (*same, "verbose", "loss_scale")} | {
        "strategy": flag_values.strategy,
        "jit_compile": BOOLS.get(flag_values.jit_compile, flag_values.jit_compile),
    }
    if flag_values.tpu is not None:
        from_flags["strategy"] = strategies.create(flag_values.strategy, [flag_values.tpu])
    for name, group in GROUPS.items():
        chosen = group_of(name, arguments.pop(name, group()), flag_values)
        if chosen != group():  # a subclass may choose its own
            from_flags[name] = chosen
    made = trainer_class(**from_flags | arguments)
    if flag_values.model_dir and made.is_chief and flag_values.mode in TRAINING_MODES:
        model_dir = local_path(flag_values.model_dir)
        write = functools.partial(write_atomically, model_dir / "flags.cfg", text_of(flag_values))
        if (model_dir / "flags.cfg").exists():  # the run may yet be refused, or only evaluate
            made.when_training_begins.append(write)
        else:
            write()
    return made


def group_of(name: str, given: Any, flag_values: flags.FlagValues) -> Any:
    """Returns a group of settings with the values of its flags in the place of its defaults.

    Args:
        name: the name of the trainer's argument.
        given: the group that the script passes.
        flag_values: the parsed flags.
    """
    values = {}
    for field in dataclasses.fields(given):
        flag, own = f"{name}.{field.name}", getattr(given, field.name)
        if flag in flag_values and own == field.default:
            value = flag_values[flag].value
            value = tuple(value) if field.default == () else value
            # 0 and an empty text stand for None; 0.0 is refused where it bounds something.
            empty = not value and not isinstance(value, float)
            values[field.name] = None if empty and type(None) in get_args(field.type) else value
    if steps := values.get("profile_steps"):
        values["profile_steps"] = [int(step) for step in steps]
    if name == "monitoring" and given.divergence is None:
        fields = [field.name for field in dataclasses.fields(Divergence)]
        divergence = {each: flag_values[f"divergence.{each}"].value for each in fields}
        if divergence["loss_above"] is not None or divergence["rise"] is not None:
            values["divergence"] = Divergence(**divergence)
    return dataclasses.replace(given, **values)


def run_mode(
    trainer: Trainer,
    train_data: Any,
    test_data: Any = None,
    flag_values: flags.FlagValues = FLAGS,
) -> dict[str, float] | None:
    """Runs the mode that `--mode` selects.

    "train" trains up to `--steps`, and evaluates every `--eval_interval` steps. With
    `--checkpoints.keep_best` but no `--eval_interval`, it evaluates once, at the end. "eval"
    evaluates the newest checkpoint; with `--continuous`, each checkpoint while another process
    trains the run (see `Trainer.evaluate_continuously`). "train_and_eval" does both. "dry_run"
    tries everything that a run does, "overfit" trains on one batch for `--steps` steps, and
    "replay" repeats the skipped step in the record `--overflow`. The last three print their
    findings.

    Args:
        trainer: the trainer that `make_trainer` returned.
        train_data: as for `Trainer.train`; arrays are cut into batches of `--global_batch`.
        test_data: as for `Trainer.evaluate`; arrays are cut in the same way. With None, nothing is
            evaluated.
        flag_values: the parsed flags.

    Returns:
        The results of the final evaluation, on every worker; None if there was no evaluation. With
        `--continuous`, the results of the last checkpoint.

    Raises:
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
    if flag_values.mode != "eval":
        train(trainer, train_data, test_data, flag_values)
    if flag_values.mode == "train" or test_data is None:
        return None
    return evaluate(trainer, test_data, flag_values)


def train(trainer: Trainer, train_data: Any, test_data: Any, flag_values: flags.FlagValues) -> None:
    """Trains as the flags say."""
    interval, at_start = flag_values.eval_interval, flag_values.evaluate_at_start
    evaluated = test_data if interval or at_start or trainer.checkpoints.keep_best else None
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
    trainer: Trainer, test_data: Any, flag_values: flags.FlagValues
) -> dict[str, float] | None:
    """Evaluates the newest checkpoint or, with `--continuous`, all of them as they are written."""
    batched = not is_named(test_data) and not needs_batch_size(test_data)
    amount = {
        "global_batch": None if batched else flag_values.global_batch,
        "steps": flag_values.eval_steps,
    }
    if not flag_values.continuous:
        return trainer.evaluate(test_data, **amount)
    results = trainer.evaluate_continuously(
        test_data,
        **amount,
        last_step=flag_values.steps,
        timeout_secs=flag_values.timeout_secs,
    )
    return results[max(results)] if results else None


def text_of(flag_values: flags.FlagValues) -> str:
    """Returns the script's flags as a flag file, one per line.

    Paths are absolute, so that the file means the same run from every folder. `allow_changes` is
    left out: it permits one change, not those of every later run.
    """
    written = [
        flag
        for module in (sys.argv[0], __name__)
        for flag in flag_values.get_key_flags_for_module(module)
        if flag.value is not None and flag.name != "checkpoints.allow_changes"
    ]
    lines = [
        f"--{flag.name}={local_path(flag.value).absolute()}"
        if flag.name in PATHS and flag.value
        else flag.serialize()
        for flag in written
    ]
    return "\n".join(lines) + "\n"
