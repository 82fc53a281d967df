"""Argument checks. They use static information only and add no operations to a graph.

`shown`, `as_tensor` and `not_a_tensor` are copies of those in `scaling/base/argument_checks.py`,
since neither package imports the other; a test compares them.
"""

import numbers
import re
from typing import Any

import tensorflow as tf

LONGEST = 400  # characters of a value in an error
REDUCE_DTYPES = ("float16", "bfloat16")  # in which gradients may be summed, besides their own


def shown(value: Any) -> str:
    """Returns a value as an error shows it: its repr, without the middle if it is long.

    Example:
        >>> shown("text"), len(shown(list(range(10**5))))
        ("'text'", 400)
    """
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except Exception:  # noqa: BLE001  # the error to raise is the caller's
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 53]}...{text[-50:]}"


def as_tensor(name: str, value: Any) -> tf.Tensor:
    """Returns `value` as a tensor; raises TypeError, naming the argument, if it cannot be one."""
    try:
        tensor = tf.convert_to_tensor(value)
    except Exception as error:  # TensorFlow raises many kinds
        raise not_a_tensor(name, value) from error
    if tensor is None:  # as of the class tf.Tensor
        raise not_a_tensor(name, value)
    return tensor


def not_a_tensor(name: str, value: Any) -> TypeError:
    """Returns the error about an argument that TensorFlow cannot convert."""
    return TypeError(
        f"`{name}` must be convertible to tensors; got {type(value).__name__}. TensorFlow "
        "cannot convert this type. Pass tensors, NumPy arrays or numbers."
    )


def check_count(name: str, value: Any, why: str) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"`{name}` must be an int of at least 1; got {shown(value)}. {why} Use 1 or more."
        )


def check_reduce_dtype(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is one of `REDUCE_DTYPES` or None."""
    if value is not None and not (isinstance(value, str) and value in REDUCE_DTYPES):
        raise ValueError(
            f'`{name}` must be "float16", "bfloat16" or None; got {shown(value)}. It is the dtype '
            "in which gradients are sent and summed over replicas. Use None to sum them in their "
            "own dtype."
        )


def static_shape(tensor: Any) -> tf.TensorShape:
    """Returns the static shape of a tensor; the shape of a Python number or other object is ()."""
    try:
        return tf.TensorShape(getattr(tensor, "shape", ()))
    except TypeError:  # something else has this name
        return tf.TensorShape(())


def check_strategy(strategy: Any, why: str) -> None:
    """Raises TypeError unless `strategy` is a `tf.distribute.Strategy`."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"`strategy` must be a tf.distribute.Strategy; got {shown(strategy)}. {why} "
            'Pass for instance strategies.create("mirrored").'
        )


def check_devices(strategy: tf.distribute.Strategy) -> None:
    """Raises an error if a replica's device is not one of this process.

    TensorFlow would place the operations of a single missing GPU on the CPU without a word, and
    would wait forever for several. Devices of other processes are not looked for, nor TPUs, which
    TensorFlow lists when it connects to them.

    Args:
        strategy: the strategy to check. Its devices are initialized.

    Raises:
        TypeError: if `strategy` is not a `tf.distribute.Strategy`.
        ValueError: if a device is missing.

    Example:
        >>> check_devices(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    """
    check_strategy(strategy, "Its devices are looked for.")
    try:
        devices = strategy.extended.worker_devices
    except RuntimeError:  # TensorFlow's default strategy has no devices
        return
    local = [name_of(device) for device in devices if device.startswith("/job:localhost/")]
    own = [device for device in local if not device.startswith("TPU")]
    present = [name_of(device.name) for device in tf.config.list_logical_devices()]
    if missing := [device for device in own if device not in present]:
        raise ValueError(
            f"`strategy` must use devices that TensorFlow finds; got {shown(missing[0])}. It finds "
            f"{', '.join(present)}. Use these, or make the device visible: a GPU needs a driver "
            "and a place in CUDA_VISIBLE_DEVICES, a logical CPU a call of split_cpu."
        )


def name_of(device: str) -> str:
    """Returns the short name of a device.

    Example:
        >>> name_of("/job:localhost/replica:0/task:0/device:GPU:1")
        'GPU:1'
    """
    return device.rpartition("/device:")[2]
