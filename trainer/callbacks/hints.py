"""What to try after skipped steps: advice that fits the run, from its cause, settings and curve."""

from typing import NamedTuple

import numpy as np

import scaling
from trainer.log.summary import power_of_two
from trainer.step.report import StepReport

GROWTH = 100.0  # a gradient norm or a loss that grows by this factor is a sign of divergence
WINDOW = 1000  # number of latest applied steps that are looked at

DERIVATIVE = (
    "Look for a function with an infinite derivative at a finite value (a square root or a norm at "
    "0), and for an inf in the forward pass that leaves the loss finite (1 / inf is 0)."
)
HINTS = {
    scaling.Cause.WEIGHTS: (
        "The weights contained inf or NaN before the step began, so no later step can repair them. "
        "Continue from an earlier checkpoint, with a lower learning rate or with gradient clipping."
    ),
    scaling.Cause.FORWARD: (
        "{unscaled}. Check the data and the model for inf or NaN in the inputs, the logarithm of "
        "0, and a division by 0.{half}{xla}"
    ),
    scaling.Cause.BACKWARD: (
        "The loss was finite but its scaled gradients overflowed, even at the lowest loss scale "
        "that was tried. Look for a function with an infinite derivative at a finite value (a "
        "square root or a norm at 0), or allow a lower loss scale."
    ),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite but their sum was not, even at the lowest loss scale "
        "that was tried. The model is diverging: lower the learning rate, or allow a lower loss "
        "scale."
    ),
    scaling.Cause.UNSCALING: (
        "The gradients overflowed when they were divided by the loss scale, or their norm is "
        "beyond float32's range. The model is diverging: lower the learning rate, or clip the "
        "gradients."
    ),
    scaling.Cause.MODEL: (
        "The gradients are not finite even at the lowest loss scale allowed. {derivative}{half}"
    ),
}

# Hints for rules whose scale never moves; {scale} is the loss scale.
FIXED_HINTS = {
    scaling.Cause.BACKWARD: (
        "The loss was finite but its gradients were not, at a fixed loss scale of {scale}. "
        "{derivative} If the gradients overflow because of the scale, pass a lower loss_scale, or "
        'loss_scale="dynamic".'
    ),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite but their sum was not, at a fixed loss scale of "
        "{scale}. The model is diverging: lower the learning rate, or pass a lower loss_scale."
    ),
}
UNSCALED_HINTS = {
    scaling.Cause.BACKWARD: ("The loss was finite but its gradients were not. {derivative}{half}"),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite but their sum was not. The model is diverging: lower "
        "the learning rate."
    ),
    scaling.Cause.UNSCALING: (
        "The norm of the gradients is beyond float32's range. The model is diverging: lower the "
        "learning rate, or clip the gradients."
    ),
}
# Sentences for runs that compute in half precision; {dtype} is the compute dtype.
HALF_HINTS = {
    scaling.Cause.FORWARD: (
        " In {dtype}, activations above {largest} are inf too: compute such layers with "
        'dtype="float32".'
    ),
    scaling.Cause.MODEL: ' Compute that layer with dtype="float32", or allow a lower loss scale.',
    scaling.Cause.BACKWARD: (
        " In {dtype} the gradients may also overflow: compute that layer with "
        'dtype="float32", or pass loss_scale="dynamic", which can go below 1.'
    ),
}
XLA_HINT = (
    " Under XLA, a label outside the model's classes gives a NaN loss where TensorFlow would raise "
    "an error."
)
LARGEST = {"float16": "65504", "bfloat16": "3.4e38"}


