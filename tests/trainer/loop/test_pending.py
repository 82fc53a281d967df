"""What is known of an inner loop while it runs: the reports of its steps, and a gate before the next."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer.data.reader import untuned
from trainer.loop.pending import FIRST_ROWS, HELD


def test_a_loop_may_be_longer_than_the_first_rows():
    """The reports of every step of a long loop are returned, in order."""
    steps = 2 * FIRST_ROWS + 3
    trainer = Linear(verbose=False, loss_scale=1024)
    trainer._start(slopes(1.0, 2.0))
    dataset = untuned(tf.data.Dataset.from_tensors(slopes(1.0, 2.0)).repeat())
    report, _ = trainer._parts.run_steps(iter(dataset), tf.constant(steps))

    np.testing.assert_array_equal(report.step, range(1, steps + 1))
    np.testing.assert_array_equal(report.loss_scale, [1024.0] * steps)


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
