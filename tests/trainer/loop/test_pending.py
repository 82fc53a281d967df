"""The reports of a running inner loop."""

import access
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer.data.reader import untuned
from trainer.loop.inner import LONGEST_LOOP


@pytest.mark.thorough
def test_the_reports_of_a_long_loop_are_in_order():
    """The longest loop returns the report of every step, and the next one has forgotten them."""
    trainer = Linear(verbose=False, loss_scale=1024)
    access.start(trainer, slopes(1.0, 2.0))
    dataset = untuned(tf.data.Dataset.from_tensors(slopes(1.0, 2.0)).repeat())
    report, _ = access.steps(trainer)(iter(dataset), tf.constant(LONGEST_LOOP))

    np.testing.assert_array_equal(report.step, range(1, LONGEST_LOOP + 1))
    np.testing.assert_array_equal(report.loss_scale, [1024.0] * LONGEST_LOOP)
    report, _ = access.steps(trainer)(iter(dataset), tf.constant(2))
    np.testing.assert_array_equal(report.step, [LONGEST_LOOP + 1, LONGEST_LOOP + 2])
