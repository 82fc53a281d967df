"""The report of a step: what was computed, whether it was applied, and why not.

A report is packed into one vector, so that many can be kept on the device that computes them.

A report has some twenty numbers of four types. To hand each of them to the host would take twenty
copies from a GPU, and the host would wait for each. So a step's numbers become one vector, of
int64: TensorFlow keeps int32 tensors in the host's memory.
"""

from typing import Any, NamedTuple

import tensorflow as tf

import scaling
from scaling.telemetry.stats import COUNTS
from trainer.step.types import Rows


class Outcome(NamedTuple):
    """The outcome of one attempt at an update; the same on every replica."""

    loss: tf.Tensor  # shape=(), float32: weighted mean over the global batch, unscaled
    regularization_loss: tf.Tensor  # shape=(), float32: the sum of `model.losses`, unscaled
    gradient_norm: tf.Tensor  # shape=(), float32: global norm, unscaled, before clipping
    grads_finite: tf.Tensor  # shape=(), bool: whether the update was applied
    cause: tf.Tensor  # shape=(), int32: a `scaling.Cause`
    bad_replica: tf.Tensor  # shape=(), int32: first replica that met an inf or NaN; -1: no single
    # replica did
    bad_variable: tf.Tensor  # shape=(), int32: position in `model.trainable_variables` of the first
    # variable with an inf or NaN; -1: none (the losses have one, or only the global norm does)
    inf_count: tf.Tensor  # shape=(), int32: number of infs in that variable's weights or summed
    # gradient, depending on the cause; or in the losses
    nan_count: tf.Tensor  # shape=(), int32: the same for NaN
    max_magnitude: tf.Tensor  # shape=(), float32: largest magnitude in the unscaled gradients; NaN
    # if it was not measured
    magnitude_counts: tf.Tensor  # shape=(COUNTS,), float32: elements of all gradients by exponent,
    # as in `scaling.GradientStats`; shape (0,) if they were not counted
    underflow: tf.Tensor  # shape=(trainable_variables,), float32: fraction of each gradient that
    # underflows in float16: see `scaling.GradientStats.underflow`; shape (0,) if not counted
    # The next four are of the tensors in `StepPlan.float8`; 0 for those that no update has reached.
    float8_amax: tf.Tensor  # shape=(tensors,), float32: largest magnitude, before the cast
    float8_scale: tf.Tensor  # shape=(tensors,), float32: the scale that this step used
    float8_saturated: tf.Tensor  # shape=(tensors,), float32: fraction of the numbers that were too
    # large for the format at that scale; NaN if unknown; shape (0,) if not counted
    float8_flushed: tf.Tensor  # the same for numbers other than 0 that became 0


class StepReport(NamedTuple):
    """The report of one attempted step, or of many. For many, each field has shape (steps, ...)."""

    step: tf.Tensor  # shape=(), int64: number of attempted steps, this one included
    loss_scale: tf.Tensor  # shape=(), float32: the scale of this step's last attempt
    retries: tf.Tensor  # shape=(), int32: number of further attempts with the same batch
    consecutive_skips: tf.Tensor  # shape=(), int64: skips in a row, up to this step; 0 if applied
    in_float32: tf.Tensor  # shape=(), bool: whether float32 was used for it, after many skips
    examples: tf.Tensor  # shape=(), int64: number of examples in the global batch
    weight: tf.Tensor  # shape=(), float32: sum of the magnitudes of their weights, which `loss`
    # is divided by
    data_wait_secs: tf.Tensor  # shape=(), float32: how long the host waited for the batch; 0
    # under `tf.config.experimental.enable_op_determinism()`
    # The remaining fields are those of `Outcome`, from the last attempt.
    loss: tf.Tensor
    regularization_loss: tf.Tensor
    gradient_norm: tf.Tensor
    grads_finite: tf.Tensor
    cause: tf.Tensor
    bad_replica: tf.Tensor
    bad_variable: tf.Tensor
    inf_count: tf.Tensor
    nan_count: tf.Tensor
    max_magnitude: tf.Tensor
    magnitude_counts: tf.Tensor
    underflow: tf.Tensor
    float8_amax: tf.Tensor
    float8_scale: tf.Tensor
    float8_saturated: tf.Tensor
    float8_flushed: tf.Tensor


def outcome_spec(recorded: int = 0, float8: int = 0) -> Outcome:
    """Returns an `Outcome` with the `tf.TensorSpec` of each field.

    Args:
        recorded: number of variables whose gradients' magnitudes are counted; 0 if they are not.
        float8: number of float8 tensors.
    """
    tensors = tf.TensorSpec([float8], tf.float32)
    counted = tf.TensorSpec([float8 if recorded else 0], tf.float32)
    counts = COUNTS if recorded else 0
    number, integer = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int32)
    return Outcome(
        loss=number,
        regularization_loss=number,
        gradient_norm=number,
        grads_finite=tf.TensorSpec([], tf.bool),
        cause=integer,
        bad_replica=integer,
        bad_variable=integer,
        inf_count=integer,
        nan_count=integer,
        max_magnitude=number,
        magnitude_counts=tf.TensorSpec([counts], tf.float32),
        underflow=tf.TensorSpec([recorded], tf.float32),
        float8_amax=tensors,
        float8_scale=tensors,
        float8_saturated=counted,
        float8_flushed=counted,
    )


