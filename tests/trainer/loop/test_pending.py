"""What is known of an inner loop while it runs: the reports of its steps, and a gate before the next."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer.data.reader import untuned
from trainer.loop.inner import LONGEST_LOOP
from trainer.loop.pending import HELD


def test_the_reports_of_a_long_loop_are_in_order():
    """The longest loop returns the report of every step, and the next one has forgotten them."""
    trainer = Linear(verbose=False, loss_scale=1024)
    trainer._start(slopes(1.0, 2.0))
    dataset = untuned(tf.data.Dataset.from_tensors(slopes(1.0, 2.0)).repeat())
    report, _ = trainer._parts.run_steps(iter(dataset), tf.constant(LONGEST_LOOP))

    np.testing.assert_array_equal(report.step, range(1, LONGEST_LOOP + 1))
    np.testing.assert_array_equal(report.loss_scale, [1024.0] * LONGEST_LOOP)
    report, _ = trainer._parts.run_steps(iter(dataset), tf.constant(2))
    np.testing.assert_array_equal(report.step, [LONGEST_LOOP + 1, LONGEST_LOOP + 2])


@pytest.mark.parametrize("held", [False, True])
def test_a_loop_that_is_held_takes_no_step(held):
    """A batch that arrives after `hold` is not trained on; the steps before have their reports."""
    arrives = threading.Event()

    def batches():
        yield slopes(1.0, 2.0)
        yield slopes(3.0, 4.0)
        arrives.wait(60)
        yield slopes(5.0, 6.0)

    spec = tf.nest.map_structure(tf.type_spec_from_value, slopes(1.0, 2.0))
    trainer = Linear(verbose=False)
    trainer._start(slopes(1.0, 2.0))
    parts = trainer._parts
    iterator = iter(untuned(tf.data.Dataset.from_generator(batches, output_signature=spec)))
    raised = []

    def run():
        try:
            parts.run_steps(iterator, tf.constant(3))
        except tf.errors.InvalidArgumentError as error:
            raised.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    while trainer.totals.attempted < 2:
        pass
    while held and not parts.pending.hold():
        pass
    reports = parts.pending.read(2)
    arrives.set()
    thread.join()

    assert trainer.totals.attempted == (2 if held else 3)
    assert [HELD in message for message in raised] == [True] * held
    np.testing.assert_array_equal(reports.step, [1, 2])
    np.testing.assert_array_equal(reports.loss, [1.5, 3.5 * (1 - 1.5)])


def test_a_loop_that_does_not_wait_is_not_held():
    """Between two loops, and while a step is computed, there is nothing to hold."""
    trainer = Linear(verbose=False)
    trainer._start(slopes(1.0, 2.0))

    assert not trainer._parts.pending.hold()
    dataset = untuned(tf.data.Dataset.from_tensors(slopes(1.0, 2.0)))
    assert trainer._parts.run_steps(iter(dataset), tf.constant(1))[0].step == 1
