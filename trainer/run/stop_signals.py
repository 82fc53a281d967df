"""SIGTERM and SIGINT during a run: the first one saves and stops, the second exits at once.

A run that has not stopped some time after SIGTERM, because its data or a hook blocks, ends at its
newest checkpoint.

Python runs a signal handler only between two bytecode instructions, so a handler would have to wait
until a graph call returns. The interpreter's C handler, however, writes the signal's number to a
socket at once (`signal.set_wakeup_fd`), and a thread reads it from there.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Self

# EX_TEMPFAIL of sysexits.h: a temporary failure, run the command again.
EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long a run may take to stop, without the time in which it saves. Kubernetes kills after 30 s.
GRACE_SECS = 15.0

# The type of the handlers that `signal.signal` takes and returns.
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignals:
    """Context manager: the first stop signal calls a function, the second ends the process.

    `GRACE_SECS` after SIGTERM, the process ends with EXIT_CODE if the context has not ended by then
    and nothing is being saved. Only a process's main thread may handle signals. In any other
    thread, the context does nothing.

    Args:
        request_stop: called at the first signal, in a thread of its own.
    """

    def __init__(self, request_stop: Callable[[], object]) -> None:
        """Stores the function; `__enter__` installs the handlers."""
        self._request_stop = request_stop
        self._handlers: dict[signal.Signals, Handler] = {}
        self.received: signal.Signals | None = None
        self._deadline: float | None = None  # a value of `time.monotonic()`
        self._saving = False

    def __enter__(self) -> Self:
        """Installs a handler for both signals and starts the thread that reads them."""
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, daemon=True)
            self._thread.start()
            self._handlers = {each: signal.signal(each, self._handle) for each in SIGNALS}
            ACTIVE.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Restores the previous handlers."""
        self.close()

    def close(self) -> None:
        """Restores the previous handlers, and waits until earlier signals have been handled."""
        if self._handlers:
            self.restore_handlers()
            self._deadline = None
            self._writer.shutdown(socket.SHUT_WR)  # ends the thread after the last byte
            self._thread.join()
            self._writer.close()

    def restore_handlers(self) -> None:
        """Restores the previous handlers and the previous wakeup descriptor."""
        if self._handlers:
            for each, handler in self._handlers.items():
                # None stands for a handler that C code installed, which Python cannot restore.
                signal.signal(each, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._wakeup)
        self._handlers = {}

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager for writing files, which may take as long as it needs."""
        self._saving = True
        try:
            yield
        finally:
            if self._deadline:
                self._deadline = time.monotonic() + GRACE_SECS
            self._saving = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Does nothing: the thread that reads the socket handles the signal."""

    def _listen(self) -> None:
        """Reads signal numbers, one byte each, until the other end of the socket is closed."""
        while byte := self._next_byte():
            if byte[0] not in SIGNALS:
                continue
            if self.received:
                # Exit even if the write below fails or blocks, for example on a full pipe.
                threading.Timer(0.5, os._exit, [128 + byte[0]]).start()
                sys.stderr.write("second stop signal: exiting at once, nothing more is saved\n")
                sys.stderr.flush()
                # Not sys.exit, because it would end only this thread. Exiting here is safe: a
                # half-written checkpoint has a temporary name, and the next run removes it.
                os._exit(128 + byte[0])
            self.received = signal.Signals(byte[0])
            if self.received is signal.SIGTERM:
                self._deadline = time.monotonic() + GRACE_SECS
            self._request_stop()
        self._reader.close()

    def _next_byte(self) -> bytes:
        """Waits for a byte. Ends the process if the grace time is over before."""
        while True:
            left = self._deadline and self._deadline - time.monotonic()
            if left is not None and left <= 0:
                if not self._saving:
                    end(f"not stopped within {GRACE_SECS:g} s: ends at the newest checkpoint")
                left = 1.0
            self._reader.settimeout(left)
            with contextlib.suppress(TimeoutError):
                return self._reader.recv(1)

    def end_process(self, *, others: bool = False) -> None:
        """Ends the process if a stop signal was received. Call it after everything is saved.

        Args:
            others: whether another worker has received a signal.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM, with EXIT_CODE.
        """
        self.close()  # later signals are handled as if there were no run
        if self.received is signal.SIGINT:
            interrupt, show = KeyboardInterrupt(), sys.excepthook
            # A traceback below the run's summary would look like a failure.
            sys.excepthook = lambda *info: None if info[1] is interrupt else show(*info)
            raise interrupt
        if self.received or others:
            sys.exit(EXIT_CODE)


def end(message: str) -> NoReturn:
    """Ends the process with EXIT_CODE although its main thread may be blocked.

    Args:
        message: what to tell the user.
    """
    for child in multiprocessing.active_children():  # they would outlive a process that ends so
        child.terminate()
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


# Contexts that were entered in this process; `restore_handlers` does nothing for closed ones.
ACTIVE: "weakref.WeakSet[StopSignals]" = weakref.WeakSet()


def restore_handlers_in_child() -> None:
    """Restores the previous handlers in a forked process.

    The child shares the socket with its parent. Without this function, the parent would react to
    signals that were sent to the child.
    """
    for each in list(ACTIVE):
        each.restore_handlers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=restore_handlers_in_child)
