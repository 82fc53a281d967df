"""What each argument may be: an oracle for the calls of `odd_inputs`, written from the docstrings.

The annotation says the type. `RANGES` says what the annotation cannot: a predicate of the value, by
(callable, argument) or by argument alone.
"""

import collections.abc
import inspect
import math
import numbers
import os
import types
import typing
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import scaling
import scaling.float8
import strategies
import trainer
from scaling.base.number_formats import as_float


def tensor_of(value):
    """The value as a tensor, or None."""
    try:
        return tf.convert_to_tensor(value)
    except Exception:  # noqa: BLE001  # whatever TensorFlow raises
        return None


def leaves(value):
    """The leaves of a structure as tensors, with None for what is none; None leaves are left out."""
    found = []
    for leaf in tf.nest.flatten(value):
        if isinstance(leaf, tf.IndexedSlices):
            leaf = leaf.values  # noqa: PLW2901
        if leaf is not None:
            found.append(tensor_of(leaf))
    return found


def is_floats(value):
    """Whether a structure holds nothing but tensors of floats, or None."""
    return all(leaf is not None and leaf.dtype.is_floating for leaf in leaves(value))


def is_tensors(value):
    """Whether a structure holds nothing but what TensorFlow converts."""
    return all(leaf is not None for leaf in leaves(value))


def is_flag(value):
    """A bool of shape (), from Python, NumPy or TensorFlow."""
    found = tensor_of(value)
    return found is not None and found.dtype == tf.bool and found.shape.rank in (0, None)


def is_verdict(value):
    """A flag, or a Verdict of one."""
    return is_flag(value.grads_finite if isinstance(value, scaling.Verdict) else value)


def is_scale(value):
    """A power of two between 2^-126 and 2^126."""
    try:
        return 2.0**-126 <= value <= 2.0**126 and math.frexp(value)[0] == 0.5
    except (TypeError, OverflowError):
        return False


def is_count(value):
    """An int from 1 to 2^30."""
    return 1 <= value <= 2**30


def is_state(kind):
    """Whether a value is a state of a rule: a NamedTuple of tensors of that kind."""
    return lambda value: isinstance(value, kind) and is_tensors(tuple(value))


STATES = {
    "DynamicLossScale": scaling.DynamicLossScaleState,
    "FixedLossScale": scaling.FixedLossScaleState,
    "HeadroomLossScale": scaling.HeadroomLossScaleState,
    "LogMaxLossScale": scaling.LogMaxLossScaleState,
    "NoLossScale": scaling.NoLossScaleState,
    "TolerantLossScale": scaling.TolerantLossScaleState,
    "LossScaler": scaling.DynamicLossScaleState,
}


def has_scale(value):
    """A state of any rule: with a number for its scale."""
    found = tensor_of(getattr(value, "loss_scale", None))
    return (
        isinstance(value, tuple)
        and found is not None
        and found.shape.rank == 0
        and (found.dtype.is_floating)
    )


def is_fraction(value):
    """At least 0 and below 1."""
    return 0 <= value < 1


def is_chain(value):
    """Layers, each of which takes what the one before it returns; one of the pools' may be."""
    chain = value.layers if isinstance(value, keras.Sequential) else value
    return isinstance(chain, list | tuple) and bool(chain) and all(map(callable, chain))


