"""The report of a step: its fields, and the description of a skip."""

import access
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes, trained_small
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from scaling import Cause
from trainer.step.report import (
    Kept,
    Outcome,
    PackedReport,
    StepReport,
    bits_of,
    describe_skip,
    outcome_spec,
    packed,
    report_spec,
    unpacked,
)
from trainer.step.types import Rows

NAMES = ["a/kernel", "b/kernel"]


def skipped(cause, replica=-1, variable=-1, infs=0, nans=0):
    """The report of a skipped step."""
    numbers = dict.fromkeys(StepReport._fields, 0) | {
        "cause": int(cause),
        "bad_replica": replica,
        "bad_variable": variable,
        "inf_count": infs,
        "nan_count": nans,
    }
    return StepReport(**numbers)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (
            skipped(Cause.WEIGHTS, variable=1, nans=2),
            "weights, in the weights of b/kernel: 0 inf, 2 NaN",
        ),
        (
            skipped(Cause.FORWARD, replica=2, infs=1),
            "forward, in the losses on replica 2: 1 inf, 0 NaN",
        ),
        (
            skipped(Cause.FORWARD),
            "forward, in model.losses or a value that a layer would assign: 0 inf, 0 NaN",
        ),
        (
            skipped(Cause.BACKWARD, replica=0, variable=0, infs=3),
            "backward, in a/kernel on replica 0: 3 inf, 0 NaN",
        ),
        (
            skipped(Cause.MODEL, replica=0, variable=0, infs=3),
            "model, in a/kernel on replica 0: 3 inf, 0 NaN",
        ),
        (
            skipped(Cause.REDUCTION, variable=1, infs=1),
            "reduction, in b/kernel: 1 inf, 0 NaN",
        ),
        (
            skipped(Cause.UNSCALING, variable=0, infs=1),
            "unscaling, in the unscaled gradient of a/kernel: 1 inf, 0 NaN",
        ),
        (
            skipped(Cause.UNSCALING),
            "unscaling, in the global norm of the gradients: 0 inf, 0 NaN",
        ),
    ],
)
def test_describe_skip(report, expected):
    """L17: the text names the cause, the variable, the replica and the counts."""
    assert describe_skip(report, NAMES) == expected


def test_a_report_ends_with_the_fields_of_an_outcome():
    """An outcome fills the last fields of a report, in the same order."""
    assert StepReport._fields[-len(Outcome._fields) :] == Outcome._fields
    assert report_spec(3, 2)[-len(Outcome._fields) :] == outcome_spec(3, 2)
    assert all(isinstance(spec, tf.TensorSpec) for spec in report_spec())


@pytest.mark.parametrize("recorded", [0, 3])
def test_recorded_fields_have_rows_only_if_asked_for(recorded):
    """Magnitudes are counted for every variable, or the fields are empty."""
    spec = outcome_spec(recorded, float8=2)

    assert spec.float8_amax.shape == spec.float8_scale.shape == [2]
    assert spec.float8_saturated.shape == spec.float8_flushed.shape == [2 if recorded else 0]
    assert spec.underflow.shape == [recorded]
    assert (spec.magnitude_counts.shape[0] > 0) == bool(recorded)
    assert all(tf.TensorShape([]) == field.shape for field in spec[:10])


@given(data=st.data(), recorded=st.sampled_from([0, 1, 3]), float8=st.sampled_from([0, 2]))
def test_reports_keep_their_bits(data, recorded, float8):
    """Whatever a report holds, NaN with any payload included, is read as it was written."""
    specs = report_spec(recorded, float8)
    bits = {
        name: data.draw(
            arrays.arrays(
                np.bool_ if spec.dtype == tf.bool else f"u{spec.dtype.size}", tuple(spec.shape)
            )
        )
        for name, spec in specs._asdict().items()
    }
    report = StepReport(
        **{
            name: tf.constant(value.view(spec.dtype.as_numpy_dtype))
            for (name, value), spec in zip(bits.items(), specs, strict=True)
        }
    )
    found = unpacked(tf.stack([packed(report, specs), packed(report, specs)]), specs)

    for name, spec in specs._asdict().items():
        field = getattr(found, name)
        assert (field.dtype, field.shape) == (spec.dtype, [2, *spec.shape])
        for row in field.numpy():
            assert row.tobytes() == bits[name].tobytes()


