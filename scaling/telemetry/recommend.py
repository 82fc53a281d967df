"""Recommends a loss scale for given gradients, and estimates what would underflow."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from scaling.base.number_formats import HALF_MAX, LARGEST_SCALE, SMALLEST_SCALE
from scaling.telemetry.stats import GradientStats, flushed_share


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recommended loss scale, and what float16 would flush to zero at that scale.

    `str` returns the recommendation as a text.

    Example:
        >>> advice = Recommendation(8192.0, {"conv1": 0.004}, "Reason.")
        >>> print(advice)
        2^13 would lose 0.40% of conv1. Reason.
    """

    loss_scale: float  # a power of two
    # Fraction of each variable's elements that would be flushed to zero, largest first;
    # variables that would lose nothing are left out.
    lost: dict[str, float]
    reason: str

    def __str__(self) -> str:
        """Returns the recommendation as one to three sentences."""
        losses = [f"{describe_share(share)} of {name}" for name, share in self.lost.items()]
        lost = ", ".join(losses[:5]) + (f" and {len(losses) - 5} more" if len(losses) > 5 else "")
        return f"2^{math.log2(self.loss_scale):.0f} would lose {lost or 'nothing'}. {self.reason}"


def recommend(
    stats: GradientStats, names: Sequence[str] | None = None, headroom_bits: int = 4
) -> Recommendation:
    """Returns the largest loss scale that leaves headroom above the largest gradient.

    If a gradient contains inf or NaN, returns half of the scale at which it was computed.
    Waits for the device.

    Args:
        stats: statistics of one step's gradients, preferably computed in float32 (see
            `gradient_stats`).
        names: one name per gradient, such as `[v.path for v in model.trainable_variables]`;
            with None, the gradients are numbered.
        headroom_bits: number of factors of two to leave between the largest gradient and
            65504; the default is that of `HeadroomLossScale`.

    Returns:
        The scale, and the fraction of each variable's elements that it would flush to zero.

    Raises:
        ValueError: if the numbers of names and gradients differ, or two names are the same.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(1.0).initial_state()
        >>> gradient = tf.constant([2.0**-5] * 3 + [2.0**-50])
        >>> print(recommend(scaling.gradient_stats([gradient], state), ["dense/kernel"]))
        2^16 would lose 25.00% of dense/kernel. The largest gradient, 0.03125 in dense/kernel, ...
    """
    variables = int(stats.max_magnitude.shape[0])
    names = [f"gradient {index}" for index in range(variables)] if names is None else names
    # What a gradient would lose is told under its name, and `name` is the same in many layers.
    if len(set(names)) < len(names) or len(names) != variables:
        raise ValueError(f"`names` must be {variables} different names; got {len(set(names))}")
    magnitudes = np.asarray(stats.max_magnitude)
    scale = float(stats.loss_scale)
    bad = int(np.sum(stats.inf_count) + np.sum(stats.nan_count))
    if bad:
        return advise(
            stats,
            names,
            scale / 2.0,
            f"At 2^{math.log2(scale):.0f}, {bad} elements were inf or NaN. Try at most half of "
            "that scale; a smaller one may not help if the model itself overflows.",
        )
    if not magnitudes.any():
        return Recommendation(
            min(scale * 2.0**20, LARGEST_SCALE),
            {},
            "Every gradient is zero: either float16 has flushed them, or they are truly zero. "
            "Try a scale that is 2^20 times as large.",
        )
    largest = int(np.argmax(magnitudes))
    largest_scale = HALF_MAX / 2.0**headroom_bits / float(magnitudes[largest])
    return advise(
        stats,
        names,
        2.0 ** math.floor(math.log2(largest_scale)),
        f"The largest gradient, {magnitudes[largest]:.4g} in {names[largest]}, stays at least "
        f"{headroom_bits} factors of two below the largest float16.",
    )


def advise(stats: GradientStats, names: Sequence[str], scale: float, reason: str) -> Recommendation:
    """Returns a recommendation of `scale`, clipped to the valid range, with what it would lose."""
    scale = min(max(scale, SMALLEST_SCALE), LARGEST_SCALE)
    shares = np.asarray(flushed_share(stats.counts, tf.constant(scale)))
    order = sorted(range(len(names)), key=lambda index: -shares[index])
    lost = {names[index]: float(shares[index]) for index in order if shares[index]}
    return Recommendation(scale, lost, reason)


def describe_share(share: float) -> str:
    """Returns a fraction as text, in percent.

    Example:
        >>> describe_share(0.004), describe_share(1e-6)
        ('0.40%', 'less than 0.01%')
    """
    return f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"
