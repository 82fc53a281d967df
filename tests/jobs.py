"""Runs jobs of several processes on this machine. No process outlives its test."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from strategies.launch import free_ports

TESTS = pathlib.Path(__file__).parent


class Workers:
    """The running processes of a job, one for each worker."""

    def __init__(self, out, count, script, *arguments):
        """Starts the processes, each with its own folder for its output and temporary files.

        Args:
            out: the folder that holds the folders of all workers.
            count: number of workers.
            script: the file in `tests/` that each worker runs.
            *arguments: command-line arguments of the script.
        """
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.output_files = [out / f"output-{index}.txt" for index in range(count)]
        self.work_dirs = [out / f"worker-{index}" for index in range(count)]
        self.processes = []
        for index in range(count):
            shutil.rmtree(self.work_dirs[index], ignore_errors=True)  # left by a killed job
            self.work_dirs[index].mkdir()
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            environment = {
                "PYTHONPATH": str(TESTS.parent),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps(task),
                "TMPDIR": str(self.work_dirs[index]),
            }
            with self.output_files[index].open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(TESTS / script), *map(str, arguments)],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        cwd=self.work_dirs[index],
                        env=os.environ | environment,
                    )
                )
        self.addresses = addresses

    def wait_until(self, condition, seconds=90):
        """Waits for a condition; fails if a process ends first or the time is over."""
        end = time.monotonic() + seconds
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.01)

    def wait(self, seconds=120):
        """Waits until all processes have ended; returns their exit codes."""
        end = time.monotonic() + seconds
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in self.processes]

    def output(self):
        """Returns the last 3000 characters that each process has printed."""
        return "\n".join(path.read_text()[-3000:] for path in self.output_files)


@contextlib.contextmanager
def workers(out, count, script, *arguments):
    """Starts a job of workers; kills those that are still running on leaving the context."""
    started = Workers(out, count, script, *arguments)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
        for process in started.processes:
            process.wait()
