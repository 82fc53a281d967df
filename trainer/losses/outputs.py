"""A loss for each of several outputs, with weights and metrics, as in Keras's `compile`.

compile(loss={...}, loss_weights={...}, metrics={"a": ["mae"]})
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from scaling.base.argument_checks import shown
from strategies.division import shapes_in
from trainer.base.autograph import without_autograph
from trainer.fingerprint import is_function
from trainer.losses.loss_fn import LossFunction, example_losses, ignore_class_of
from trainer.losses.shapes import name_of

Key: TypeAlias = str | int  # the name of an output in a dict, or its place in a list


@dataclasses.dataclass(frozen=True)
class OutputLosses:
    """The weighted sum of one loss per output, which is one loss per example.

    Attributes:
        losses: the loss of each output that has one.
        weights: the factor of each of these losses.
        count: number of outputs if the losses are in a list; None if they are in a dict.
        names: the names of the model's outputs in their order, if it tells them; see
            `with_output_names`.

    Example:
        >>> import keras
        >>> losses = {name: keras.losses.get(name) for name in ("mse", "mae")}
        >>> both = OutputLosses(losses, {"mse": 1.0, "mae": 3.0})
        >>> outputs = {"mse": tf.constant([[2.0]]), "mae": tf.constant([[5.0]])}
        >>> both({"mse": tf.constant([[0.0]]), "mae": tf.constant([[4.0]])}, outputs).numpy()
        array([7.], dtype=float32)
    """

    losses: Mapping[Key, LossFunction]
    weights: Mapping[Key, float]
    count: int | None = None
    names: tuple[str, ...] = ()

    @without_autograph
    def __call__(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """Returns the sum: shape (examples,), float32.

        Args:
            y_true: the labels, in the structure of the losses.
            y_pred: the model's outputs, in the structure of the losses.
        """
        labels = self.by_key("labels", y_true, self.losses.keys())
        outputs = self.by_key("outputs", y_pred, self.losses.keys())
        terms = []
        for key, loss in self.losses.items():
            losses = example_losses(loss, labels[key], outputs[key])
            terms.append(self.weights[key] * tf.cast(losses, tf.float32))
        return tf.add_n(terms)

    def by_key(
        self, what: str, values: Any, keys: Collection[Key], argument: str = "loss_fn"
    ) -> Mapping[Key, Any]:
        """Returns labels or outputs by key.

        Args:
            what: "labels" or "outputs", for the error.
            values: the labels or outputs.
            keys: the keys that must be there.
            argument: the argument that has these keys, for the error.

        Raises:
            ValueError: if one is missing.
        """
        found = self.found_in(values)
        if found is not None and set(keys) <= found.keys():
            return found
        raise ValueError(
            f"`{argument}` must have the structure of the {what}; got {sorted(map(str, keys))} and "
            f"{shapes_in(values)} as {what}"
        )

    def found_in(self, values: Any) -> Mapping[Key, Any] | None:
        """Returns labels or outputs by key, or None if they have another structure.

        As in `fit`, a dict and a list stand for each other if the model names its outputs, and a
        single tensor for a list of one.
        """
        if isinstance(values, Mapping):
            if self.count is None:
                return dict(values)
            if set(values) != set(self.names):
                return None
            values = [values[name] for name in self.names]
        in_order = values if isinstance(values, (list, tuple)) else [values]
        keys: Sequence[Key] = self.names if self.count is None else range(self.count)
        return dict(zip(keys, in_order, strict=True)) if len(in_order) == len(keys) else None


def with_output_names(loss_fn: Any, model: Any) -> Any:
    """Returns a resolved loss; one for each of several outputs learns the names of the outputs."""
    if not isinstance(loss_fn, OutputLosses):
        return loss_fn
    return dataclasses.replace(loss_fn, names=output_names(model))


def output_names(model: Any) -> tuple[str, ...]:
    """Returns the names of a functional model's outputs in their order, as `fit` knows them.

    A dict of several outputs has no order, and two outputs of one layer have one name. Other models
    do not tell their outputs.

    Example:
        >>> import keras
        >>> x = keras.Input([2])
        >>> a, b = (keras.layers.Dense(1, name=name)(x) for name in "ab")
        >>> output_names(keras.Model(x, [b, a])), output_names(keras.Model(x, {"first": b}))
        (('b', 'a'), ('first',))
    """
    try:
        outputs, names = model.output, model.output_names
    except AttributeError:  # a Sequential, a subclassed model, or one that has not been called
        return ()
    if isinstance(outputs, Mapping):
        return tuple(map(str, outputs)) if len(outputs) == 1 else ()
    return tuple(names) if len(set(names)) == len(names) else ()


def only_one(values: Any) -> Any:
    """Returns the tensor of a list or dict of one; returns anything else unchanged."""
    if isinstance(values, (Mapping, list, tuple)) and len(values) == 1:
        [value] = values.values() if isinstance(values, Mapping) else values
        return only_one(value)
    return values


def is_several(loss_fn: object) -> bool:
    """Returns whether an argument `loss_fn` names a loss for each output."""
    return isinstance(loss_fn, (Mapping, list, tuple))


def resolve_output_losses(
    loss_fn: Any, loss_weights: Any, reduction: str, resolve: Callable[[Any], Any]
) -> OutputLosses:
    """Returns the losses of several outputs as one function.

    Args:
        loss_fn: the losses, in a dict or a list; None for an output without one.
        loss_weights: a dict or a list of factors, or None for 1.
        reduction: must be "mean".
        resolve: turns the argument for one output into a loss.

    Raises:
        TypeError, ValueError: for losses or weights that cannot be used.
    """
    if reduction != "mean":
        raise ValueError(f"`loss_fn` must be one loss with reduction={reduction!r}")
    keyed = dict(loss_fn if isinstance(loss_fn, Mapping) else enumerate(loss_fn))
    losses = {key: resolve(each) for key, each in keyed.items() if each is not None}
    for key, loss in losses.items():
        if ignore_class_of(loss) is not None:
            # The outputs would be averaged over different numbers of labels.
            raise ValueError(
                f"`loss_fn` must ignore no class of one of several outputs; got {key!r}"
            )
    count = None if isinstance(loss_fn, Mapping) else len(keyed)
    return OutputLosses(losses, weights_by_key(loss_fn, loss_weights, losses), count)


def weights_by_key(
    loss_fn: Any, loss_weights: Any, losses: Mapping[Key, LossFunction]
) -> dict[Key, float]:
    """Returns the factor of each loss; raises TypeError or ValueError for other weights."""
    if loss_weights is None:
        return dict.fromkeys(losses, 1.0)
    if isinstance(loss_fn, Mapping):
        fits = isinstance(loss_weights, Mapping) and loss_weights.keys() <= losses.keys()
        given = dict(loss_weights) if fits else {}
    else:
        fits = isinstance(loss_weights, (list, tuple)) and len(loss_weights) == len(loss_fn)
        given = dict(enumerate(loss_weights)) if fits else {}
    if not fits:
        raise ValueError(
            f"`weights` must have the structure of `loss_fn`; got {shown(loss_weights)}"
        )
    return {key: float(given.get(key, 1.0)) for key in losses}


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
        raise ValueError(
            f"`metrics` must have the structure of `loss_fn`; got {type(metrics).__name__}"
        )
    in_lists = {
        key: list(each) if isinstance(each, (list, tuple)) else [each]
        for key, each in found.items()
    }
    return {key: [one for one in each if one is not None] for key, each in in_lists.items()}


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
        ValueError: if two metrics have the same name.
    """
    given = metrics_by_output(metrics, losses)
    found: dict[str, tuple[Key, Any]] = {}
    if with_losses and len(losses.losses) > 1:
        found = {f"{prefix_of(model, key)}_loss": (key, None) for key in losses.losses}
    for key, entry in given.items():
        for metric in entry:
            name = f"{prefix_of(model, key)}_{key_of(metric)}"
            if name in found:
                raise ValueError(f"`metrics` must have a name each; got {shown(name)} twice")
            found[name] = key, metric
    return found


def key_of(metric: Any) -> str:
    """Returns the name under which a metric in a list is logged, as in Keras."""
    if isinstance(metric, str):
        return metric
    named = is_function(metric) or isinstance(metric, type)
    return name_of(metric).strip("<>") if named else str(metric.name)