def is_rule(value):
    """An object with the methods of a rule."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("initial_state", "advance")
    )


def is_index(value):
    """0 or 1, as an int or a tensor of one."""
    if isinstance(value, tf.Tensor | tf.Variable):
        return value.dtype in {tf.int32, tf.int64} and value.shape.rank == 0
    return is_of(value, int) and 0 <= value < 2


def is_pairs(value):
    """Pairs of a scale and an interval."""
    return all(len(pair) == 2 and is_scale(pair[0]) and is_count(pair[1]) for pair in value)


POSITIVE = (
    "num_microbatches steps_per_loop checkpoint_interval max_to_keep max_retries "
    "max_consecutive_skips max_overflow_bytes log_interval window max_recoveries every_steps"
)


def is_list_of(kind):
    """Whether a value is a list or tuple of values of a type, or of what a predicate allows."""
    return lambda value: (
        isinstance(value, list | tuple) and all(isinstance(each, kind) for each in value)
    )


def is_examples(value, *, lists=False):
    """An array or tensor of real numbers with a row for each example, for a model of one input."""
    found = None if isinstance(value, list | np.ma.MaskedArray) and not lists else tensor_of(value)
    return (
        found is not None
        and not isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices)
        and (found.dtype.is_floating or found.dtype.is_integer or found.dtype.is_bool)
        and bool(found.shape.rank)
        and found.shape[0] > 0
        and all(size == 1 for size in found.shape[1:])
    )


def is_pair(value, *, lists=False):
    """Inputs, labels and perhaps weights, with as many examples each."""
    return (
        isinstance(value, tuple)
        and len(value) in {2, 3}
        and all(is_examples(each, lists=lists) for each in value)
        and len({len(each) for each in value}) == 1
    )


def is_inputs(value):
    """What a prediction is made for: inputs, alone or with labels; a pipeline of them."""
    if isinstance(value, tf.data.Dataset):
        return is_examples(next(iter(value)))
    return is_pair(value) or is_examples(value)


def is_rows(value):
    """A structure of tensors with a row for each example; the model of a gather has no say."""
    found = leaves(value)
    return all(leaf is not None and leaf.shape.rank for leaf in found)


def is_names(known=None):
    """Whether a value is a collection of strings, as a set also is; of known ones, if any are."""
    return lambda value: (
        not isinstance(value, collections.abc.Mapping)
        and all(isinstance(each, str) and (known is None or each in known) for each in value)
    )


METHODS = {
    "train_data": is_pair,
    "eval_data": lambda value: value is None or is_pair(value),
    ("Trainer.evaluate", "data"): is_pair,
    ("Trainer.evaluate_continuously", "data"): is_pair,
    ("Trainer.predict", "data"): is_inputs,
    ("Trainer.restore", "batch"): lambda value: is_pair(value, lists=True),
    ("Trainer.train_on_batch", "batch"): lambda value: is_pair(value, lists=True),
    ("find_batch_size", "make"): lambda value: isinstance(value, mock.Mock),  # has every method
    ("find_batch_size", "data"): is_pair,
    "compare_on": lambda value: value is None or is_examples(value),
    "x": is_rows,
    ("Trainer.overfit_one_batch", "steps"): lambda value: 1 <= value <= 10**6,
    ("Trainer.replay", "overflow"): lambda _: False,
    "experiment": lambda value: value.strip() != "",
    "project": lambda value: value.strip() != "",
    "plan": lambda _: False,
    "run": lambda _: False,
    "steps": lambda value: value >= 1,
    "epochs": lambda value: value >= 1,
    "global_batch": lambda value: value >= 1,
    "eval_interval": lambda value: value >= 1,
    "eval_steps": lambda value: value >= 1,
    "last_step": lambda value: value >= 1,
    "timeout_secs": lambda value: value >= 0,
    "averaged": lambda value: value is False,
    ("Trainer.evaluate", "precision"): lambda value: value in {"float32", "train"},
    ("Trainer.predict", "precision"): lambda value: value in {"float32", "train"},
    ("Trainer.export", "precision"): lambda value: value in {"float32", "train"},
    ("Trainer.export", "path"): lambda value: bool(os.fspath(value)),
}
TRAINER = {
    **METHODS,
    **{("Trainer", name): lambda value: value >= 1 for name in POSITIVE.split()},
    **{("Divergence", name): lambda value: value >= 1 for name in POSITIVE.split()},
    ("Action", "every_steps"): lambda value: value >= 1,
    ("Action", "every_secs"): lambda value: value > 0,
    ("Divergence", "rise"): lambda value: value > 1,
    ("Trainer", "precision"): lambda value: value in {"float32", "mixed_float16"},
    ("Trainer", "loss_scale"): lambda value: (
        value.strip() in {"dynamic", "pytorch", "1024", "1", "2.0", "0.5"}
        if isinstance(value, str)
        else is_rule(value) or is_scale(value)
    ),
    ("Trainer", "loss_reduction"): lambda value: value in {"mean", "global"},
    ("Trainer", "reduce_dtype"): lambda value: value in {"float16", "bfloat16"},
    ("Trainer", "global_clipnorm"): lambda value: value > 0,
    ("Trainer", "clipnorm"): lambda value: value > 0,
    ("Trainer", "clipvalue"): lambda value: value > 0,
    ("Trainer", "ema_momentum"): lambda value: 0 < value < 1,
    ("Trainer", "strategy"): lambda value: value == "default" if isinstance(value, str) else True,
    ("Trainer", "jit_compile"): lambda value: isinstance(value, bool),
    ("Trainer", "seed"): lambda value: 0 <= value < 2**32,
    ("Trainer", "checkpoint_secs"): lambda value: value > 0,
    ("Trainer", "keep_best"): lambda value: value >= 0,
    ("Trainer", "best_is"): lambda value: value in {"lowest", "highest"},
    ("Trainer", "data_resume"): lambda value: value in {"exact", "restart"},
    ("Trainer", "allow_changes"): is_names({"seed"}),
    ("Trainer", "init_from_skip"): is_names(),
    ("Trainer", "on_overflow"): lambda value: value in {"skip", "retry"},
    ("Trainer", "on_nonfinite_loss"): lambda value: value in {"skip", "raise"},
    ("Trainer", "on_stuck"): lambda value: value in {"raise", "float32"},
    ("Trainer", "max_overflow_records"): lambda value: value >= 0,
    ("Trainer", "verbose"): lambda value: isinstance(value, bool),
    ("Trainer", "profile_steps"): lambda value: len(value) == 2 and 1 <= value[0] <= value[1],
    ("Trainer", "callbacks"): is_list_of(trainer.Callback),
    ("Trainer", "actions"): is_list_of(trainer.Action),
    ("Trainer", "updates_per_step"): lambda value: all(each >= 1 for each in value.values()),
    ("Trainer", "class_weight"): lambda value: all(
        key >= 0 and 0 <= each < math.inf for key, each in value.items()
    ),
    ("Trainer", "loss_weights"): lambda value: {*value} <= {"a"},
    ("Clip", "global_clipnorm"): lambda value: value > 0,
    ("Clip", "clipnorm"): lambda value: value > 0,
    ("Clip", "clipvalue"): lambda value: value > 0,
    ("TrainState", "seed"): lambda value: 0 <= value < 2**63,
}


def is_scale_of_ones(value):
    """Whether a tensor of shape (4, 1) can be divided by a value: a positive number, or a tensor."""
    found = tensor_of(value)
    is_real = found is not None and (found.dtype.is_floating or found.dtype.is_integer)
    if not is_real or not tf.TensorShape([4, 1]).is_compatible_with(
        tf.broadcast_static_shape(found.shape, tf.TensorShape([4, 1]))
    ):
        return False
    return not isinstance(value, numbers.Real) or 0 < value < math.inf


def is_float_tensor(value):
    """Whether TensorFlow makes one tensor of floats of a value, as of ((2.0, 25),)."""
    return tensor_of(value).dtype.is_floating


def is_shape_of(*sizes):
    """Whether a value is a tensor of a shape, of any dtype."""
    return lambda value: tensor_of(value).shape.is_compatible_with(sizes)


def is_tuple_of_ints(least, most, number=None):
    """Whether a value is a tuple of so many ints within bounds."""
    return lambda value: (
        isinstance(value, tuple)
        and number in {None, len(value)}
        and all(is_of(each, int) and least <= each <= most for each in value)
    )


FORMATS = {"float8_e4m3fn", "float8_e5m2"}
OF_FLOAT8 = {
    ("dequantize", "dtype"): lambda value: value.is_floating and value.size > 1,
    ("BlockScaling", "block"): lambda value: bool(value) and is_tuple_of_ints(1, 2**20)(value),
    ("BlockScaling", "axes"): lambda value: (
        value is None or (is_tuple_of_ints(-8, 8, 2)(value) and value[0] != value[1])
    ),
    ("DelayedScaling", "history_length"): lambda value: 1 <= value <= 2**20,
    ("DelayedScaling", "algorithm"): lambda value: value in {"max", "most_recent"},
    ("BlockScaling.amax", "x"): lambda value: (
        is_float_tensor(value) and tensor_of(value).shape.rank >= 2
    ),
    ("BlockScaling.spread", "x"): lambda value: (
        tensor_of(value).shape.rank == 2
        and tensor_of(value).shape[0] == 4
        and 1 <= tensor_of(value).shape[1] <= 128
    ),
    ("BlockScaling.spread", "scale"): is_shape_of(4, 1),
    "scale": is_scale_of_ones,
    "margin": lambda value: -64 <= value <= 64,
    "amax": is_float_tensor,
    "shape": lambda value: is_tuple_of_ints(0, 2**20)(value) and math.prod(value) <= 2**20,
    "dtype": lambda value: value in FORMATS,
    **{
        (f"DelayedScaling.{method}", "amax"): lambda value: (
            is_float_tensor(value) and tensor_of(value).shape.rank == 0
        )
        for method in ("advance", "choose_scale")
    },
    **{
        (name, "x"): is_float_tensor
        for name in (
            *("CurrentScaling.amax", "DelayedScaling.amax"),
            *("quantize", "dequantize", "losses_of_cast"),
        )
    },
    **{
        (f"{name}.{method}", "state"): is_state(getattr(scaling.float8, f"{name}State"))
        for name in ("BlockScaling", "CurrentScaling", "DelayedScaling")
        for method in ("advance", "choose_scale")
    },
}
RANGES = {
    "initial_scale": lambda value: 2.0**-14 <= value <= 2.0**24 and is_scale(value),
    "growth_interval": is_count,
    "growth_factor": lambda value: is_scale(value) and value > 1,
    "backoff_factor": lambda value: is_scale(value) and value < 1,
    "min_scale": lambda value: is_scale(value) and value <= 2.0**15,
    "max_scale": lambda value: is_scale(value) and value >= 2.0**15,
    "hysteresis": is_count,
    "grace_steps": lambda value: 0 <= value <= 2**30,
    "low_scale_intervals": is_pairs,
    "tolerance": is_fraction,
    "loss_scale": is_scale,
    ("GradientStats.flushed", "factor"): is_scale,
    "headroom_bits": lambda value: 0 <= value <= 40,
    "max_layer_scale": lambda value: is_scale(value) and value >= 1,
    "max_total_scale": lambda value: is_scale(value) and value >= 1,
    "underflow_share": lambda value: 1e-12 <= value < 1,
    ("LayerwiseLossScale.total_scale", "gradient"): lambda value: (
        tensor_of(value) is not None and tensor_of(value).dtype.is_floating
    ),
    ("LayerwiseLossScale.total_scale", "inputs"): lambda value: tensor_of(value) is not None,
    ("LayerwiseLossScale.total_scale", "kernels"): lambda value: all(
        is_floats(each) and tensor_of(each) is not None and tensor_of(each).shape.rank >= 2
        for each in value
    ),
    ("LayerwiseLossScale.total_scale", "above"): lambda value: (
        tensor_of(value).shape.rank == 0 and (is_floats(value) or is_of(value, int))
    ),
    "mean_decay": is_fraction,
    "deviation_decay": is_fraction,
    "deviations": lambda value: 0 <= value <= 100,
    "rule": is_rule,
    ("convert_to_float8", "rule"): lambda value: (
        value is None or isinstance(value, scaling.float8.DelayedScaling)
    ),
    ("convert_to_float8", "layers"): callable,  # the valid call's model is too small for None
    ("convert_to_float8", "model"): lambda value: isinstance(value, keras.Model) and value.built,
    ("layerwise_gradients", "rule"): lambda value: isinstance(value, scaling.LayerwiseLossScale),
    "state": has_scale,
    "before": is_state(scaling.DynamicLossScaleState),
    "after": is_state(scaling.DynamicLossScaleState),
    ("LossScaler.load_state_dict", "state"): lambda _: False,
    **{(f"{name}.advance", "state"): is_state(kind) for name, kind in STATES.items()},
    ("LossScaler.assign", "state"): is_state(scaling.DynamicLossScaleState),
    "verdict": is_verdict,
    "grads_finite": is_flag,
    "cause": lambda value: value in list(scaling.Cause),
    "max_magnitude": lambda value: (
        value is not None and is_floats(value) and (tensor_of(value).shape.rank == 0)
    ),
    "verdicts": lambda value: len(value) == 1 and is_verdict(value[0]),
    "scalers": lambda value: (
        len(value) > 0 and all(isinstance(each, scaling.LossScaler) for each in value)
    ),
    "loss": lambda value: tensor_of(value) is not None and is_floats([tensor_of(value)]),
    "gradients": is_floats,
    "token": lambda _: False,
    ("Precision", "name"): lambda value: value in {"float32", "mixed_float16", "mixed_bfloat16"},
    "tree": is_tensors,
    "structure": is_tensors,
    "weights_finite": is_flag,
    "loss_finite": is_flag,
    "local_gradients_finite": is_flag,
    "summed_gradients_finite": is_flag,
    "unscaled_gradients_finite": is_flag,
    "at_min_scale": is_flag,
    "layers": is_chain,
    ("layerwise_gradients", "inputs"): lambda value: tensor_of(value) is not None,
    ("layerwise_gradients", "loss_fn"): callable,
    ("parse_rule", "text"): lambda value: (
        value.strip() in {"0.5", "1", "2.0", "1024", "dynamic", "pytorch"}
    ),
    ("agree", "flag"): is_flag,
    ("any_worker", "flag"): lambda value: (
        isinstance(value, bool | np.bool_) or (isinstance(value, tf.Tensor) and is_flag(value))
    ),
    ("check_divisible", "global_batch"): lambda value: value >= 4,
    ("check_divisible", "num_replicas"): lambda value: 1 <= value <= 2,
    ("plan_step", "num_microbatches"): lambda value: value >= 1,
    ("check_divisible", "num_microbatches"): lambda value: 1 <= value <= 2,
    ("create", "name"): lambda value: value in {"default", "mirrored", "one_device"},
    ("create", "devices"): bool,
    ("from_chief", "number"): lambda value: abs(value) < 2**63,
    ("split_cpu", "count"): lambda value: value == 4,
    ("sum_gradients", "gradients"): lambda value: all(
        leaf is not None and (leaf.dtype.is_floating or leaf.dtype.is_integer)
        for leaf in leaves(value)
    ),
    ("sum_gradients", "bucket_bytes"): lambda value: value >= 1,
    ("plan_step", "reduce_bucket_bytes"): lambda value: value >= 1,
    ("Trainer", "reduce_bucket_bytes"): lambda value: value >= 1,
    ("sum_gradients", "dtype"): lambda value: value in {"float16", "bfloat16"},
    ("plan_step", "reduce_dtype"): lambda value: value in {"float16", "bfloat16"},
    ("take", "share"): lambda value: isinstance(value, strategies.Share),
    ("take", "index"): is_index,
    ("take", "parts"): lambda value: is_of(value, int) and 1 <= value <= 2**30,
    ("whole", "batch"): lambda _: True,  # rows are compared where a batch is divided
    ("whole", "weights"): lambda value: is_floats([value]) and tensor_of(value).shape.rank > 0,
    **OF_FLOAT8,
    **TRAINER,
    ("preset", "name"): lambda value: value in {"pytorch", "flax", "keras3"},
    ("preset", "version"): lambda value: value in {None, "2.13"},
    ("recommend", "stats"): lambda value: isinstance(value, scaling.GradientStats),
    ("recommend", "names"): lambda value: value is None or len(value) == 1,
}


# Arguments for which the docstring says what becomes of every value.
ANYTHING = {("coalesce", "gradient")}  # all but tf.IndexedSlices is returned unchanged


def fits(place, value):
    """Whether an argument may have a value: by its annotation, and by its range."""
    hint = place.parameter.annotation
    keys = [key for key in ((place.name, place.argument), place.argument) if key in RANGES]
    if (place.name, place.argument) in ANYTHING:
        return True
    if isinstance(value, set | frozenset) and place.argument in {"allow_changes", "init_from_skip"}:
        value = tuple(value)  # any collection will do
    assert keys or hint is not typing.Any, f"{place} needs a line in RANGES"
    if value is None and is_of(value, hint) and not is_any(hint):
        return True  # None has a meaning of its own wherever the annotation names it
    try:
        return is_of(value, hint) and (not keys or bool(RANGES[keys[0]](value)))
    except Exception:  # noqa: BLE001  # a value that a range cannot even look at
        return False


def is_any(hint):
    """Whether every value has the type."""
    return hint is typing.Any or isinstance(hint, typing.TypeVar)


def is_of(value, hint):  # noqa: C901, PLR0911  # a line for each form of a type
    """Whether a value has a type, as an annotation writes it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_any(hint) or isinstance(hint, str | typing.ForwardRef):
        return True
    if origin in {typing.Union, types.UnionType}:
        return any(is_of(value, each) for each in inner)
    if origin is typing.Literal:
        return isinstance(value, str) and value in inner
    if hint in {float, int, bool, type(None), str}:
        return is_plain(value, hint)
    if hint is tf.Tensor:
        return tensor_of(value) is not None
    if hint is scaling.LossScaleRule:
        return is_rule(value)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is tuple:
        return isinstance(value, tuple) and (
            all(is_of(each, inner[0]) for each in value)
            if inner[-1:] == (...,)
            else len(value) == len(inner) and all(map(is_of, value, inner))
        )
    if origin is collections.abc.Mapping:
        return isinstance(value, collections.abc.Mapping) and all(
            is_of(key, inner[0]) and is_of(each, inner[1]) for key, each in value.items()
        )
    if origin is collections.abc.Sequence:
        return (
            (isinstance(value, collections.abc.Sequence | np.ndarray))
            and not isinstance(value, str | bytes | bytearray)
            and all(is_of(each, inner[0]) for each in value)
        )
    if hint.__name__ == "Path":
        return isinstance(value, os.PathLike)
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in inspect.get_annotations(hint) or {"loss_scale"})
    return isinstance(value, origin or hint)


def is_plain(value, hint):
    """Whether a value is a number, a bool, a string or None. Numbers of NumPy count, bools do not."""
    if hint is float or hint is int:
        kind = numbers.Real if hint is float else numbers.Integral
        finite = isinstance(value, kind) and not isinstance(value, bool | np.bool_)
        return finite and (hint is int or abs(as_float(value)) < math.inf)
    return isinstance(value, (bool, np.bool_) if hint is bool else hint)
