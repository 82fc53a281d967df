"""Jobs of several processes on this machine, none of which outlives its test."""

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
    """Started worker processes; `ended` waits for them."""

    def __init__(self, out, count, script, *arguments):
        """Each has a working directory and a directory for temporary files of its own."""
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.printed = [out / f"printed-{index}.txt" for index in range(count)]
        self.own = [out / f"own-{index}" for index in range(count)]
        self.processes = []
        for index in range(count):
            shutil.rmtree(self.own[index], ignore_errors=True)  # a killed job's
            self.own[index].mkdir()
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            environment = {
                "PYTHONPATH": str(TESTS.parent),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps(task),
                "TMPDIR": str(self.own[index]),
            }
            with self.printed[index].open("w") as printed:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(TESTS / script), *map(str, arguments)],
                        stdout=printed,
                        stderr=subprocess.STDOUT,
                        cwd=self.own[index],
                        env=os.environ | environment,
                    )
                )
        self.addresses = addresses

    def wait_until(self, condition, seconds=90):
        """Waits for a condition; fails if a process ends before, or it takes too long."""
        end = time.monotonic() + seconds
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.words()
            assert time.monotonic() < end, self.words()
            time.sleep(0.01)

    def ended(self, seconds=120):
        """Waits for all; returns their exit codes."""
        end = time.monotonic() + seconds
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in self.processes]

    def words(self):
        """What they have printed."""
        return "\n".join(path.read_text()[-3000:] for path in self.printed)


@contextlib.contextmanager
def workers(out, count, script, *arguments):
    """Starts workers; kills those that are left in the end."""
    started = Workers(out, count, script, *arguments)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
        for process in started.processes:
            process.wait()
