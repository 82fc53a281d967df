"""Recorded gradients for tests: step reports, and the file that a run would write."""

import json
import types

import numpy as np
import tensorflow as tf

import scaling
from scaling.telemetry.record import read_record, record_line


def step_reports(steps, gradients=(), first=1, retries=0, in_float32=False):
    """Returns reports of steps, as a run passes them to its log.

    Args:
        steps: (loss scale, cause, largest magnitude) of each step.
        gradients: the elements of each step; by default only its largest magnitude.
        first: the first step's number.
        retries: the number of retries of each step, or of all.
        in_float32: whether each step was computed in float32, or all.
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
        retries=np.broadcast_to(np.int32(retries), len(steps)),
        in_float32=np.broadcast_to(in_float32, len(steps)),
        magnitude_counts=np.array(counts, np.float32),
    )


def write_record(path, *reports, precision="mixed_float16", shares=1):
    """Writes a line for each report, after a line of another kind, and reads the record back."""
    lines = [json.dumps({"step": 1, "split": "train", "loss": 1.0})]
    lines += [json.dumps(record_line(each, precision, shares)) for each in reports]
    path.write_text("\n".join(lines) + "\n")
    return read_record(path)
