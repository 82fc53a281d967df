"""What the trainer's arguments stand for: names and numbers turned into the objects they mean."""

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

import scaling
import strategies
from scaling.base.argument_checks import did_you_mean


def resolve_strategy(strategy: str | tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns the strategy of a name; a strategy object passes through."""
    if isinstance(strategy, tf.distribute.Strategy):
        return strategy
    return strategies.create(strategy)


def resolve_rule(loss_scale: Any, precision: scaling.Precision) -> scaling.LossScaleRule:
    """Returns the loss-scale rule that an argument stands for.

    Args:
        loss_scale: a name as `scaling.parse_rule` takes it; "auto", which is dynamic where
            `precision` needs it and none elsewhere; a number, for a fixed scale; None, for no
            scaling; or a rule.
        precision: decides what "auto" means.

    Raises:
        ValueError: for a name that is not known, or a number that is not a power of two.
        TypeError: for an object that is no rule.
    """
    if loss_scale == "auto":
        loss_scale = "dynamic" if precision.needs_loss_scale else None
    if loss_scale is None:
        return scaling.NoLossScale()
    if isinstance(loss_scale, numbers.Real):
        return scaling.FixedLossScale(loss_scale)  # type: ignore[arg-type]  # NumPy's numbers too
    if isinstance(loss_scale, str):
        return scaling.parse_rule(loss_scale)
    is_rule = hasattr(loss_scale, "advance") and hasattr(loss_scale, "initial_state")
    if not is_rule or isinstance(loss_scale, type):
        is_class = isinstance(loss_scale, type)
        found = f"class {loss_scale.__name__}" if is_class else type(loss_scale).__name__
        raise TypeError(
            f"`loss_scale` must be a rule if it is an object; got {found}. A rule has "
            "initial_state() and advance(). Use for instance "
            "scaling.DynamicLossScale(growth_interval=500)."
        )
    return loss_scale


def resolve_loss(loss_fn: Any) -> Any:
    """Returns the Keras loss of a name; anything else that can be one passes through.

    Raises:
        ValueError: for a name that Keras does not know.
        TypeError: for a class.
    """
    if isinstance(loss_fn, type) and issubclass(loss_fn, keras.losses.Loss):
        raise TypeError(
            f"`loss_fn` must be a keras.losses.Loss that is made; got the class {loss_fn.__name__}."
            " A call of it makes a loss and computes none. Put () behind it."
        )
    if not isinstance(loss_fn, str):
        return loss_fn
    try:
        return keras.losses.get(loss_fn)
    except ValueError as error:
        known = [name for name, each in vars(keras.losses).items() if callable(each)]
        raise ValueError(
            f"`loss_fn` must be a name that Keras knows; got {loss_fn!r}. keras.losses has none "
            f"of that name. {did_you_mean(loss_fn, known, 'Use for instance mse.')}"
        ) from error


def check_optimizer_name(name: str) -> None:
    """Raises ValueError if Keras has no optimizer of a name. It makes none: that has its place."""
    base = keras.optimizers.Optimizer
    classes = [each for each in vars(keras.optimizers).values() if isinstance(each, type)]
    known = [each.__name__.lower() for each in classes if issubclass(each, base) and each != base]
    if name.lower() not in known and keras.saving.get_registered_object(name) is None:
        raise ValueError(
            f"`optimizer` must be a name that Keras knows; got {name!r}. keras.optimizers has none "
            f"of that name. {did_you_mean(name.lower(), known, 'Use for instance adam.')}"
        )


def warn_of_conflicts(loss_scale: Any, precision: scaling.Precision) -> None:
    """Says once what may be meant, but is seldom."""
    if loss_scale is None and precision.needs_loss_scale:
        logging.log_first_n(
            logging.WARNING,
            "loss_scale=None with precision=%r: small gradients are lost to underflow. Use "
            'loss_scale="dynamic", or "none" if that is what you want.',
            1,
            precision.name,
        )


def check_recordable(max_overflow_records: int, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError if skipped steps are to be kept that no single process could repeat."""
    elsewhere = strategies.has_workers(strategy) or strategies.is_asynchronous(strategy)
    if max_overflow_records and elsewhere:
        raise ValueError(
            f"`max_overflow_records` must be 0 with several workers; got {max_overflow_records}. A "
            "record holds every replica's variables, and no worker has those of another. Leave it "
            "out, or look for the overflow on one machine with num_microbatches=."
        )


def check_trial(name: str, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError where a trial could not be undone: with several processes."""
    if strategies.has_workers(strategy) or strategies.is_asynchronous(strategy):
        raise ValueError(
            f"`{name}` must be asked of a trainer in one process; got {type(strategy).__name__}. "
            'What it tries is not divided. Try strategy="default" or "mirrored".'
        )


@contextlib.contextmanager
def dtype_policy(precision: scaling.Precision) -> Iterator[None]:
    """Within, Keras layers are made under the precision's dtype policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision.name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
