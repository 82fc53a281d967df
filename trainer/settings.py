"""What the trainer's arguments mean: names and numbers turned into the objects they stand for."""

import contextlib
import difflib
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaling
import strategies


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
    if not hasattr(loss_scale, "advance") or not hasattr(loss_scale, "initial_state"):
        raise TypeError(
            f"`loss_scale` must be a rule if it is an object; got {type(loss_scale).__name__}. A "
            "rule has initial_state() and advance(). Use for instance "
            "scaling.DynamicLossScale(growth_interval=500)."
        )
    return loss_scale


def resolve_jit_compile(
    jit_compile: bool | str, precision: scaling.Precision, strategy: tf.distribute.Strategy
) -> bool:
    """Returns whether each replica's forward and backward pass is compiled by XLA.

    "auto" compiles float16 on CPU, where TensorFlow's own float16 convolution is a scalar
    loop, hundreds of times slower; and nothing else.
    """
    if jit_compile in (True, False):
        return bool(jit_compile)
    if jit_compile != "auto":
        raise ValueError(
            f'`jit_compile` must be True, False or "auto"; got {jit_compile!r}. It says whether '
            'XLA compiles each replica\'s forward and backward pass. Leave it at "auto".'
        )
    return precision.compute_dtype == "float16" and runs_on_cpu(strategy)


def runs_on_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all of a strategy's replicas compute on CPU devices."""
    try:
        devices = strategy.extended.worker_devices
    except RuntimeError:  # the default strategy, which leaves the choice to TensorFlow
        return not tf.config.list_logical_devices("GPU")
    return all("CPU" in device.upper() for device in devices)


def check_count(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"`{name}` must be an int of at least 1; got {value!r}. It counts steps, examples or "
            "parts of a batch. Use 1 or more."
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError, naming the argument, unless `value` is one of some words."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Choose one of them."
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}. The trainer "
            f"knows no other way. {hint}"
        )


def check_records(max_overflow_records: Any, model_dir: Any) -> None:
    """Raises ValueError unless the flight recorder is off, or has a place to write to."""
    if max_overflow_records == 0:
        return
    check_count("max_overflow_records", max_overflow_records)
    if model_dir is None:
        raise ValueError(
            f"`max_overflow_records` must be 0 without `model_dir`; got {max_overflow_records}. "
            "Records are files. Pass model_dir=."
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
