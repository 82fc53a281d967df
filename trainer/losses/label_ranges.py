"""The labels that a loss of Keras can take, for `check_data=True`."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from trainer.data.value_checks import LabelRange
from trainer.losses.loss_fn import ignore_class_of
from trainer.losses.loss_shapes import LABELS_OF_LOSS, name_of
from trainer.losses.output_losses import OutputLosses


def label_ranges(loss_fn: Any, y: Any, outputs: Callable[[], Any]) -> list[LabelRange]:
    """Returns the ranges of a batch's labels, as far as they are known.

    Args:
        loss_fn: a loss as `Task` resolves it, or `OutputLosses`.
        y: the labels of a batch, in the structure that `loss_fn` takes.
        outputs: returns the model's outputs, or specs with their shapes. Called only if a range
            depends on them.
    """
    if isinstance(loss_fn, OutputLosses):
        losses: Mapping[Any, Any] = loss_fn.losses
        labels = loss_fn.by_key("labels", y, losses.keys())

        def output_of(key: Any) -> Any:
            return loss_fn.by_key("outputs", outputs(), losses.keys())[key]

        found = [(f"labels of {key!r}".replace("'", ""), key) for key in losses]
        ranges = [
            label_range(name, losses[key], labels[key], lambda key=key: output_of(key))  # type: ignore[misc]
            for name, key in found
        ]
    else:
        ranges = [label_range("labels", loss_fn, y, outputs)]
    return [each for each in ranges if each]


def label_range(
    name: str, loss_fn: Any, labels: Any, output: Callable[[], Any]
) -> LabelRange | None:
    """Returns the range of the labels of one loss; None if it is not known."""
    if isinstance(loss_fn, keras.losses.Loss) and type(loss_fn).__module__.split(".")[0] != "keras":
        return None  # a class of the user, whatever its name
    kind = LABELS_OF_LOSS.get(name_of(loss_fn))
    if kind in ("binary", "categorical"):
        return LabelRange(name, labels, 0, 1, None)
    classes = output().shape[-1] if kind == "sparse" else None
    if not classes:
        return None
    return LabelRange(name, labels, 0, classes - 1, ignore_class_of(loss_fn))
