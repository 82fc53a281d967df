"""`Losses`: what a loss returns, and the factors of losses."""

import dataclasses
from collections.abc import Mapping, Sequence

from trainer.base.fields import check_fields, choice
from trainer.step.gather import LOSS_REDUCTIONS


@dataclasses.dataclass(frozen=True)
class Losses:
    """What a loss returns, and the factors with which losses are added.

    Args:
        reduction: what `compute_loss` returns. "mean": one loss per example, of which the
            trainer takes the weighted mean over the global batch. "global": one number, a function
            of the whole global batch, for losses that compare examples with each other. On several
            replicas `compute_loss` then gets the other replicas' rows from `self.all_gather(x)`.
            With a `loss_fn`, the trainer gathers labels, outputs and weights itself. On one replica
            the tensors of a batch may have any shapes.
        weights: factors of the losses in a dict or list of losses, in the same structure. None, and
            a loss that a dict leaves out: 1. Keras calls them `loss_weights`.
        class_weight: factors of the losses of examples in training, keyed by class, as in `fit`;
            None, and classes that are left out: 1. Evaluations do not use them.

    Raises:
        ValueError: for an unknown reduction. `Trainer` checks the factors together with `loss_fn`.

    Example:
        >>> Losses(class_weight={0: 1.0, 1: 5.0}).reduction
        'mean'
    """

    reduction: str = choice("mean", LOSS_REDUCTIONS)
    weights: Mapping[str, float] | Sequence[float] | None = None
    class_weight: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
