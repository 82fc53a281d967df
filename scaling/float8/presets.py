"""Rules that move exactly as those of other systems."""

from typing import Any

from scaling.base.argument_checks import shown
from scaling.float8.delayed import DelayedScaling

PRESETS: dict[str, dict[str, Any]] = {
    # `keras.layers.Dense.quantize("float8")` of Keras 3.15, and `EinsumDense`.
    "keras3": {
        "power_of_two": False,
        "includes_newest": False,
        "keeps_nonfinite": True,
        "fast_reciprocal": True,
    },
    # `flax.linen.fp8_ops` of Flax 0.12.
    "flax": {"power_of_two": False, "keeps_nonfinite": True},
    # `DelayedScaling` of Transformer Engine, as its documentation describes it.
    "transformer_engine": {"power_of_two": False, "keeps_nonfinite": True},
}


def preset(name: str, dtype: str = "float8_e4m3fn") -> DelayedScaling:
    """Returns a rule that moves as that of another system, bit for bit.

    The bits are those of the systems' functions, one operation after the other. XLA may round the
    last bit of such a scale differently, in theirs as in ours; and on a CPU its maximum leaves NaN
    out, so that Flax's scale moves on where this one waits until a NaN has left the history.
    "transformer_engine" is the rule of its documentation. Newer kernels of it leave a magnitude of
    0 out of the history, and a NaN out of the maximum, which this preset does not. One thing is
    different by intent: where a magnitude is so small that another system's scale becomes
    0, and the tensor NaN, the scale is kept at 2^-126.

    Args:
        name: "keras3", "flax" or "transformer_engine".
        dtype: the float8 format; all three use "float8_e4m3fn" for inputs and kernels, and
            "float8_e5m2" for gradients.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> preset("keras3").includes_newest, preset("flax").includes_newest
        (False, True)
    """
    if name not in PRESETS:
        raise ValueError(f"`name` must be one of {', '.join(PRESETS)}; got {shown(name)}")
    return DelayedScaling(dtype, **PRESETS[name])
