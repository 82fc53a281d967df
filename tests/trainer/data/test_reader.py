"""Reading batches from Python: what is checked, and what an error says."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer import DataError, Monitoring
from trainer.data.batches import batches


def error_of(data, steps=4, **arguments):
    """The message of the DataError that training on data raises."""
    trainer = Linear(verbose=False, monitoring=Monitoring(check_gradients=False), **arguments)
    with pytest.raises(DataError) as error:
        trainer.train(data, steps=steps)
    return str(error.value)


def test_a_batch_of_another_shape():
    """The error names the batch, and both shapes."""
    wide = {"x": np.ones([2, 3], np.float32), "slope": np.ones(2, np.float32)}

    message = error_of([slopes(1, 1), slopes(1, 1), wide])
    assert "`train_data` must yield batches like its first two" in message
    assert "batch 3" in message


def test_a_batch_of_another_dtype():
    """tf.data would cast 1.5 to 1 without a word."""
    data = [*[np.ones([2, 1], np.int64)] * 2, np.full([2, 1], 1.5)]
    found = batches(lambda: iter(data), "data", tf.distribute.get_strategy())
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"float64 of shape .* instead of int64"
    ):
        list(found.dataset)


def test_a_batch_of_another_structure_and_an_error_of_the_source():
    """A missing component is named; an error of the source stays the cause."""
    short = {"x": np.ones([2, 1], np.float32)}

    def broken():
        yield slopes(1, 1)
        yield slopes(1, 1)
        raise KeyError("row 7")

    assert "in batch 3" in error_of(lambda: iter([slopes(1, 1), slopes(1, 1), short]))
    assert "raised KeyError after step 2 of 4: 'row 7'" in error_of(broken)


def test_a_generator_that_has_ended():
    """The error says how to pass it so that it can be read again."""
    assert "pass the function that makes it" in error_of(iter([slopes(1, 1)] * 2))


def test_no_batch():
    """A batch must consist of arrays, and data must have a batch."""
    strategy = tf.distribute.get_strategy()
    with pytest.raises(ValueError, match="must hold at least one batch; got an empty dataset"):
        batches(iter([]), "data", strategy)
    with pytest.raises(TypeError, match="`data` must consist of dense arrays; got object"):
        batches(iter([(object(), 1)]), "data", strategy)


def test_dimensions_that_differ_in_the_first_two_batches():
    """A length that changes is unknown in the spec, as Keras's `fit` has it."""
    data = [np.zeros([2, length], np.float32) for length in (3, 5, 4)]
    found = batches(lambda: iter(data), "data", tf.distribute.get_strategy())

    assert found.dataset.element_spec.shape.as_list() == [None, None]
    assert [batch.shape[1] for batch in found.dataset] == [3, 5, 4]


def test_a_generator_that_was_read_before_is_not_evaluated():
    """Its mean would be one of nothing."""
    once = iter([slopes(1, 1)] * 2)
    trainer = Linear(verbose=False, monitoring=Monitoring(check_gradients=False))
    trainer.evaluate(once)
    with pytest.raises(ValueError, match="`data` must"):
        trainer.evaluate(once)


def test_a_second_call_goes_on():
    """Two calls of train on one generator use each of its batches once."""
    data = (slopes(slope, slope) for slope in (1, 2, 4, 8))
    trainer = Linear(verbose=False, monitoring=Monitoring(check_gradients=False))
    trainer.train(data, steps=2)
    trainer.train(data, steps=4)

    assert trainer.weight == 1 - (1 + 2 + 4 + 8)
