"""The compute and variable dtypes of a precision policy, and the casts between them."""

import dataclasses

import tensorflow as tf

from scaling.base.argument_checks import shown
from scaling.ops.gradients import Structure

COMPUTE_DTYPES = {
    "float32": "float32",
    "float64": "float64",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "mixed_float8": "bfloat16",  # of what is not a product in float8
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision: a compute dtype, and weights in float32 or, with "float64", in float64.

    Attributes:
        name: "float32", "float64", "mixed_float16", "mixed_bfloat16", or "mixed_float8": the
            products of large layers in float8, all else in bfloat16.

    Raises:
        ValueError: for any other name. Pure half precision ("float16") is not supported
            because float16 weights lose updates smaller than 2^-12 of the weight.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1 (float32
        master weights).

    Example:
        >>> precision = Precision("mixed_float16")
        >>> precision.compute_dtype, precision.variable_dtype, precision.needs_loss_scale
        ('float16', 'float32', True)
        >>> precision.cast_to_compute({"x": tf.ones([2]), "id": tf.constant(3)})["x"].dtype.name
        'float16'
    """

    name: str

    def __post_init__(self) -> None:
        """Rejects unknown names."""
        if self.name not in COMPUTE_DTYPES:
            raise ValueError(
                f"`precision` must be one of {', '.join(COMPUTE_DTYPES)}; got {shown(self.name)}"
            )

    @property
    def compute_dtype(self) -> str:
        """The dtype that layers compute in, apart from products in float8."""
        return COMPUTE_DTYPES[self.name]

    @property
    def policy(self) -> str:
        """The name of the Keras dtype policy under which layers are created."""
        return "mixed_bfloat16" if self.name == "mixed_float8" else self.name

    @property
    def variable_dtype(self) -> str:
        """The dtype of the master weights: "float32", or "float64" for "float64"."""
        return "float64" if self.name == "float64" else "float32"

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients can underflow: True for float16; bfloat16 has the range of float32."""
        return self.compute_dtype == "float16"

    def cast_to_compute(self, tree: Structure) -> Structure:
        """Returns `tree` with its float tensors cast to `compute_dtype`; keeps other leaves."""
        return cast_floats(tree, self.compute_dtype)

    def cast_to_variable(self, tree: Structure) -> Structure:
        """Returns `tree` with its float tensors cast to `variable_dtype`; keeps other leaves."""
        return cast_floats(tree, self.variable_dtype)


def cast_floats(tree: Structure, dtype: str) -> Structure:
    """Casts the float tensors of a structure; leaves integers, bools, strings and None alone."""

    def cast(leaf: Structure) -> Structure:
        if leaf is None:
            return None
        if isinstance(leaf, tf.IndexedSlices):
            return tf.IndexedSlices(cast(leaf.values), leaf.indices, leaf.dense_shape)
        tensor = tf.convert_to_tensor(leaf)
        return tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor

    return tf.nest.map_structure(cast, tree)
