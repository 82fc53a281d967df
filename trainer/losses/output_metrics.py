"""Metrics of each of several outputs, and each output's loss: `compile(metrics={"a": ["mae"]})`."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from scaling.base.argument_checks import did_you_mean, shown
from trainer.fingerprint import is_function
from trainer.losses.loss_fn import example_losses
from trainer.losses.loss_shapes import name_of
from trainer.losses.metric_shapes import check_metric_shapes, weights_for
from trainer.losses.metric_shares import update_share
from trainer.losses.output_losses import Key, OutputLosses

FORM = (
    'Pass metrics={"a": ["mae"]} if loss_fn is a dict, or a list with a list of metrics for each '
    "output if it is a list; or override build_metrics and update_metrics(batch, outputs)."
)


def metrics_by_output(metrics: Any, losses: OutputLosses) -> dict[Key, list[Any]]:
    """Returns the metrics of each output, as they were given.

    Args:
        metrics: a dict of output names, or a list with an entry for each output; an entry is a
            metric, its name, or a list of these. None is no metrics.
        losses: the losses of the outputs.

    Raises:
        ValueError: if `metrics` has another structure than `loss_fn`.
    """
    if not metrics:
        return {}
    if losses.count is None:
        found = dict(metrics) if isinstance(metrics, Mapping) else None
    else:
        in_order = isinstance(metrics, (list, tuple)) and len(metrics) == losses.count
        found = dict(enumerate(metrics)) if in_order else None
    if found is None:
        of = "a dict" if losses.count is None else f"a list of {losses.count}"
        size = "" if isinstance(metrics, Mapping) or callable(metrics) else f" of {len(metrics)}"
        raise ValueError(
            f"`metrics` must have the structure of `loss_fn`, which is {of}; got "
            f"{type(metrics).__name__}{size}. Each metric takes one output and its labels. {FORM}"
        )
    return {key: entry_of(each) for key, each in found.items()}


def entry_of(metrics: Any) -> list[Any]:
    """Returns the metrics of one output in a list."""
    if metrics is None:
        return []
    return list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]


def outputs_of(model: Any) -> Any:
    """Returns the symbolic outputs of a functional model in their structure, or None."""
    return getattr(model, "output", None) if isinstance(model, keras.Model) else None


def check_output_names(keys: Iterable[Key], names: Iterable[Key]) -> None:
    """Raises ValueError if a dict of metrics names an output that the model does not have.

    Args:
        keys: the keys of the metrics.
        names: the names or places of the model's outputs; none if they are not known.
    """
    known = sorted(map(str, names))
    for key in keys:
        if known and str(key) not in known:
            raise ValueError(
                f"`metrics` must have names of outputs as keys; got {shown(key)}, and the model's "
                f"outputs are {', '.join(map(repr, known))}. Each metric takes one output and its "
                f"labels. {did_you_mean(str(key), known, 'Use the names of the outputs.')}"
            )


def shape_of_output(model: Any, key: Key, losses: OutputLosses) -> Any:
    """Returns the static shape of a functional model's output, or None if it is not known."""
    outputs = losses.found_in(outputs_of(model)) or {}
    return getattr(outputs.get(key), "shape", None)


def prefix_of(model: Any, key: Key) -> str:
    """Returns what an output is called in the log: its key, or in a list its name in the model."""
    if isinstance(key, str):
        return key
    names = getattr(model, "output_names", None)
    return str(names[key]) if names and key < len(names) else f"output_{key}"


def entries_by_name(
    metrics: Any, losses: OutputLosses, model: Any, *, with_losses: bool
) -> dict[str, tuple[Key, Any]]:
    """Returns the key of the output and the metric behind each name in the log, as Keras names it.

    Args:
        metrics: an argument that `metrics_by_output` accepts.
        losses: the losses of the outputs.
        model: the model, which is built.
        with_losses: whether to add the mean of each output's loss, with None as its metric, if
            there are several.

    Raises:
        ValueError: if a metric is for an output that the model does not have, or if two of them
            have the same name.
    """
    given = metrics_by_output(metrics, losses)
    outputs = outputs_of(model)
    check_output_names(given, () if outputs is None else losses.found_in(outputs) or ())
    found: dict[str, tuple[Key, Any]] = {}
    if with_losses and len(losses.losses) > 1:
        found = {f"{prefix_of(model, key)}_loss": (key, None) for key in losses.losses}
    for key, entry in given.items():
        for metric in entry:
            name = f"{prefix_of(model, key)}_{key_of(metric)}"
            if name in found:
                raise ValueError(
                    f"`metrics` must have a name of its own for each metric; got {shown(name)} "
                    "twice. A metric of one of several outputs is logged as OUTPUT_METRIC, and the "
                    "output's loss as OUTPUT_loss. Pass an object with another name=."
                )
            found[name] = key, metric
    return found


def key_of(metric: Any) -> str:
    """Returns the name under which a metric in a list is logged, as in Keras."""
    if isinstance(metric, str):
        return metric
    return name_of(metric).strip("<>") if is_function(metric) else str(metric.name)


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
        if metric is None:
            found = example_losses(losses.losses[key], labels[key], values[key])
            weight = tf.ones_like(found)
            if sample_weight is not None:
                weight = tf.cast(tf.reshape(sample_weight, tf.shape(found)), found.dtype)
            # As in the loss, the sign counts, and an example without weight adds nothing.
            found = tf.math.multiply_no_nan(found, tf.sign(weight))
            metrics[name].update_state(found, sample_weight=tf.abs(weight))
        else:
            check_metric_shapes(metrics[name], labels[key], values[key])
            weights = weights_for(metrics[name], labels[key], sample_weight)
            update_share(metrics[name], labels[key], values[key], sample_weight=weights)
