"""What `metrics` means: a function of a dict, or names and metrics as in Keras's `compile`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from scaling.base.argument_checks import did_you_mean, shown
from trainer.base.autograph import call_user
from trainer.fingerprint import entries, is_function, text_of
from trainer.losses.loss_fn import ignore_class_of, product
from trainer.losses.loss_shapes import LABELS_OF_LOSS, name_of
from trainer.losses.metric_shares import replicas_in_sync
from trainer.losses.output_losses import OutputLosses
from trainer.losses.output_metrics import (
    entries_by_name,
    key_of,
    metrics_by_output,
    shape_of_output,
)
from trainer.step.types import MetricsByName

# "accuracy" and "crossentropy" mean a class that depends on the labels, which the loss tells.
ACCURACY = {
    "binary": keras.metrics.BinaryAccuracy,
    "categorical": keras.metrics.CategoricalAccuracy,
    "sparse": keras.metrics.SparseCategoricalAccuracy,
}
CROSSENTROPY = {
    "binary": keras.metrics.BinaryCrossentropy,
    "categorical": keras.metrics.CategoricalCrossentropy,
    "sparse": keras.metrics.SparseCategoricalCrossentropy,
}
BY_LABELS = {
    "accuracy": ACCURACY,
    "acc": ACCURACY,
    "crossentropy": CROSSENTROPY,
    "ce": CROSSENTROPY,
}
FORM = (
    'Pass names and metrics as in Keras\'s compile, such as ["accuracy"], or a function that '
    'returns a dict, such as lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()}.'
)


def check_metrics(metrics: Any, loss_fn: Any) -> None:
    """Raises TypeError or ValueError unless `metrics` has a form that `make_metrics` accepts.

    Args:
        metrics: the argument of `Trainer`; None is no metrics.
        loss_fn: the resolved loss, or None.
    """
    if metrics is None or (callable(metrics) and not isinstance(metrics, keras.metrics.Metric)):
        return
    if not isinstance(metrics, (list, tuple, Mapping)):
        raise TypeError(
            "`metrics` must be a list or a dict of metrics, or a function that returns a dict; got "
            f"{type(metrics).__name__}. Training and evaluation each make their own metrics from "
            f"it. {FORM}"
        )
    if isinstance(loss_fn, OutputLosses):
        for key, entry in metrics_by_output(metrics, loss_fn).items():
            check_each(entry, loss_fn.losses.get(key))
    else:
        check_each(metrics.values() if isinstance(metrics, Mapping) else metrics, loss_fn)
        check_names(() if isinstance(metrics, Mapping) else metrics)


def check_each(metrics: Iterable[Any], loss_fn: Any) -> None:
    """Raises TypeError or ValueError unless these are names, objects or functions of metrics."""
    for each in metrics:
        if isinstance(each, str):
            class_named(each, loss_fn)
        elif not (isinstance(each, keras.metrics.Metric) or is_function(each)):
            found = getattr(each, "__name__", type(each).__name__)
            raise TypeError(
                "`metrics` must hold names and objects of keras.metrics, and functions; got "
                f"{found}. Anything else cannot be made anew for training and for evaluation. "
                f"{FORM}"
            )


def check_names(metrics: Iterable[Any]) -> None:
    """Raises ValueError if two metrics of a list have the same name."""
    names = [key_of(each) for each in metrics]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"`metrics` must have a name of its own for each metric; got {shown(repeated[0])} "
            "twice. The log has one number for each name. Pass an object with another name=."
        )


def make_metrics(
    metrics: Any, loss_fn: Any, model: Any, *, with_losses: bool = False
) -> dict[str, keras.metrics.Metric]:
    """Returns new metrics, keyed by name; what `metrics` returns if it is a function.

    Args:
        metrics: an argument that `check_metrics` has accepted.
        loss_fn: the resolved loss, or None.
        model: the model, which is built.
        with_losses: whether to add the mean of each output's loss, if there are several.

    Raises:
        ValueError: if the model's outputs do not fit the metrics.
    """
    if callable(metrics):
        return metrics()  # type: ignore[no-any-return]  # checked by `build_metrics`
    if isinstance(loss_fn, OutputLosses):
        entries = entries_by_name(metrics, loss_fn, model, with_losses=with_losses)
        return {
            name: keras.metrics.Mean(name=name)
            if each is None
            else made(each, name, loss_fn.losses.get(key), shape_of_output(model, key, loss_fn))
            for name, (key, each) in entries.items()
        }
    if metrics is None:
        return {}
    named = metrics.items() if isinstance(metrics, Mapping) else [(key_of(m), m) for m in metrics]
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    shape = outputs[0].shape if outputs and len(outputs) == 1 else None
    return {name: made(each, name, loss_fn, shape) for name, each in named}


def made(metric: Any, name: str, loss_fn: Any, shape: Any) -> keras.metrics.Metric:
    """Returns a new metric of the kind that a name, an object or a function stands for."""
    if isinstance(metric, keras.metrics.Metric):
        return copy_of(metric)
    if is_function(metric):
        return MeanOf(metric, name)
    make = class_named(metric, loss_fn)
    arguments: dict[str, Any] = {"name": name}
    if metric in BY_LABELS:
        check_output(metric, make, shape)
        from_logits = is_from_logits(loss_fn)
        if make is keras.metrics.BinaryAccuracy and from_logits:
            arguments["threshold"] = 0.0  # a logit of 0 is a probability of one half
        elif make in CROSSENTROPY.values():
            arguments["from_logits"] = from_logits
        ignored = ignore_class_of(loss_fn)
        if ignored is not None:
            return OF_CLASSES[make](ignored, **arguments)
    elif LABELS_OF_LOSS.get(name_of(loss_fn)) == "binary" and is_from_logits(loss_fn):
        arguments |= settings_for_logits(make)
    return make(**arguments)


def settings_for_logits(make: Callable[..., keras.metrics.Metric]) -> dict[str, Any]:
    """Returns the arguments with which a metric of probabilities takes binary logits instead."""
    known = inspect.signature(make).parameters
    if issubclass(cast("type", make), keras.metrics.FBetaScore):
        return {}  # it compares outputs with each other
    if "from_logits" in known:
        return {"from_logits": True}
    # A logit of 0 is a probability of one half.
    return dict.fromkeys({"threshold", "thresholds"} & known.keys(), 0.0)


class Ignoring(keras.metrics.MeanMetricWrapper):
    """A metric of class numbers that leaves out a class, as the loss does.

    Args:
        ignored: the number of the class.
        **arguments: those of the metric.
    """

    def __init__(self, ignored: int, **arguments: Any) -> None:
        """Stores the number."""
        super().__init__(**arguments)
        self.ignored = ignored

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Updates the metric with the labels that count."""
        labels = tf.convert_to_tensor(y_true)
        counted = labels != tf.cast(self.ignored, labels.dtype)
        weights = product(sample_weight, tf.cast(counted, tf.float32))
        known = tf.where(counted, labels, tf.zeros_like(labels))  # an ignored one may be no class
        return super().update_state(known, y_pred, sample_weight=weights)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        config: dict[str, Any] = super().get_config()
        return config | {"ignored": self.ignored}


