"""Command-line flags for training scripts, and the trainer they describe.

The names are those of TensorFlow's own models (`--model_dir`, `--train_steps`,
`--distribution_strategy`, `--steps_per_loop`, ...). Synopsis:

    from absl import app
    from trainer.flags import define_flags, make_trainer, run_mode

    def main(_):
        digits = make_trainer(Digits)
        print(run_mode(digits, train_data, test_data))

    if __name__ == "__main__":
        define_flags(train_steps=600)
        app.run(main)
"""

import difflib
import pathlib
import sys
from typing import Any, TypeVar

import tensorflow as tf
from absl import flags, logging

import scaling
import strategies
from scaling.ops.precision import COMPUTE_DTYPES
from trainer.base.argument_checks import check_writable
from trainer.base.atomic_files import write_atomically
from trainer.checkpoint.best import BETTER
from trainer.checkpoint.compatibility import ARGUMENTS
from trainer.config import skip_policy as policy
from trainer.data.batches import are_arrays
from trainer.data.iterator_state import RESUME_MODES
from trainer.monitor.divergence import Divergence
from trainer.trainer import Trainer

# Flags defined here belong to the script that calls `define_flags`, so that its
# --helpshort shows them.
flags.disclaim_key_flags()

FLAGS = flags.FLAGS
MODES = ["train_and_eval", "train", "eval", "dry_run", "overfit", "replay"]

COMPILED = {way: way for way in ("auto", "update", "elementwise")} | {"true": True, "false": False}

# Flags that have the names of the trainer's arguments, and their meaning.
# fmt: off
CALLED_ALIKE = (
    "model_dir", "precision", "num_microbatches", "global_clipnorm", "ema_momentum",
    "on_overflow", "on_nonfinite_loss", "max_consecutive_skips", "on_stuck",
    "max_overflow_records", "steps_per_loop", "verbose", "checkpoint_interval",
    "checkpoint_secs", "max_to_keep", "async_checkpoint", "keep_best", "best_metric", "best_is",
    "data_resume", "allow_changes", "init_from", "seed", "record_gradients",
)
# fmt: on

TrainerType = TypeVar("TrainerType", bound=Trainer)


def define_flags(flag_values: flags.FlagValues = FLAGS, **defaults: Any) -> None:
    """Defines the flags of a training script; call it before `app.run`.

    Args:
        flag_values: where they are defined; a test has its own.
        **defaults: the script's own defaults, by flag name.

    Raises:
        ValueError: if there is no flag of such a name.
    """
    before = set(flag_values)
    where = {"flag_values": flag_values}
    count = {"lower_bound": 1, **where}
    string, enum = flags.DEFINE_string, flags.DEFINE_enum
    number, integer = flags.DEFINE_float, flags.DEFINE_integer
    boolean = flags.DEFINE_boolean
    policies = list(COMPUTE_DTYPES)

    string("model_dir", None, "Where checkpoints, logs and flags.cfg go.", **where)
    enum("mode", "train_and_eval", MODES, "What to do.", **where)
    string("distribution_strategy", "default", "One of strategies.names().", **where)
    string("tpu", None, "With tpu or auto: NAME, local or grpc://HOST:PORT.", **where)
    enum("precision", "float32", policies, "The Keras dtype policy.", **where)
    string("loss_scale", "auto", "auto, or what scaling.parse_rule takes.", **where)
    integer("batch_size", 64, "Examples in a global batch.", **count)
    integer("num_microbatches", 1, "Parts of each replica's share.", **count)
    number("global_clipnorm", None, "Bound on the gradients' global norm.", **where)
    integer("train_steps", 1000, "The step to reach.", **count)
    integer("steps_per_loop", 10, "Steps in one graph call.", **count)
    integer("log_steps", 100, "Steps between log lines.", **count)
    enum("verbose", "normal", ["quiet", "normal", "detailed"], "What to show.", **where)
    integer("validation_interval", None, "Steps between evaluations.", **count)
    integer("checkpoint_interval", None, "Steps between checkpoints.", **count)
    boolean("record_gradients", False, "Keep what report and simulate need.", **where)
    integer("seed", 0, "For initial weights and shuffling.", **where)
    define_rare_flags(flag_values)
    define_saving_flags(flag_values)

    # TensorFlow's own remarks would drown the progress lines; --verbosity=0 brings them back.
    # As a value: app.run raises a default of absl's to 0.
    flag_values["verbosity"].value = logging.WARNING
    flag_values["verbosity"].using_default_value = False
    ours = sorted(set(flag_values) - before)
    for name, value in defaults.items():
        if name not in ours:
            near = difflib.get_close_matches(name, ours, n=1)
            raise ValueError(
                f"`define_flags` must be given names of its flags; got {name!r}. It defines "
                f"{', '.join(ours)}. {f'Did you mean {near[0]!r}?' if near else 'Choose one.'}"
            )
        flag_values.set_default(name, value)


