"""What `metrics` means, as in Keras's `compile`, and how a share of a batch updates them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from scaling.base.argument_checks import did_you_mean, shown
from strategies.division import count_examples
from trainer.base.autograph import call_user
from trainer.base.warn_once import warn_once
from trainer.fingerprint import entries, is_function, text_of
from trainer.losses.loss_fn import (
    example_losses,
    ignore_class_of,
    product,
    without_last_ones,
)
from trainer.losses.outputs import (
    Key,
    OutputLosses,
    entries_by_name,
    key_of,
)
from trainer.losses.shapes import (
    ELEMENTWISE_METRICS,
    LABELS_OF_LOSS,
    name_of,
    would_repeat,
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


def make_metrics(
    metrics: Any, loss_fn: Any, model: Any, *, with_losses: bool = False
) -> dict[str, keras.metrics.Metric]:
    """Returns new metrics, keyed by name; what `metrics` returns if it is a function.

    Args:
        metrics: the argument of `Trainer`; None is no metrics.
        loss_fn: the resolved loss, or None.
        model: the model, which is built.
        with_losses: whether to add the mean of each output's loss, if there are several.

    Raises:
        ValueError: for names that stand for no metric or that are not unique, and if the model's
            outputs do not fit the metrics.
    """
    if callable(metrics):
        return metrics()  # type: ignore[no-any-return]  # checked by `build_metrics`
    if isinstance(loss_fn, OutputLosses):
        entries = entries_by_name(metrics, loss_fn, model, with_losses=with_losses)
        by_key = loss_fn.found_in(getattr(model, "output", None)) or {}
        shapes = {key: getattr(output, "shape", None) for key, output in by_key.items()}
        return {
            name: keras.metrics.Mean(name=name)
            if each is None
            else made(each, name, loss_fn.losses.get(key), shapes.get(key))
            for name, (key, each) in entries.items()
        }
    if metrics is None:
        return {}
    named = metrics.items() if isinstance(metrics, Mapping) else [(key_of(m), m) for m in metrics]
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    shape = outputs[0].shape if outputs and len(outputs) == 1 else None
    found: dict[str, keras.metrics.Metric] = {}
    for name, each in named:
        if name in found:
            raise ValueError(f"`metrics` must have a name each; got {shown(name)} twice")
        found[name] = made(each, name, loss_fn, shape)
    return found


def made(metric: Any, name: str, loss_fn: Any, shape: Any) -> keras.metrics.Metric:
    """Returns a new metric of the kind that a name, an object or a function stands for."""
    if isinstance(metric, keras.metrics.Metric):
        return copy_of(metric)
    if is_function(metric):
        return MeanOf(metric, name)
    make = class_named(metric, loss_fn)
    arguments: dict[str, Any] = {"name": name}
    if metric in BY_LABELS:
        binary = make in (ACCURACY["binary"], CROSSENTROPY["binary"])
        if shape and shape[-1] is not None and binary != (shape[-1] == 1):
            raise ValueError(
                f"`metrics` must hold a class for {metric!r} with this model; got an output of "
                f"shape {shape} for {make.__name__}"
            )
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
            # The mean over shares is another number than that of the batch.
            raise ValueError(
                "`metrics` must return one number per example on several replicas; got one for a "
                f"batch from {self.name!r}"
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
    copy = type(metric).from_config(metric.get_config())
    if names := other_settings(metric, copy):
        raise ValueError(
            f"`metrics` must hold metrics that get_config() describes; got "
            f"{type(metric).__name__} without {', '.join(names)}"
        )
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
        raise ValueError(
            f"`metrics` must hold a class for {name!r} unless loss_fn is a cross entropy of Keras, "
            "which tells what the labels are"
        )
    try:
        found = keras.metrics.get(name)
    except (TypeError, ValueError):
        found = None
    if isinstance(found, keras.metrics.Metric):
        return type(found)
    known = [*BY_LABELS, *vars(keras.metrics)]
    raise ValueError(
        f"`metrics` must hold names in keras.metrics; got {shown(name)}. "
        f"{did_you_mean(name, known, 'Pass an object.')}"
    )


def is_from_logits(loss_fn: Any) -> bool:
    """Returns whether a loss takes logits and not probabilities."""
    config = loss_fn.get_config() if isinstance(loss_fn, keras.losses.Loss) else {}
    return bool(config.get("from_logits", False))


def update_metric(
    metric: keras.metrics.Metric,
    y: Any,
    outputs: Any,
    sample_weight: tf.Tensor | None,
    mask: tf.Tensor | None = None,
) -> None:
    """Updates a metric with a replica's share of a batch, which may be empty.

    Keras's metrics add nothing for no examples. A metric or function of the user's may divide by
    their number, so it is not called.

    Args:
        metric: the metric.
        y: the labels.
        outputs: the outputs.
        sample_weight: as for `weights_for`.
        mask: as for `weights_for`.

    Raises:
        ValueError: if one of Keras's metrics would broadcast labels or outputs.
    """
    if type(metric) in ELEMENTWISE_METRICS and would_repeat(y, outputs):
        raise ValueError(
            "`metrics` must compare labels and outputs of one shape; got "
            f"{y.shape} and {outputs.shape} for {type(metric).__name__}"
        )
    weights = weights_for(metric, y, sample_weight, mask)
    if replicas_in_sync() == 1 or is_of_keras(type(metric)):
        call_user(metric.update_state, y, outputs, sample_weight=weights)
        return
    if not (is_of_keras(type(metric).update_state) or isinstance(metric, Ignoring)):
        warn_once(
            f"The variables of the metric {metric.name!r} are added up over replicas: right for "
            "sums and counts alone. Keep sums in the metric, and divide in result()."
        )

    def update() -> bool:
        call_user(metric.update_state, y, outputs, sample_weight=weights)
        return True

    tf.cond(count_examples(y) > 0, update, lambda: False)


def update_by_output(
    metrics: Mapping[str, keras.metrics.Metric],
    entries: Mapping[str, tuple[Key, Any]],
    losses: OutputLosses,
    y: Any,
    outputs: Any,
    sample_weight: tf.Tensor | None,
) -> None:
    """Updates the metrics of each output with its labels and its values.

    Args:
        metrics: the metrics, keyed by name.
        entries: what `entries_by_name` returned.
        losses: the losses of the outputs.
        y: the labels, in the structure of the losses.
        outputs: the model's outputs, in the structure of the losses.
        sample_weight: shape (examples,), or None.

    Raises:
        ValueError: if an output that has metrics is missing among the labels or the outputs.
    """
    keys = {key for key, _ in entries.values()}
    labels = losses.by_key("labels", y, keys, "metrics")
    values = losses.by_key("outputs", outputs, keys, "metrics")
    for name, (key, metric) in entries.items():
        if metric is not None:
            update_metric(metrics[name], labels[key], values[key], sample_weight)
            continue
        found = example_losses(losses.losses[key], labels[key], values[key])
        weight = tf.ones_like(found)
        if sample_weight is not None:
            weight = tf.cast(tf.reshape(sample_weight, tf.shape(found)), found.dtype)
        # As in the loss, the sign counts, and an example without weight adds nothing.
        found = tf.math.multiply_no_nan(found, tf.sign(weight))
        metrics[name].update_state(found, sample_weight=tf.abs(weight))


def is_of_keras(item: Any) -> bool:
    """Returns whether Keras defines a class or a function."""
    return str(item.__module__).partition(".")[0] == "keras"


def replicas_in_sync() -> int:
    """Returns the number of replicas that take this step together; 1 outside of a replica."""
    context = tf.distribute.get_replica_context()
    return int(context.num_replicas_in_sync) if context else 1


def weights_for(
    metric: keras.metrics.Metric,
    y: Any,
    sample_weight: tf.Tensor | None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor | None:
    """Returns the weights that a metric takes.

    Keras's metrics that are means multiply them by the Keras mask of the outputs themselves, and
    all others of Keras ignore it. Keras's IoU metrics want a weight for each label, and those of
    `FBetaScore` must have one dimension.

    Args:
        metric: the metric.
        y: the labels.
        sample_weight: shape (examples, ...), or None.
        mask: the mask of the outputs: shape (examples, ...), bool; or None.

    Raises:
        ValueError: if the metric would change the weights.
    """
    if sample_weight is not None:
        if sample_weight.dtype.is_floating:
            if counts_integers(metric):  # which makes 0 of a weight of 0.9
                raise ValueError(
                    f"`metrics` must keep weights: {metric.name!r} needs dtype='float32'"
                )
        else:
            sample_weight = tf.cast(sample_weight, tf.int32)  # tf.abs takes no bools
        sample_weight = tf.abs(sample_weight)  # with signs, an accuracy could be any number
    ignores_mask = is_of_keras(type(metric)) and not isinstance(
        metric, keras.metrics.MeanMetricWrapper
    )
    if mask is not None and ignores_mask:
        if sample_weight is None:
            sample_weight = tf.cast(mask, tf.int32 if counts_integers(metric) else tf.float32)
        else:
            sample_weight = product(sample_weight, tf.cast(mask, sample_weight.dtype))
    if sample_weight is None:
        return None
    if isinstance(metric, keras.metrics.IoU):
        labels = y if metric.sparse_y_true else tf.argmax(y, axis=metric.axis)
        ones = tf.ones_like(labels, sample_weight.dtype)
        return product(without_last_ones(sample_weight), ones)
    if isinstance(metric, keras.metrics.FBetaScore):
        weights = without_last_ones(sample_weight)
        if weights.shape.rank not in (1, None):  # it would multiply all examples by all weights
            raise ValueError(
                f"`metrics` must take the weights of the data; got shape {weights.shape} for "
                f"{metric.name!r}, which takes one for each example"
            )
        return weights
    return sample_weight


def counts_integers(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric is one of Keras's IoU metrics without a floating-point dtype."""
    return isinstance(metric, keras.metrics.IoU) and tf.as_dtype(metric.dtype).is_integer


def numbers_of(metrics: MetricsByName) -> dict[str, float]:
    """Returns the results of metrics. Waits for the device; see `results_of`."""
    return {name: float(result) for name, result in results_of(metrics).items()}


def results_of(metrics: MetricsByName) -> dict[str, tf.Tensor]:
    """Returns the results of metrics, each of shape ().

    Args:
        metrics: Keras metrics, keyed by name. A result may be a tensor or a variable, which has a
            copy for each replica.
    """
    return {
        name: tf.reshape(tf.convert_to_tensor(metric.result()), [])
        for name, metric in metrics.items()
    }
