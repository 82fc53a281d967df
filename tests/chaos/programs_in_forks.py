"""Runs commands `python -m MODULE ...` many times, with bounds on their time and memory.

This is a separate program. Importing TensorFlow takes seconds, so it imports what the commands need
once, and then forks for each. It must not use TensorFlow itself: a fork does not copy its threads.

    python tests/chaos/programs_in_forks.py JOBS OUTCOMES

JOBS is a file with a JSON list of {"module", "arguments", "unprivileged"}; OUTCOMES is written with a
list of {"status", "stdout", "stderr", "seconds" of the CPU, "megabytes"}. A status of None means that the
program did not end in time.
"""

import ctypes
import importlib
import json
import os
import pathlib
import resource
import runpy
import signal
import struct
import sys
import time
import traceback
import warnings

PATIENCE = 120  # seconds until a command is killed, on a machine that has other work, too
MEGABYTES = 8192  # of address space, of which TensorFlow alone takes about three thousand


def prepare():
    """Imports what the commands need, but not the commands themselves: those run as `__main__`."""
    for name in (
        "trainer.report.page",
        "trainer.report.pictures",
        "scaling.telemetry.simulate_rules",
    ):
        importlib.import_module(name)
    importlib.import_module("scaling.telemetry.float8_table")
    for name in ("matplotlib.backends.backend_agg", "matplotlib.ft2font"):
        importlib.import_module(name)


def drop_privileges():
    """Takes from root what other users do not have, so that permissions hold for it, too."""
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3 of the interface, and this process
    nothing = bytes(24)  # no capability is effective, permitted or inheritable
    if os.getuid() == 0 and ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def become(job, files):
    """Turns a forked process into the command. Does not return."""
    status = 1
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES * 2**20, MEGABYTES * 2**20))
        if job["unprivileged"]:
            drop_privileges()
        sys.argv = [job["module"], *map(os.fsdecode, map(bytes.fromhex, job["arguments"]))]
        warnings.simplefilter("default")
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):  # as the interpreter does
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001 - whatever it is, it is the result
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(job, folder):
    """Returns the outcome of one command."""
    paths = [folder / "stdout", folder / "stderr"]
    files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in paths]
    begun = time.monotonic()
    process = os.fork()
    if not process:
        become(job, files)
    for file in files:
        os.close(file)
    late = False
    while not (ended := os.wait4(process, os.WNOHANG))[0]:
        if time.monotonic() - begun > PATIENCE and not late:
            os.kill(process, signal.SIGKILL)
            late = True
        time.sleep(0.005)
    return {
        "status": None if late else os.waitstatus_to_exitcode(ended[1]),
        "stdout": paths[0].read_text(errors="backslashreplace"),
        "stderr": paths[1].read_text(errors="backslashreplace"),
        "seconds": round(ended[2].ru_utime + ended[2].ru_stime, 2),
        "megabytes": ended[2].ru_maxrss // 1024,
    }


def main():
    """Runs all jobs."""
    jobs, outcomes = map(pathlib.Path, sys.argv[1:])
    prepare()
    folder = outcomes.parent
    done = [run(job, folder) for job in json.loads(jobs.read_text())]
    outcomes.write_text(json.dumps(done))


if __name__ == "__main__":
    main()