class Curve:
    """The losses and the gradient norms of the latest applied steps."""

    def __init__(self) -> None:
        """Begins with no steps."""
        self._applied = np.zeros([0, 3])  # a row of (step, loss, gradient norm) for each step

    def add(self, steps: StepReport) -> None:
        """Adds the latest reports, whose fields are NumPy arrays of shape (steps,)."""
        new = np.stack([steps.step, steps.loss, steps.gradient_norm], axis=1)
        new = new[np.asarray(steps.grads_finite, bool)].astype(np.float64)
        self._applied = np.concatenate([self._applied, new])[-WINDOW:]

    @property
    def last(self) -> int | None:
        """The last applied step, or None."""
        return int(self._applied[-1, 0]) if len(self._applied) else None

    def growth(self) -> str:
        """Returns in words how the gradient norm or the loss has grown at the end, or "".

        Example:
            >>> curve = Curve()
            >>> curve._applied = np.array([[1, 2.0, 4.0], [2, 3.0, 5.0], [3, 1e13, 3e13]])
            >>> curve.growth()
            'the gradient norm grew from 5 at step 2 to 3e+13 at step 3'
        """
        for name, column in (("gradient norm", 2), ("loss", 1)):
            values = self._applied[:, column]
            if len(values) < 2 or not np.median(values[:-1]) > 0:
                continue
            usual = np.median(values[:-1])
            if values[-1] >= GROWTH * usual:
                # Where the growth began: the last step at which nothing was unusual.
                begin = np.flatnonzero(values <= 10 * usual)[-1]
                at = [
                    f"{values[row]:.3g} at step {self._applied[row, 0]:.0f}" for row in (begin, -1)
                ]
                return f"the {name} grew from {at[0]} to {at[1]}"
        return ""


class RunFacts(NamedTuple):
    """What advice depends on."""

    rule: object = None  # the loss-scale rule; None for any rule whose scale moves
    compute_dtype: str = "float32"
    xla: bool = False  # whether XLA compiles the forward pass
    learning_rates: str = ""  # the learning rate or rates, as text; "" if unknown
    curve: Curve | None = None


def hint_for(cause: scaling.Cause, facts: RunFacts, skips: int = 1) -> str:
    """Returns what to try after skips of a cause.

    A run whose gradients or losses grew before is told so. Otherwise the advice names only what the
    run uses: its own precision, a lower loss scale only if there can be one, and XLA only if it
    compiles.

    Args:
        cause: the cause of the last skip.
        facts: what the run uses.
        skips: number of skipped steps in a row.
    """
    growth = facts.curve.growth() if facts.curve else ""
    rates = facts.learning_rates
    if growth:
        kept = "No later step can repair the weights. " if cause is scaling.Cause.WEIGHTS else ""
        rate = f" at a learning rate of {rates}" if rates else ""
        return (
            f"The run diverged{rate}: {growth}. {kept}Lower the learning rate, warm it up, or clip "
            "the gradients, for example with global_clipnorm=1.0."
        )
    hint = template_for(cause, facts.rule)
    half = HALF_HINTS.get(cause, "") if facts.compute_dtype in LARGEST else ""
    half = half.format(dtype=facts.compute_dtype, largest=LARGEST.get(facts.compute_dtype))
    unscaled = "The loss was not finite"
    if not isinstance(facts.rule, scaling.NoLossScale):
        unscaled += " before it was scaled, so no loss scale can help"
    text = hint.format(
        unscaled=unscaled,
        half=half,
        xla=XLA_HINT if facts.xla else "",
        derivative=DERIVATIVE,
        scale=power_of_two(getattr(facts.rule, "loss_scale", 1.0)),
    )
    if cause is scaling.Cause.FORWARD and skips > 1 and facts.curve and facts.curve.last and rates:
        text += (
            f" Every loss has been inf or NaN since the update of step {facts.curve.last}: if the "
            f"data is sound, the learning rate of {rates} is too high."
        )
    return text


def template_for(cause: scaling.Cause, rule: object) -> str:
    """Returns the hint for a cause, which advises a lower scale only if the rule can have one."""
    if isinstance(rule, scaling.NoLossScale):
        return UNSCALED_HINTS.get(cause, HINTS[cause])
    if isinstance(rule, scaling.FixedLossScale):
        return FIXED_HINTS.get(cause, HINTS[cause])
    return HINTS[cause]
