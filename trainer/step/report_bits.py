"""A report as one vector, so that many of them can be kept on the device that computes them.

A report has some twenty numbers of four types. To hand each of them to the host would take twenty
copies from a GPU, and the host would wait for each. So a step's numbers become one vector, of
int64: TensorFlow keeps int32 tensors in the host's memory.
"""

from typing import Any

import tensorflow as tf

from trainer.step.report import StepReport


class PackedReport(StepReport):
    """A report that was unpacked from a vector, and still knows it.

    Attributes:
        bits: the vector: shape (width,), int64. None in a report that was changed with `_replace`
            or rebuilt by TensorFlow.
    """

    bits: tf.Tensor | None = None

    @classmethod
    def from_bits(cls, bits: tf.Tensor, specs: StepReport) -> "PackedReport":
        """Returns the report with these bits.

        Args:
            bits: the result of `packed`.
            specs: the specs of the report's fields.
        """
        report = cls(*unpacked(bits, specs))
        report.bits = bits
        return report


# tf.nest, and with it tf.cond, takes named tuples for the same if their names and fields are.
PackedReport.__name__ = StepReport.__name__


def bits_of(report: StepReport, specs: StepReport) -> tf.Tensor:
    """Returns the vector of a report, which a step that is one program has computed already.

    For arguments and errors see `packed`.
    """
    known = report.bits if isinstance(report, PackedReport) else None
    return packed(report, specs) if known is None else known


def packed(report: StepReport, specs: StepReport) -> tf.Tensor:
    """Returns the bits of a step's report: shape (width,), int64.

    Args:
        report: the report, which may come from a user's `train_step`.
        specs: what its fields must be.

    Raises:
        ValueError: if a field has another dtype or shape.
    """
    fields = {
        name: checked(name, getattr(report, name), spec) for name, spec in specs._asdict().items()
    }
    wholes, floats, vectors = names_by_kind(specs)
    first = tf.stack([tf.cast(fields[name], tf.int64) for name in wholes])
    second = as_int64(tf.stack([fields[name] for name in floats]))
    return tf.concat([first, second, *(as_int64(fields[name]) for name in vectors)], axis=0)


def checked(name: str, field: Any, spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a field of a report as a tensor; raises ValueError unless it fits the spec."""
    tensor = tf.convert_to_tensor(field)
    if tensor.dtype != spec.dtype or not tensor.shape.is_compatible_with(spec.shape):
        raise ValueError(
            f"`{name}` of the report that `train_step` returns must be {spec.dtype.name} of shape "
            f"{tuple(spec.shape)}; got {tensor.dtype.name} of shape {tensor.shape}. The loop keeps "
            "the reports of all steps in one matrix. Cast or reduce the value, or leave the field "
            "as `attempt_step` returns it."
        )
    return tensor


def unpacked(bits: tf.Tensor, specs: StepReport) -> StepReport:
    """Returns the reports whose bits `packed` has returned.

    Args:
        bits: shape (..., width), int64.
        specs: the specs of a report's fields.
    """
    fields: dict[str, tf.Tensor] = {}
    wholes, floats, vectors = names_by_kind(specs)
    scalars = [*wholes, *floats]
    values = tf.unstack(bits[..., : len(scalars)], num=len(scalars), axis=-1)
    for name, value in zip(scalars, values, strict=True):
        fields[name] = from_int64(value, getattr(specs, name).dtype)
    start = len(scalars)
    for name in vectors:
        spec = getattr(specs, name)
        end = start + spec.shape[0]
        fields[name] = from_int64(bits[..., start:end], spec.dtype)
        start = end
    empty = tf.cast(bits[..., :0], tf.float32)
    return StepReport(**{name: fields.get(name, empty) for name in StepReport._fields})


def as_int64(floats: tf.Tensor) -> tf.Tensor:
    """Returns the bits of float32 numbers."""
    return tf.cast(tf.bitcast(floats, tf.int32), tf.int64)


def from_int64(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the numbers of a dtype that have these bits, or equal these integers."""
    if dtype == tf.float32:
        return tf.bitcast(tf.cast(bits, tf.int32), tf.float32)
    return tf.cast(bits, dtype)


def names_by_kind(specs: Any) -> tuple[list[str], list[str], list[str]]:
    """Returns the names of a report's fields by what they hold, in the order of the vector.

    Returns:
        Those that hold one integer or bool; one float; and several floats, but at least one.
    """
    fields = specs._asdict().items()
    wholes = [name for name, spec in fields if not (spec.shape.rank or spec.dtype.is_floating)]
    floats = [name for name, spec in fields if not spec.shape.rank and spec.dtype.is_floating]
    vectors = [name for name, spec in fields if spec.shape.rank and spec.shape[0]]
    return wholes, floats, vectors
