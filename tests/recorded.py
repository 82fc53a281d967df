"""Recorded gradients for tests: step reports, and the file that a run would write."""

import json
import types

import numpy as np
import tensorflow as tf

import scaling
from scaling.telemetry.float8_record import read_float8_record
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


def float8_line(step, **tensors):
    """Returns the content of a line about float8 tensors.

    Args:
        step: the step's number.
        tensors: by name: the largest magnitude and the scale, then the format, if it is another than
            e4m3fn, and the shares that saturated and flushed, if they are not 0.
    """
    line = {"step": step, "split": "train", "loss": 1.0, "float8": {}}
    for name, (amax, scale, *rest) in tensors.items():
        dtype, saturated, flushed = [*rest, *("float8_e4m3fn", 0.0, 0.0)[len(rest) :]]
        line["float8"][name] = {"format": dtype, "amax": amax, "scale": scale}
        line["float8"][name] |= {"saturated": saturated, "flushed": flushed}
    return line


def write_float8(path, *lines):
    """Writes lines about float8 tensors, after one of another kind, and reads the record back."""
    every = [{"step": 1, "split": "run"}, *lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in every))
    return read_float8_record(path)
