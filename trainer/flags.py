"""Command-line flags for training scripts, and the trainer they describe.

The names are those of TensorFlow's own models (`--model_dir`, `--train_steps`,
`--distribution_strategy`, `--steps_per_loop`, ...). Synopsis:

    from absl import app, flags
    from trainer.flags import define_flags, make_trainer

    FLAGS = flags.FLAGS

    def main(_):
        digits = make_trainer(Digits)
        digits.train(data, steps=FLAGS.train_steps, global_batch=FLAGS.batch_size)

    if __name__ == "__main__":
        define_flags(train_steps=600)
        app.run(main)
"""

import difflib
import os
import pathlib
import sys
from typing import Any, TypeVar

import tensorflow as tf
from absl import flags, logging

import scaling
import strategies
from trainer.trainer import Trainer

# Flags defined here belong to the script that calls `define_flags`, so that its
# --helpshort shows them.
flags.disclaim_key_flags()

FLAGS = flags.FLAGS
MODES = ["train_and_eval", "train", "eval"]

TrainerType = TypeVar("TrainerType", bound=Trainer)


def define_flags(**defaults: Any) -> None:
    """Defines the flags of a training script; call it before `app.run`.

    Args:
        **defaults: the script's own defaults, by flag name.

    Raises:
        ValueError: if there is no flag of such a name.
    """
    before = set(FLAGS)
    flags.DEFINE_string("model_dir", None, "Where checkpoints, logs and flags.cfg go.")
    flags.DEFINE_enum("mode", "train_and_eval", MODES, "What to do.")
    flags.DEFINE_string("distribution_strategy", "default", "One of strategies.names().")
    flags.DEFINE_integer(
        "logical_cpus", 2, "Replicas of mirrored where there is no GPU.", lower_bound=1
    )
    flags.DEFINE_enum("precision", "float32", list(scaling.precision.COMPUTE_DTYPES), "Policy.")
    flags.DEFINE_string("loss_scale", "auto", "auto, dynamic, none, or a power of two.")
    flags.DEFINE_float("initial_loss_scale", 2.0**15, "Where a dynamic loss scale starts.")
    flags.DEFINE_integer("batch_size", 64, "Examples in a global batch.", lower_bound=1)
    flags.DEFINE_integer("num_microbatches", 1, "Parts of each replica's share.", lower_bound=1)
    flags.DEFINE_float("global_clipnorm", None, "Bound on the global gradient norm.")
    flags.DEFINE_integer("train_steps", 1000, "The step to reach.", lower_bound=1)
    flags.DEFINE_integer("steps_per_loop", 10, "Steps in one graph call.", lower_bound=1)
    flags.DEFINE_integer("log_steps", 100, "Steps between log lines.", lower_bound=1)
    flags.DEFINE_integer("validation_interval", None, "Steps between evaluations.", lower_bound=1)
    flags.DEFINE_integer("checkpoint_interval", None, "Steps between checkpoints.", lower_bound=1)
    flags.DEFINE_enum("jit_compile", "auto", ["auto", "true", "false"], "XLA for each replica.")
    flags.DEFINE_integer("seed", 0, "For initial weights and shuffling.")
    # TensorFlow's own remarks would drown the progress lines; --verbosity=0 brings them back.
    FLAGS.set_default("verbosity", logging.WARNING)
    ours = sorted(set(FLAGS) - before)
    for name, value in defaults.items():
        if name not in ours:
            near = difflib.get_close_matches(name, ours, n=1)
            raise ValueError(
                f"`define_flags` must be given names of its flags; got {name!r}. It defines "
                f"{', '.join(ours)}. {f'Did you mean {near[0]!r}?' if near else 'Choose one.'}"
            )
        FLAGS.set_default(name, value)


def make_trainer(trainer_class: type[TrainerType], **arguments: Any) -> TrainerType:
    """Makes the trainer that the flags describe, and leaves them in `model_dir/flags.cfg`.

    `SCRIPT --flagfile=MODEL_DIR/flags.cfg` repeats the run. Where mirrored finds no GPU, the
    CPU is split into `--logical_cpus` devices, so call this before anything touches a device.

    Args:
        trainer_class: `Trainer` or a subclass that takes the same arguments.
        **arguments: what the flags do not say, or what shall not follow them.
    """
    no_gpu = not tf.config.list_physical_devices("GPU")
    if FLAGS.distribution_strategy == "mirrored" and no_gpu:
        strategies.split_cpu(FLAGS.logical_cpus)
    if FLAGS.model_dir:
        save_flags(pathlib.Path(FLAGS.model_dir))
    from_flags = {
        "model_dir": FLAGS.model_dir,
        "strategy": FLAGS.distribution_strategy,
        "precision": FLAGS.precision,
        "loss_scale": parse_loss_scale(FLAGS.loss_scale),
        "num_microbatches": FLAGS.num_microbatches,
        "global_clipnorm": FLAGS.global_clipnorm,
        "steps_per_loop": FLAGS.steps_per_loop,
        "log_interval": FLAGS.log_steps,
        "checkpoint_interval": FLAGS.checkpoint_interval,
        "jit_compile": {"auto": "auto", "true": True, "false": False}[FLAGS.jit_compile],
        "seed": FLAGS.seed,
    }
    return trainer_class(**from_flags | arguments)


def parse_loss_scale(text: str) -> Any:
    """Returns what `Trainer` takes as `loss_scale` for what a user types.

    Raises:
        ValueError: if it is neither a word it knows nor a power of two.
    """
    needs_scale = scaling.Precision(FLAGS.precision).needs_loss_scale
    if text == "none" or (text == "auto" and not needs_scale):
        return None
    if text in ("auto", "dynamic"):
        scale = FLAGS.initial_loss_scale
        ceiling = max(scale, scaling.DynamicLossScale.max_scale)
        return scaling.DynamicLossScale(initial_scale=scale, max_scale=ceiling)
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(
            f"`--loss_scale` must be auto, dynamic, none or a power of two; got {text!r}. It is "
            "neither a word nor a number that is known. Use for instance --loss_scale=1024."
        ) from error


def save_flags(model_dir: pathlib.Path) -> None:
    """Writes the script's flags, one a line, into `model_dir/flags.cfg`."""
    model_dir.mkdir(parents=True, exist_ok=True)
    lines = [
        flag.serialize()
        for flag in FLAGS.get_key_flags_for_module(sys.argv[0])
        if flag.value is not None
    ]
    # Written beside and then renamed: whoever reads it finds all of it or none.
    unfinished = model_dir / "flags.cfg.tmp"
    unfinished.write_text("\n".join(lines) + "\n")
    os.replace(unfinished, model_dir / "flags.cfg")
