"""Turns the trainer's arguments into objects, checks them, and sets the Keras dtype policy."""

import contextlib
import numbers
import pathlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from absl import logging

import scaling
import strategies
from trainer.base.argument_checks import check_path, local_path
from trainer.losses.loss_fn import check_loss_fn
from trainer.losses.outputs import is_several, resolve_output_losses

# A name, a fixed scale, a rule, or None: see `Trainer`.
LossScaleArgument: TypeAlias = str | float | scaling.LossScaleRule | None


def resolve_strategy(strategy: str | tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns the strategy with the given name; returns a strategy object unchanged.

    Raises:
        ValueError: if no strategy has this name, or if one of its devices is missing.
    """
    if isinstance(strategy, tf.distribute.Strategy):
        strategies.check_devices(strategy)
        return strategy
    return strategies.create(strategy)


def resolve_folder(model_dir: str | pathlib.Path | None) -> pathlib.Path | None:
    """Returns `model_dir` as an absolute path, which does not follow the working directory."""
    if model_dir is None:
        return None
    check_path("model_dir", model_dir, of_checkpoints=True)
    return local_path(model_dir).absolute()


def resolve_precision(name: str | None) -> scaling.Precision:
    """Returns the precision of a name; None stands for Keras's global dtype policy.

    Raises:
        ValueError: for any other name, and a global policy that is no `scaling.Precision`.
    """
    return scaling.Precision(keras.config.dtype_policy().name if name is None else name)


def resolve_rule(
    loss_scale: LossScaleArgument, precision: scaling.Precision
) -> scaling.LossScaleRule:
    """Returns the loss-scale rule that `loss_scale` selects.

    Args:
        loss_scale: a name that `scaling.parse_rule` accepts; "auto" for a dynamic scale if
            `precision` needs one, and no scaling otherwise; a number for a fixed scale; None for
            no scaling; or a rule.
        precision: decides what "auto" means.

    Raises:
        ValueError: for an unknown name, or a number that is not a power of two.
    """
    if isinstance(loss_scale, str) and loss_scale == "auto":
        loss_scale = "dynamic" if precision.needs_loss_scale else None
    if loss_scale is None:
        return scaling.NoLossScale()
    if isinstance(loss_scale, numbers.Real):
        return scaling.FixedLossScale(loss_scale)  # type: ignore[arg-type]  # also a NumPy number
    if isinstance(loss_scale, str):
        return scaling.parse_rule(loss_scale)
    return loss_scale  # type: ignore[return-value]  # a rule


def resolve_loss(loss_fn: Any, reduction: str = "mean", loss_weights: Any = None) -> Any:
    """Returns the Keras loss with the given name; returns a loss object or function unchanged.

    A dict or a list of losses becomes an `OutputLosses`, with `loss_weights`.

    Raises:
        ValueError: for a name that Keras does not know, or a loss that is no mean of the examples'
            own losses: see `check_loss_fn`.
    """
    if is_several(loss_fn):
        return resolve_output_losses(loss_fn, loss_weights, reduction, resolve_loss)
    found = keras.losses.get(loss_fn) if isinstance(loss_fn, str) else loss_fn
    if found is not None:
        check_loss_fn(found, reduction)
    return found


def warn_of_conflicts(loss_scale: LossScaleArgument, precision: scaling.Precision) -> None:
    """Warns, once per process, about settings with which digits are lost without a word."""
    if loss_scale is None and precision.needs_loss_scale:
        logging.log_first_n(
            logging.WARNING,
            'loss_scale=None with precision=%r: small gradients underflow; use "dynamic" or "none"',
            1,
            precision.name,
        )
    if precision.name == "float64" and keras.config.floatx() != "float64":
        logging.log_first_n(
            logging.WARNING,
            'precision="float64": call keras.config.set_floatx("float64") too; Keras rounds to %s',
            1,
            keras.config.floatx(),
        )


def check_one_process(name: str, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError, naming a method, if a strategy runs in several processes.

    The changes that other processes make could not be undone.
    """
    if strategies.capabilities(strategy).several_processes:
        raise ValueError(f"`{name}` works in one process only; got a {type(strategy).__name__}")


@contextlib.contextmanager
def dtype_policy(precision: scaling.Precision) -> Iterator[None]:
    """Context manager: sets the Keras dtype policy with which layers are created in the block.

    The policy is set only here. Each layer then casts its inputs, and its float32 variables where
    it uses them, to the policy's compute dtype.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision.policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