class AccuracyIgnoring(Ignoring, keras.metrics.SparseCategoricalAccuracy):
    """The accuracy without a class."""


class CrossentropyIgnoring(Ignoring, keras.metrics.SparseCategoricalCrossentropy):
    """The cross entropy without a class."""


OF_CLASSES: dict[Any, Callable[..., keras.metrics.Metric]] = {
    keras.metrics.SparseCategoricalAccuracy: AccuracyIgnoring,
    keras.metrics.SparseCategoricalCrossentropy: CrossentropyIgnoring,
}


class MeanOf(keras.metrics.MeanMetricWrapper):
    """The mean of a function of labels and outputs, as `compile` takes of a function.

    Args:
        function: returns one number per example, or per element of an example.
        name: the name in the log.
    """

    def __init__(self, function: Callable[[Any, Any], tf.Tensor], name: str) -> None:
        """Stores the function."""
        super().__init__(self._values, name=name)
        self._function = function

    def _values(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """Returns what the function returns; raises ValueError for one number of several shares."""
        values = tf.convert_to_tensor(call_user(self._function, y_true, y_pred))
        if values.shape.rank == 0 and replicas_in_sync() > 1:
            raise ValueError(
                "`metrics` must hold functions that return one number per example on several "
                f"replicas; got {self.name!r}, which returns one number for a batch. Each replica "
                "sees only its share of a batch, and the mean over shares is another number than "
                "that of the batch. Return one number per example, or pass a metric that adds up "
                "what it needs, such as keras.metrics.RootMeanSquaredError()."
            )
        return values

    def get_config(self) -> dict[str, Any]:
        """Returns what `run.json` records: Keras would return the code of a lambda, in base64."""
        return {"name": self.name, "function": text_of(self._function)}


def copy_of(metric: keras.metrics.Metric) -> keras.metrics.Metric:
    """Returns a new metric with the configuration of another.

    Raises:
        ValueError: if that is not enough to make one that has the same settings.
    """
    kind = type(metric).__name__
    try:
        copy = type(metric).from_config(metric.get_config())
    except (TypeError, ValueError) as error:
        raise ValueError(not_described(f"{kind}, of which get_config() makes no other")) from error
    if names := other_settings(metric, copy):
        raise ValueError(not_described(f"{kind}, whose copy has another {', '.join(names)}"))
    return copy


def other_settings(metric: keras.metrics.Metric, copy: keras.metrics.Metric) -> list[str]:
    """Returns the names of attributes that differ, without what a first update fills in."""
    differing = {
        name: getattr(copy, name, None)
        for name, value in vars(metric).items()
        if is_setting(value) and entries("", getattr(copy, name, None)) != entries("", value)
    }
    if any("built" in name for name in differing):  # it was updated already
        differing = {
            name: value
            for name, value in differing.items()
            if value is not None and "built" not in name
        }
    return [name.lstrip("_") for name in differing]


def not_described(found: str) -> str:
    """Returns the error about a metric that cannot be copied."""
    return (
        f"`metrics` must hold metrics that get_config() describes; got {found}. Training and "
        "evaluation make a metric each from it. Return all settings in get_config(), or pass a "
        "function that returns a dict of new metrics."
    )


def is_setting(value: Any) -> bool:
    """Returns whether a value is a number, a text, None, a function, an array, or a container of
    such values.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(map(is_setting, value))
    kinds = bool, int, float, str, np.generic, np.ndarray, tf.Tensor
    return value is None or isinstance(value, kinds) or is_function(value)


def class_named(name: str, loss_fn: Any) -> Callable[..., keras.metrics.Metric]:
    """Returns the class of `keras.metrics` that a name stands for, given the loss.

    Raises:
        ValueError: if there is none, or if the loss does not tell which one.
    """
    if name in BY_LABELS:
        labels = LABELS_OF_LOSS.get(name_of(loss_fn)) if loss_fn is not None else None
        if labels is not None:
            fitting: Callable[..., keras.metrics.Metric] = BY_LABELS[name][labels]
            return fitting
        classes = [f"keras.metrics.{each.__name__}()" for each in BY_LABELS[name].values()]
        given = "no loss_fn" if loss_fn is None else f"loss_fn={name_of(loss_fn)}"
        raise ValueError(
            f"`metrics` must name a class instead of {name!r} unless loss_fn is a cross entropy of "
            f"Keras; got {given}. Which class fits depends on the labels, and a cross entropy "
            f"tells what they are. Pass [{classes[0]}] for labels of 0 or 1, [{classes[1]}] for "
            f"one-hot labels, or [{classes[2]}] for class numbers."
        )
    try:
        found = keras.metrics.get(name)
    except (TypeError, ValueError):
        found = None
    if isinstance(found, keras.metrics.Metric):
        return type(found)
    known = [*BY_LABELS, *vars(keras.metrics)]
    raise ValueError(
        "`metrics` must hold names of classes of keras.metrics that need no arguments; got "
        f"{shown(name)}. keras.metrics makes no such metric. "
        f"{did_you_mean(name, known, 'Pass an object instead.')}"
    )


def check_output(name: str, make: Any, shape: Any) -> None:
    """Raises ValueError if the shape of an output does not fit the class for "accuracy"."""
    if not (isinstance(shape, tuple) and shape and shape[-1] is not None):
        return
    binary = make in (ACCURACY["binary"], CROSSENTROPY["binary"])
    if binary != (shape[-1] == 1):
        raise ValueError(
            f"`metrics` must name a class instead of {name!r} for this model; got an output of "
            f"shape {shape} with a loss for {make.__name__}. Keras would choose another class by "
            f"the shape. Pass an object, such as [keras.metrics.{make.__name__}()]."
        )


def is_from_logits(loss_fn: Any) -> bool:
    """Returns whether a loss takes logits and not probabilities."""
    config = loss_fn.get_config() if isinstance(loss_fn, keras.losses.Loss) else {}
    return bool(config.get("from_logits", False))


def numbers_of(metrics: MetricsByName) -> dict[str, float]:
    """Returns the results of metrics. Waits for the device; see `results_of`."""
    return {name: float(result) for name, result in results_of(metrics).items()}


def results_of(metrics: MetricsByName) -> dict[str, tf.Tensor]:
    """Returns the results of metrics, each of shape ().

    Args:
        metrics: Keras metrics, keyed by name. A result may be a tensor or a variable, which has a
            copy for each replica.

    Raises:
        ValueError: if a result is not one number.
    """
    numbers = {}
    for name, metric in metrics.items():
        result = metric.result()
        value = None if isinstance(result, dict) else tf.convert_to_tensor(result)
        if value is None or value.shape.num_elements() != 1:
            found = "a dict" if value is None else f"shape {tuple(value.shape)}"
            raise ValueError(
                f"`metrics` must return one number each; got {found} from {name!r} "
                f"({type(metric).__name__}). The log and `best_metric` compare numbers. Choose an "
                "average, such as average='macro' of F1Score, or write one metric for each number."
            )
        numbers[name] = tf.reshape(value, [])
    return numbers