def report_spec(recorded: int = 0, float8: int = 0) -> StepReport:
    """Returns a `StepReport` with the `tf.TensorSpec` of each field; see `outcome_spec`."""
    count = tf.TensorSpec([], tf.int64)
    return StepReport(
        step=count,
        loss_scale=tf.TensorSpec([], tf.float32),
        retries=tf.TensorSpec([], tf.int32),
        consecutive_skips=count,
        in_float32=tf.TensorSpec([], tf.bool),
        examples=count,
        weight=tf.TensorSpec([], tf.float32),
        data_wait_secs=tf.TensorSpec([], tf.float32),
        **outcome_spec(recorded, float8)._asdict(),
    )


def describe_skip(report: StepReport, variable_names: list[str]) -> str:
    """Returns a description of why a step was skipped.

    Args:
        report: the report of one skipped step, with numbers instead of tensors.
        variable_names: the names of `model.trainable_variables`.

    Example:
        >>> numbers = dict.fromkeys(StepReport._fields, 0) | {"cause": 3, "inf_count": 12}
        >>> describe_skip(StepReport(**numbers), ["dense/kernel"])
        'backward, in dense/kernel on replica 0: 12 inf, 0 NaN'
    """
    cause = scaling.Cause(int(report.cause))
    if cause is scaling.Cause.FORWARD:
        in_losses = report.inf_count + report.nan_count
        place = "the losses" if in_losses else "model.losses or a value that a layer would assign"
    elif report.bad_variable < 0:
        place = "the global norm of the gradients"
    else:
        places = {
            scaling.Cause.WEIGHTS: "the weights of {}",
            scaling.Cause.UNSCALING: "the unscaled gradient of {}",
        }
        place = places.get(cause, "{}").format(variable_names[int(report.bad_variable)])
    replica = f" on replica {int(report.bad_replica)}" if report.bad_replica >= 0 else ""
    counts = f"{int(report.inf_count)} inf, {int(report.nan_count)} NaN"
    return f"{cause.name.lower()}, in {place}{replica}: {counts}"


def step_of(steps: StepReport, place: int) -> StepReport:
    """Returns the report of one step from a report of many; `place` is its index."""
    return StepReport(*(field[place] for field in steps))


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


class Kept:
    """The losses and the aux of the last attempt of each update group; see `StepPlan.kept`.

    An attempt may stand in a loop or in a branch of the graph, whose tensors are out of reach after
    it. So the rows wait in variables until the step has ended.
    """

    def __init__(self) -> None:
        """Creates no variables: what there is to keep is known when the step is traced."""
        self._variables: dict[Any, tf.Variable] = {}
        # By name of the loss, and None for aux: rows of the step that is being traced, as they
        # were computed, and the variables that hold them.
        self._traced: dict[str | None, tuple[Any, list[tf.Variable]]] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables in which rows wait."""
        return list(self._variables.values())

    def keep(self, rows: Rows, strategy: tf.distribute.Strategy, examples: int | None) -> None:
        """Keeps rows that an update group has computed. Call it in cross-replica context.

        Args:
            rows: the rows of each replica.
            strategy: the strategy of the replicas.
            examples: the size of the batch if XLA compiles the step: it assigns no other shape than
                a variable has. None: any size.
        """

        def whole(rows: Any) -> Any:
            parts = strategy.experimental_local_results(rows)
            return tf.concat(parts, 0) if len(parts) > 1 else parts[0]

        rows = tf.nest.map_structure(whole, rows)
        for name, tree in [(None, rows.aux), *rows.losses.items()]:
            held = []
            for index, leaf in enumerate(tf.nest.flatten(tree, expand_composites=True)):
                shape = (0,) * leaf.shape.rank
                if examples:
                    shape = tuple(examples if size is None else size for size in leaf.shape)
                key = name, index, leaf.dtype, shape
                if key not in self._variables:
                    with tf.init_scope():
                        zeros = tf.zeros(shape, leaf.dtype)
                        self._variables[key] = tf.Variable(zeros, shape=tf.TensorShape(None))
                self._variables[key].assign(leaf)
                held.append(self._variables[key])
            self._traced[name] = tree, held

    def take(self) -> Rows:
        """Returns the rows of the whole batch. Call it after the step, in the same graph."""
        found = {
            name: tf.nest.pack_sequence_as(
                tree, [variable.read_value() for variable in held], expand_composites=True
            )
            for name, (tree, held) in self._traced.items()
        }
        self._traced = {}
        return Rows(found.pop(None), {name: found[name] for name in found if name is not None})
