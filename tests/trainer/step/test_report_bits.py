"""A report as one vector: every bit of it is kept."""

import access
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes, trained_small
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainer.step.report import StepReport, report_spec
from trainer.step.report_bits import PackedReport, bits_of, packed, unpacked


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


@pytest.mark.parametrize("wrong", [tf.constant(3), tf.ones([1])])
def test_a_field_of_another_kind_is_refused(wrong):
    """It would be read as something else, and so would the fields after it."""

    class Own(Linear):
        def train_step(self, batch):
            return super().train_step(batch)._replace(loss=wrong)

    with pytest.raises(ValueError, match="`loss`"):
        Own(verbose=False).train(slopes(1.0, 2.0), steps=1, global_batch=2)


def test_a_step_that_is_one_program_returns_one_vector():
    """The program has no other result; in the loop nothing is packed again."""
    trainer = trained_small(jit_compile="step", precision="mixed_float16")
    loop = access.steps(trainer)
    [concrete] = loop._list_all_concrete_functions()
    nodes = [node for f in concrete.graph.as_graph_def().library.function for node in f.node_def]
    results = [len(n.attr["Tout"].list.type) for n in nodes if n.attr["_XlaMustCompile"].b]

    assert [count for count in results if count] == [1]
