"""Recorded gradients for tests: step reports, and the file that a run would write."""

import json
import types

import numpy as np
import tensorflow as tf

import scaling
from scaling.telemetry.record import read_record, record_line


def step_reports(steps, gradients=(), first=1):
    """Returns reports of steps, as a run passes them to its log.

    Args:
        steps: (loss scale, cause, largest magnitude) of each step.
        gradients: the elements of each step; by default only its largest magnitude.
        first: the first step's number.
    """
    scales, causes, magnitudes = zip(*steps, strict=True)
    elements = gradients or [[magnitude] for magnitude in magnitudes]
    one = scaling.FixedLossScale(1.0).initial_state()
    counts = [
        scaling.gradient_stats([tf.constant(row, tf.float32)], one).counts[0] for row in elements
    ]
    return types.SimpleNamespace(
        step=np.arange(first, first + len(steps)),
        loss_scale=np.array(scales, np.float32),
        cause=np.array(causes, np.int32),
        max_magnitude=np.array(magnitudes, np.float32),
        magnitude_counts=np.array(counts, np.float32),
    )


def write_record(path, *reports, precision="mixed_float16", shares=1):
    """Writes a line for each report, after a line of another kind, and reads the record back."""
    lines = [json.dumps({"step": 1, "split": "train", "loss": 1.0})]
    lines += [json.dumps(record_line(each, precision, shares)) for each in reports]
    path.write_text("\n".join(lines) + "\n")
    return read_record(path)
