"""Starts a job of several processes on this machine.

    python -m strategies.launch --workers=2 SCRIPT --flags...
    python -m strategies.launch --workers=2 --ps=1 SCRIPT --flags...

Every process runs the same script and finds the others through its `TF_CONFIG`. Without parameter
servers, all workers take the same steps, and when one fails, the others are stopped. With
parameter servers (`--ps`), a chief is started as well and runs the training, and a worker that is
killed is restarted, up to three times. SIGINT and SIGTERM are forwarded to all workers, or to the
chief, which saves before the servers and workers that hold its variables are stopped. The exit code
is that of the first process that failed.
"""

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, NamedTuple

# Time between SIGTERM and SIGKILL, so that a process can finish writing a checkpoint.
GRACE_SECS = 30.0
MAX_RESTARTS = 3  # restarts allowed per worker, in a job with parameter servers


class Task(NamedTuple):
    """One process of a job."""

    kind: str  # "worker", "chief" or "ps"
    task_id: int  # index among the tasks of its kind, from 0

    def __str__(self) -> str:
        """Returns the name that starts each line of the task's output."""
        return f"{self.kind} {self.task_id}"


class Job:
    """The processes of a job.

    Args:
        command: the command that every process runs.
        workers: number of processes that take training steps.
        servers: number of parameter servers; 0 for a job without them.
        out: a text stream that the processes' output is written to.
    """

    def __init__(self, command: Sequence[str], workers: int, servers: int, out: IO[str]) -> None:
        """Lists the tasks and chooses a port for each; `run` starts the processes."""
        kinds = {"worker": workers} | ({"chief": 1, "ps": servers} if servers else {})
        self.tasks = [Task(kind, index) for kind, count in kinds.items() for index in range(count)]
        ports = iter(free_ports(len(self.tasks)))
        self.cluster = {
            kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for kind, count in kinds.items()
        }
        self._command = list(command)
        self._out = out
        self._output_lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._restarts = dict.fromkeys(self.tasks, 0)
        self._stop_asked = False
        self.processes: dict[Task, subprocess.Popen[str]] = {}

    def start(self, task: Task) -> None:
        """Starts one process and a thread that forwards its output."""
        config = {"cluster": self.cluster, "task": {"type": task.kind, "index": task.task_id}}
        process = subprocess.Popen(  # noqa: S603  # the user's own command
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=os.environ | {"TF_CONFIG": json.dumps(config)},
            start_new_session=True,  # otherwise the process would get Ctrl-C twice
        )
        self.processes[task] = process
        reader = threading.Thread(
            target=self._forward_output, args=(task, process.stdout), daemon=True
        )
        reader.start()
        self._readers.append(reader)

    def run(self) -> int:
        """Starts all processes, waits for the end of the job and returns its exit code."""
        try:
            for task in self.tasks:
                if not self._stop_asked:
                    self.start(task)
            failed = self._wait()
        finally:
            self._stop_all()
        for reader in self._readers:
            reader.join(GRACE_SECS)
        if failed is None:
            return 0
        code = self.processes[failed].returncode
        if self._stop_asked:
            self.write_line(f"The job was stopped, as asked: {failed} {describe_exit(code)}.")
        else:
            self.write_line(
                f"{failed} failed first: it {describe_exit(code)}. The other processes were "
                "stopped."
            )
        return code if code >= 0 else 128 - code

    def ask_to_stop(self, number: int) -> None:
        """Sends a signal to the processes that save the run: the chief, or else all workers."""
        self._stop_asked = True
        chief = self.processes.get(Task("chief", 0))
        if chief is None:  # there is none, or it has not been started yet
            self.signal_all(number)
        elif chief.poll() is None:
            chief.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Sends a signal to all processes that are still running."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def write_line(self, line: str) -> None:
        """Writes a line that no other thread's output can interrupt.

        The job goes on if nobody reads the output any more, as in `... | head`.
        """
        with self._output_lock:
            try:
                self._out.write(f"{line}\n")
                self._out.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def _wait(self) -> Task | None:
        """Waits until the job ends; returns the first process that failed, or None."""
        has_chief = "chief" in self.cluster
        while True:
            codes = {task: each.poll() for task, each in self.processes.items()}
            failed = [task for task, code in codes.items() if code]
            for task in list(failed):
                killed = (codes[task] or 0) < 0
                can_restart = has_chief and task.kind == "worker" and not self._stop_asked
                if killed and can_restart and self._restarts[task] < MAX_RESTARTS:
                    self._restarts[task] += 1
                    self.write_line(f"{task} {describe_exit(codes[task])}. Restarting it.")
                    self.start(task)
                    failed.remove(task)
            if failed:
                # The loss of one process makes others fail within moments. A process that was
                # killed or crashed is the likely cause, so it counts as the first to fail.
                return min(failed, key=lambda task: (codes[task] not in (-9, -11, -6), task))
            awaited = [Task("chief", 0)] if has_chief else self.tasks
            if all(codes.get(task) == 0 for task in awaited):
                return None
            if self._stop_asked and None not in codes.values():
                return None
            time.sleep(0.05)

    def _stop_all(self) -> None:
        """Sends SIGTERM to all processes, and SIGKILL to those that do not end in time."""
        self.signal_all(signal.SIGTERM)
        end = time.monotonic() + GRACE_SECS
        for process in self.processes.values():
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _forward_output(self, task: Task, lines: IO[str]) -> None:
        """Writes the output of a process, each line after the name of its task."""
        with lines:
            for line in lines:
                self.write_line(f"[{task}] {line.rstrip()}")


def describe_exit(code: int | None) -> str:
    """Returns a description of how a process ended.

    Example:
        >>> describe_exit(1), describe_exit(-9)
        ('exited with code 1', 'was killed by SIGKILL')
    """
    if code is not None and code < 0:
        named = {number.value: number.name for number in signal.Signals}  # not those of real time
        return f"was killed by {named.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that no process listens on.

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
    """Parses the command line, runs the job and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m strategies.launch",
        description="Starts a job of several processes on this machine.",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="number of processes that take training steps"
    )
    parser.add_argument("--ps", type=int, default=0, help="number of parameter servers; 0 for none")
    parser.add_argument("script", help="the Python script that each process runs")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script")
    chosen = parser.parse_args(arguments)
    command = [sys.executable, "-u", chosen.script, *chosen.flags]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may lack a character
    job = Job(command, chosen.workers, chosen.ps, sys.stdout)

    def forward_signal(number: int, frame: FrameType | None) -> None:
        del frame
        job.ask_to_stop(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward_signal)
    return job.run()


if __name__ == "__main__":
    sys.exit(main())
