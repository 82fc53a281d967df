"""Imports TensorFlow with oneDNN turned on and without its start-up messages.

TensorFlow enables oneDNN by default only on processors with AVX-512 VNNI or similar. Its kernels
are faster on AVX2-only processors too: docs/performance.md has figures.

TensorFlow 2.21 writes messages to the process's standard error before any of its own settings
takes effect. So standard error is redirected while TensorFlow is imported and lists its devices,
and only warnings and errors are passed on.
"""

import os
import pathlib
import platform
import re
import sys
import tempfile

LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"

INFO = re.compile(
    rb"I\d{4} |WARNING: All log messages before absl::InitializeLog\(\)|"
    rb"To enable the following instructions: "
)
NO_GPU = re.compile(rb"E\d{4} .*failed call to cuInit")  # expected on a machine without a GPU


def import_tensorflow() -> None:
    """Imports TensorFlow unless it is already imported, and sets its C++ log level to errors only.

    Environment variables override both settings: `TF_CPP_MIN_LOG_LEVEL=1` also logs warnings and
    `=0` everything; `TF_ENABLE_ONEDNN_OPTS=0` turns oneDNN off.
    """
    if "tensorflow" in sys.modules:
        return
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault(ONEDNN, "1")
    if os.environ.setdefault(LOG_LEVEL, "2") == "0":
        return
    sys.stderr.flush()
    original_stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            import tensorflow as tf  # noqa: PLC0415  # its output is captured

            tf.config.list_physical_devices()
        finally:
            sys.stderr.flush()
            os.dup2(original_stderr, 2)
            os.close(original_stderr)
            captured.seek(0)
            has_gpu = any(pathlib.Path("/dev").glob("nvidia*"))
            os.write(2, b"".join(without_noise(captured.readlines(), has_gpu=has_gpu)))


def without_noise(lines: list[bytes], *, has_gpu: bool) -> list[bytes]:
    """Returns the lines of TensorFlow's start-up output that are warnings or errors.

    Example:
        >>> without_noise([b"I0000 port.cc:153] oneDNN is on", b"W0000 a.cc:1] b"], has_gpu=True)
        [b'W0000 a.cc:1] b']
    """
    noise = (INFO,) if has_gpu else (INFO, NO_GPU)
    return [line for line in lines if not any(pattern.match(line) for pattern in noise)]