def define_rare_flags(flag_values: flags.FlagValues) -> None:
    """Defines those that few need: --helpshort leaves them out, --helpfull shows them."""
    where = {"flag_values": flag_values, "module_name": __name__}
    count = {"lower_bound": 1, **where}
    enum, integer = flags.DEFINE_enum, flags.DEFINE_integer
    integer("logical_cpus", 2, "Replicas of mirrored where there is no GPU.", **count)
    flags.DEFINE_float("initial_loss_scale", 2.0**15, "Where auto and dynamic start.", **where)
    flags.DEFINE_float("ema_momentum", None, "Of a moving average of the weights.", **where)
    enum("jit_compile", "auto", list(COMPILED), "What XLA compiles.", **where)
    enum("on_overflow", "skip", policy.ON_OVERFLOW, "What an overflow does.", **where)
    enum("on_nonfinite_loss", "skip", policy.ON_NONFINITE_LOSS, "What a bad loss does.", **where)
    integer("max_consecutive_skips", 100, "How many in a row are too many.", **count)
    enum("on_stuck", "raise", policy.ON_STUCK, "What too many do.", **where)
    integer("max_overflow_records", 0, "Skipped steps to keep.", lower_bound=0, **where)
    flags.DEFINE_string("overflow", None, "With --mode=replay: which to run again.", **where)
    flags.DEFINE_list("profile_steps", None, "The first and the last to profile.", **where)


def define_saving_flags(flag_values: flags.FlagValues) -> None:
    """Defines those of what is saved of a run, and how it is taken up again; as rarely needed."""
    where = {"flag_values": flag_values, "module_name": __name__}
    count = {"lower_bound": 1, **where}
    flags.DEFINE_float("checkpoint_secs", None, "Seconds between checkpoints.", **where)
    flags.DEFINE_integer("max_to_keep", 5, "How many checkpoints stay.", **count)
    flags.DEFINE_boolean("async_checkpoint", False, "Write checkpoints in a thread.", **where)
    flags.DEFINE_integer(
        "keep_best", 0, "Of how many evaluations to keep the model.", lower_bound=0, **where
    )
    flags.DEFINE_string("best_metric", "loss", "Which result says which are best.", **where)
    flags.DEFINE_enum("best_is", "lowest", list(BETTER), "Of that metric.", **where)
    flags.DEFINE_enum(
        "data_resume", "exact", RESUME_MODES, "How to find the place in the data again.", **where
    )
    flags.DEFINE_multi_enum(
        "allow_changes", [], list(ARGUMENTS), "What may differ on resuming.", **where
    )
    flags.DEFINE_string("init_from", None, "Whose weights to begin with.", **where)
    flags.DEFINE_float("loss_upper_bound", None, "A loss above it restores a checkpoint.", **where)
    flags.DEFINE_integer("recovery_max_trials", 3, "How often it may.", **count)


def make_trainer(
    trainer_class: type[TrainerType], flag_values: flags.FlagValues = FLAGS, **arguments: Any
) -> TrainerType:
    """Makes the trainer that the flags describe, and leaves them in `model_dir/flags.cfg`.

    `SCRIPT --flagfile=MODEL_DIR/flags.cfg` repeats the run. Where mirrored finds no GPU, the
    CPU is split into `--logical_cpus` devices, so call this before anything touches a device.

    Args:
        trainer_class: `Trainer` or a subclass that takes the same arguments.
        flag_values: the parsed flags.
        **arguments: what the flags do not say, or what shall not follow them.

    Raises:
        TypeError, ValueError: for what `Trainer` refuses, and for flags that contradict each other.
    """
    if not callable(trainer_class):
        raise TypeError(
            f"`trainer_class` must be Trainer or a subclass; got {trainer_class!r}. It is called "
            "with what the flags say. Pass the class itself."
        )
    no_gpu = not tf.config.list_physical_devices("GPU")
    if flag_values.distribution_strategy == "mirrored" and no_gpu:
        strategies.split_cpu(flag_values.logical_cpus)
    from_flags = {name: flag_values[name].value for name in CALLED_ALIKE} | {
        "strategy": parse_strategy(flag_values),
        "loss_scale": parse_loss_scale(flag_values),
        "log_interval": flag_values.log_steps,
        "profile_steps": parse_profile(flag_values),
        "divergence": parse_divergence(flag_values),
        "jit_compile": COMPILED[flag_values.jit_compile],
    }
    made = trainer_class(**from_flags | arguments)
    if flag_values.model_dir and made.is_chief:
        model_dir = pathlib.Path(flag_values.model_dir)
        check_writable(model_dir)
        save_flags(model_dir, flag_values)
    return made