def report_of(**fields):
    """A report of zeros, but for the given fields."""
    zeros = {name: np.zeros(spec.shape, spec.dtype.name) for name, spec in SPECS._asdict().items()}
    return StepReport(**{name: tf.constant(value) for name, value in (zeros | fields).items()})


SPECS = report_spec()


def test_a_report_that_was_changed_forgets_its_vector():
    """What a user's `train_step` changes in a report is what is kept, not what the step computed."""
    known = PackedReport.from_bits(packed(report_of(loss=np.float32(2.0)), SPECS), SPECS)
    assert bits_of(known, SPECS) is known.bits

    changed = known._replace(loss=tf.constant(3.0))
    rebuilt = tf.nest.map_structure(tf.identity, known)

    assert unpacked(bits_of(changed, SPECS), SPECS).loss == 3.0
    assert rebuilt.bits is None
    assert unpacked(bits_of(rebuilt, SPECS), SPECS).loss == 2.0


def test_a_condition_may_return_a_changed_report():
    """TensorFlow takes the report of a step that is one program for any other report."""
    known = PackedReport.from_bits(packed(report_of(loss=np.float32(2.0)), SPECS), SPECS)

    @tf.function
    def chosen(changes):
        plain = StepReport(*known)._replace(loss=tf.constant(3.0))
        return tf.cond(changes, lambda: plain, lambda: known)

    assert chosen(tf.constant(value=True)).loss == 3.0
    assert chosen(tf.constant(value=False)).loss == 2.0


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [tf.constant(3), tf.ones([1])])
def test_a_field_of_another_kind_is_refused(wrong):
    """It would be read as something else, and so would the fields after it."""

    class Own(Linear):
        def train_step(self, batch):
            return super().train_step(batch)._replace(loss=wrong)

    with pytest.raises(ValueError, match="`loss`"):
        Own(verbose=False).train(slopes(1.0, 2.0), steps=1, global_batch=2)


@pytest.mark.thorough
def test_a_step_that_is_one_program_returns_one_vector():
    """The program has no other result; in the loop nothing is packed again."""
    trainer = trained_small(jit_compile="step", precision="mixed_float16")
    loop = access.steps(trainer)
    [concrete] = loop._list_all_concrete_functions()
    nodes = [node for f in concrete.graph.as_graph_def().library.function for node in f.node_def]
    results = [len(n.attr["Tout"].list.type) for n in nodes if n.attr["_XlaMustCompile"].b]

    assert [count for count in results if count] == [1]


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_leave_a_loop_and_a_branch(compiled):
    """The rows of the last attempt are returned; losses of several groups come together."""
    kept = Kept()
    strategy = tf.distribute.get_strategy()

    def attempts(x):
        size = x.shape[0] if compiled else None

        def attempt(index):
            kept.keep(Rows({"x": x, "odd": x > 1}, {"first": x * 2}), strategy, size)
            return index + 1

        def later():
            kept.keep(Rows({"x": x + 5, "odd": x > 1}, {"second": x * 3}), strategy, size)
            return 0

        tf.while_loop(lambda index: index < 2, attempt, (0,))
        tf.cond(x[0] > 0, later, lambda: 1)
        return x

    @tf.function(autograph=False, reduce_retracing=not compiled)
    def run(x):
        tf.function(attempts, autograph=False, jit_compile=compiled or None)(x)
        return kept.take()

    for size in (2, 4, 3):
        x = np.arange(1, size + 1, dtype=np.float32)
        aux, losses = run(tf.constant(x))
        assert aux["x"].numpy().tolist() == (x + 5).tolist()
        assert aux["odd"].numpy().tolist() == (x > 1).tolist()
        assert losses["first"].numpy().tolist() == (x * 2).tolist()
        assert losses["second"].numpy().tolist() == (x * 3).tolist()


def test_ragged_rows():
    """Ragged tensors are kept, too."""
    kept = Kept()

    @tf.function(autograph=False)
    def run(x):
        kept.keep(Rows(x, {}), tf.distribute.get_strategy(), None)
        return kept.take().aux

    assert run(tf.ragged.constant([[1, 2], [3]])).to_list() == [[1, 2], [3]]
