"""Imports TensorFlow with what must be decided before: fast kernels, and fewer remarks.

oneDNN's kernels are TensorFlow's default only on processors with AVX-512 VNNI and the like. With
AVX2 alone they are faster, too: docs/performance.md has figures.

TensorFlow 2.21 writes remarks to the process's standard error before any setting of its own
counts, so they are caught there, and looked through, while it is imported and looks for devices.
Warnings and errors stay.
"""

import os
import pathlib
import platform
import re
import sys
import tempfile

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"

REMARK = re.compile(
    rb"I\d{4} |WARNING: All log messages before absl::InitializeLog\(\)|"
    rb"To enable the following instructions: "
)
NO_CARD = re.compile(rb"E\d{4} .*failed call to cuInit")  # no error where there is no card


def import_tensorflow() -> None:
    """Imports TensorFlow, if nobody has, and lets it report errors alone from then on.

    The environment may say otherwise: `TF_CPP_MIN_LOG_LEVEL` 1 adds warnings, 0 everything;
    `TF_ENABLE_ONEDNN_OPTS` 0 leaves oneDNN out.
    """
    if "tensorflow" in sys.modules:
        return
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault(ONEDNN, "1")
    if os.environ.setdefault(LEVEL, "2") == "0":
        return
    sys.stderr.flush()
    error_output = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            import tensorflow as tf  # noqa: PLC0415  # it is what is to be caught

            tf.config.list_physical_devices()
        finally:
            sys.stderr.flush()
            os.dup2(error_output, 2)
            os.close(error_output)
            caught.seek(0)
            has_card = any(pathlib.Path("/dev").glob("nvidia*"))
            os.write(2, b"".join(kept(caught.readlines(), has_card=has_card)))


def kept(lines: list[bytes], *, has_card: bool) -> list[bytes]:
    """Returns the lines that are more than remarks.

    Example:
        >>> kept([b"I0000 port.cc:153] oneDNN is on", b"W0000 a.cc:1] b"],
        ...      has_card=True)
        [b'W0000 a.cc:1] b']
    """
    noise = (REMARK,) if has_card else (REMARK, NO_CARD)
    return [line for line in lines if not any(each.match(line) for each in noise)]
