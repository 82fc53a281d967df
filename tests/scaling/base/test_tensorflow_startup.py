"""TensorFlow's start-up: its messages are filtered, and oneDNN is on."""

import os
import platform
import subprocess
import sys

import pytest

from scaling.base.tensorflow_startup import LOG_LEVEL, ONEDNN, without_noise

SCRIPT = "import {}, tensorflow as tf; tf.zeros([2]); print('ours')"


def import_first(package="trainer", **environment):
    """Runs a process that imports a package first, with no other setting for TensorFlow."""
    others = {name: value for name, value in os.environ.items() if name not in (LOG_LEVEL, ONEDNN)}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(package)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=others | environment,
    )


def test_only_info_messages_are_dropped():
    """Warnings and errors are kept; a missing GPU driver is an error only where there is a GPU."""
    info = [
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
        b"I0000 00:00:1 1 port.cc:153] oneDNN custom operations are on.\n",
        b"To enable the following instructions: AVX2, rebuild TensorFlow.\n",
    ]
    problems = [
        b"W0000 00:00:1 1 gpu_device.cc:1] Cannot dlopen some GPU libraries.\n",
        b"E0000 00:00:1 1 other.cc:1] something is wrong\n",
        b"a warning of Python's\n",
    ]
    driver = [b"E0000 00:00:1 1 cuda_platform.cc:52] failed call to cuInit: UNKNOWN ERROR (303)\n"]

    assert without_noise([*info, *problems, *driver], has_gpu=False) == problems
    assert without_noise([*info, *problems, *driver], has_gpu=True) == problems + driver


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, "0"])
@pytest.mark.parametrize("package", ["trainer", "scaling"])
def test_importing_a_package_first_hides_start_up_messages(package, level):
    """A program that imports it before TensorFlow prints no start-up messages by default."""
    result = import_first(package, **{LOG_LEVEL: level} if level else {})

    assert result.stdout == "ours\n"
    assert (result.stderr == "") == (level is None)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only set on x86")
@pytest.mark.parametrize("setting", [None, pytest.param("0", marks=pytest.mark.slow)])
def test_onednn_is_on_unless_the_environment_turns_it_off(setting):
    """TensorFlow alone would leave it off on many processors, where convolutions run slower."""
    result = import_first(**{LOG_LEVEL: "0"} | ({ONEDNN: setting} if setting else {}))

    assert ("oneDNN custom operations are on" in result.stderr) == (setting is None)