def run_mode(
    trainer: Trainer,
    train_data: Any,
    test_data: Any = None,
    flag_values: flags.FlagValues = FLAGS,
) -> dict[str, float] | None:
    """Does with a trainer what `--mode` says.

    "train" trains up to `--train_steps`; with `--validation_interval` it evaluates on the way,
    with `--keep_best` alone at the end. "eval" evaluates. "train_and_eval" does both. "dry_run",
    "overfit" and "replay" print what they find: of everything that a run does, tried once; of
    training on one batch, up to `--train_steps`; of the skipped step that `--overflow` names.

    Args:
        trainer: what `make_trainer` returned.
        train_data: what `Trainer.train` takes; arrays are cut into `--batch_size`.
        test_data: what `Trainer.evaluate` takes; likewise. None evaluates nothing.
        flag_values: the parsed flags.

    Returns:
        The results of the evaluation at the end, on every worker; None if there was none.

    Raises:
        TypeError: if it is no trainer.
        Exception: what `Trainer.train`, `Trainer.evaluate` and `Trainer.replay` raise.

    Example:
        >>> import keras, numpy as np
        >>> own_flags = flags.FlagValues()
        >>> _ = flags.DEFINE_integer("verbosity", 0, "absl's own", flag_values=own_flags)
        >>> define_flags(own_flags, train_steps=20)
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
            f"`trainer` must be a Trainer; got {type(trainer).__name__}. It trains or evaluates. "
            "Pass what make_trainer returned."
        )
    batch_size = flag_values.batch_size if are_arrays(train_data) else None
    finds = {
        "dry_run": lambda: trainer.dry_run(
            train_data, global_batch=batch_size, eval_data=test_data
        ),
        "overfit": lambda: trainer.overfit_one_batch(
            train_data, flag_values.train_steps, global_batch=batch_size
        ),
        "replay": lambda: trainer.replay(flag_values.overflow),
    }
    if flag_values.mode in finds:
        found = finds[flag_values.mode]()
        if trainer.is_chief:
            print(found)  # noqa: T201  # the answer that was asked for
        return None
    if flag_values.mode != "eval":
        every = flag_values.validation_interval
        trainer.train(
            train_data,
            flag_values.train_steps,
            global_batch=batch_size,
            eval_data=test_data if every or flag_values.keep_best else None,
            eval_interval=every,
        )
    if flag_values.mode == "train" or test_data is None:
        return None
    of_arrays = flag_values.batch_size if are_arrays(test_data) else None
    return trainer.evaluate(test_data, global_batch=of_arrays)


def parse_strategy(flag_values: flags.FlagValues) -> str | tf.distribute.Strategy:
    """Returns what `Trainer` takes as `strategy`.

    Raises:
        ValueError: if a TPU is named that would not be used.
    """
    strategy = flag_values.distribution_strategy
    if flag_values.tpu is None:
        return strategy
    if strategy not in ("tpu", "auto"):
        raise ValueError(
            f"`--tpu` must be left out unless --distribution_strategy is tpu or auto; got "
            f"{flag_values.tpu!r} beside {strategy!r}. No other runs on a TPU. Pass "
            "--distribution_strategy=tpu."
        )
    return strategies.create(strategy, [flag_values.tpu])


def parse_divergence(flag_values: flags.FlagValues) -> Divergence | None:
    """Returns what `Trainer` takes as `divergence`."""
    bound = flag_values.loss_upper_bound
    if bound is None:
        return None
    return Divergence(loss_above=bound, max_recoveries=flag_values.recovery_max_trials)


def parse_profile(flag_values: flags.FlagValues) -> list[int] | None:
    """Returns what `Trainer` takes as `profile_steps`."""
    steps = flag_values.profile_steps
    if steps is None:
        return None
    return [int(step) if step.isdecimal() else step for step in steps]


def parse_loss_scale(flag_values: flags.FlagValues) -> Any:
    """Returns what `Trainer` takes as `loss_scale` for what the user typed.

    Raises:
        ValueError: if it is neither a name it knows nor a power of two.
    """
    text = flag_values.loss_scale
    needs_scale = scaling.Precision(flag_values.precision).needs_loss_scale
    if text == "auto" and not needs_scale:
        return None
    if text in ("auto", "dynamic"):
        scale = flag_values.initial_loss_scale
        ceiling = max(scale, scaling.DynamicLossScale.max_scale)
        return scaling.DynamicLossScale(initial_scale=scale, max_scale=ceiling)
    initial = flag_values["initial_loss_scale"]
    if initial.value != initial.default:  # which stands in flags.cfg, too
        raise ValueError(
            "`--initial_loss_scale` must be left out unless --loss_scale is auto or dynamic; got "
            f"{initial.value:g} beside --loss_scale={text}. Only these begin at "
            "it. Give fields after the rule's name, as in dynamic:initial_scale=2^20."
        )
    return scaling.parse_rule(text)


def save_flags(model_dir: pathlib.Path, flag_values: flags.FlagValues) -> None:
    """Writes the script's flags, one a line, into `model_dir/flags.cfg`."""
    lines = [
        flag.serialize()
        for module in (sys.argv[0], __name__)
        for flag in flag_values.get_key_flags_for_module(module)
        if flag.value is not None
    ]
    write_atomically(model_dir / "flags.cfg", "\n".join(lines) + "\n")
