"""Starts a job of several processes on this machine.

    python -m strategies.launch --workers=2 SCRIPT --flags...
    python -m strategies.launch --workers=2 --ps=1 SCRIPT --flags...

Every process runs the same script and finds the others by its `TF_CONFIG`. With parameter
servers there is one process more, the chief, who trains, and a worker that is killed is
started again; without, all take the same steps, and when one dies the others are ended. SIGINT and
SIGTERM are passed on to all. The exit code is that of the first process to fail.
"""

import argparse
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, NamedTuple

# How long a process may take to end when it is asked to, before it is killed: it may be saving.
GRACE = 30.0
MOST_RESTARTS = 3


class Task(NamedTuple):
    """One process of a job."""

    kind: str  # "worker", "chief" or "ps"
    number: int

    def __str__(self) -> str:
        """Returns what its lines begin with."""
        return f"{self.kind} {self.number}"


class Job:
    """The processes of a job, from their start until the last is gone.

    Args:
        command: what each of them runs.
        workers: how many take steps.
        servers: how many keep the parameters; 0 for none.
        out: where their lines go.
    """

    def __init__(self, command: Sequence[str], workers: int, servers: int, out: IO[str]) -> None:
        """Chooses the ports; starts nothing yet."""
        kinds = {"worker": workers} | ({"chief": 1, "ps": servers} if servers else {})
        self.tasks = [Task(kind, index) for kind, count in kinds.items() for index in range(count)]
        ports = iter(free_ports(len(self.tasks)))
        self.cluster = {
            kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for kind, count in kinds.items()
        }
        self._command = list(command)
        self._out = out
        self._writing = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._restarts = dict.fromkeys(self.tasks, 0)
        self.processes: dict[Task, subprocess.Popen[str]] = {}

    def start(self, task: Task) -> None:
        """Starts one process, and a thread that passes on its lines."""
        config = {"cluster": self.cluster, "task": {"type": task.kind, "index": task.number}}
        process = subprocess.Popen(  # noqa: S603  # what its user has typed
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=os.environ | {"TF_CONFIG": json.dumps(config)},
            start_new_session=True,  # or a terminal would send it Ctrl-C, too
        )
        self.processes[task] = process
        reader = threading.Thread(target=self._pass_on, args=(task, process.stdout), daemon=True)
        reader.start()
        self._readers.append(reader)

    def run(self) -> int:
        """Starts all and waits for them; returns the exit code."""
        try:
            for task in self.tasks:
                self.start(task)
            failed = self._wait()
        finally:
            self._end_all()
        for reader in self._readers:
            reader.join(GRACE)
        if failed is None:
            return 0
        code = self.processes[failed].returncode
        self.say(f"{failed} failed first, {how_it_ended(code)}; the others were ended")
        return code if code >= 0 else 128 - code

    def signal_all(self, number: int) -> None:
        """Sends a signal to all that are still there."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def say(self, line: str) -> None:
        """Writes a line, whole."""
        with self._writing:
            self._out.write(f"{line}\n")
            self._out.flush()

    def _wait(self) -> Task | None:
        """Waits until the job is over; returns the first process that failed, or None."""
        has_chief = "chief" in self.cluster
        while True:
            ended = {task: each.poll() for task, each in self.processes.items()}
            failed = [task for task, code in ended.items() if code]
            for task in list(failed):
                killed = (ended[task] or 0) < 0 and self._restarts[task] < MOST_RESTARTS
                if has_chief and task.kind == "worker" and killed:
                    self._restarts[task] += 1
                    self.say(f"{task} {how_it_ended(ended[task])}; it is started again")
                    self.start(task)
                    failed.remove(task)
            if failed:
                # Those that lose a peer fail within a moment: the first is whose code says most.
                return min(failed, key=lambda task: (ended[task] not in (-9, -11, -6), task))
            awaited = [Task("chief", 0)] if has_chief else self.tasks
            if all(ended[task] == 0 for task in awaited):
                return None
            time.sleep(0.05)

    def _end_all(self) -> None:
        """Asks those that are left to end, and kills those that do not."""
        self.signal_all(signal.SIGTERM)
        end = time.monotonic() + GRACE
        for process in self.processes.values():
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _pass_on(self, task: Task, lines: IO[str]) -> None:
        """Writes a process's lines, each under its name."""
        with lines:
            for line in lines:
                self.say(f"[{task}] {line.rstrip()}")


def how_it_ended(code: int | None) -> str:
    """Returns an exit code in words.

    Example:
        >>> how_it_ended(1), how_it_ended(-9)
        ('with exit code 1', 'killed by SIGKILL')
    """
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nobody listens on.

    Example:
        >>> len(set(free_ports(3)))
        3
    """
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, and runs the job."""
    parser = argparse.ArgumentParser(
        prog="python -m strategies.launch",
        description="Starts a job of several processes on this machine.",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that take steps")
    parser.add_argument("--ps", type=int, default=0, help="processes that keep the parameters")
    parser.add_argument("script", help="what each of them runs")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="its flags")
    chosen = parser.parse_args(arguments)
    if chosen.workers < 1:
        parser.error(f"--workers must be at least 1; got {chosen.workers}")
    if chosen.ps < 0:
        parser.error(f"--ps must be at least 0; got {chosen.ps}")
    if not pathlib.Path(chosen.script).is_file():
        parser.error(f"SCRIPT must be a file; there is no {chosen.script!r}")
    command = [sys.executable, "-u", chosen.script, *chosen.flags]
    job = Job(command, chosen.workers, chosen.ps, sys.stdout)

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        job.signal_all(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return job.run()


if __name__ == "__main__":
    sys.exit(main())
