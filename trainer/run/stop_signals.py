"""SIGTERM and SIGINT during a run: the first one saves and stops, the second exits at once.

What blocks the run after the first one is left after some time; see `run/leaving.py`.

Python runs a signal handler only between two bytecode instructions, so a handler would have to wait
until a graph call returns. The interpreter's C handler, however, writes the signal's number to a
socket at once (`signal.set_wakeup_fd`), and a thread reads it from there.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

# EX_TEMPFAIL of sysexits.h: a temporary failure, run the command again.
EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long the run may take to stop. Kubernetes kills 30 s after SIGTERM; saving takes time, too.
STOP_SECS = 15.0
AGAIN_SECS = 1.0  # time between two attempts to leave what blocks the run

# The type of the handlers that `signal.signal` takes and returns.
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignals:
    """Context manager: the first stop signal calls a function, the second ends the process.

    Only a process's main thread may handle signals. In any other thread, the context does nothing.

    Args:
        request_stop: called at the first signal, in a thread of its own.
    """

    def __init__(self, request_stop: Callable[[], object]) -> None:
        """Stores the function; `__enter__` installs the handlers."""
        self._request_stop = request_stop
        self._handlers: dict[signal.Signals, Handler] = {}
        self.received: signal.Signals | None = None
        # Called from `STOP_SECS` after the first signal on, in the thread of `request_stop`.
        self.leave: Callable[[], object] = lambda: None
        # Called in the main thread after `wake_main_thread`, with the frame that it was in.
        self.on_main: Callable[[FrameType | None], object] | None = None
        self._own = 0  # signals of `wake_main_thread` that the thread has not read
        self._woken = False  # whether the main thread has not handled such a signal yet
        self._leave_at: float | None = None  # when to call `leave`: a value of `time.monotonic()`

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restores the previous handlers."""
        self.close()

    def close(self) -> None:
        """Restores the previous handlers, and waits until earlier signals have been handled."""
        if self._handlers:
            self.restore_handlers()
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

    def wake_main_thread(self) -> None:
        """Has the main thread call `on_main` as soon as it runs Python code."""
        self._own += 1
        self._woken = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Leaves the signal to the thread that reads the socket, unless that one has sent it."""
        del number
        if self._woken and self.on_main:
            self._woken = False
            self.on_main(frame)

    def _listen(self) -> None:
        """Reads signal numbers, one byte each, until the other end of the socket is closed."""
        while byte := self._next_byte():
            if byte[0] not in SIGNALS:
                continue
            if self._own:
                self._own -= 1
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
            self._leave_at = time.monotonic() + STOP_SECS
            self._request_stop()
        self._reader.close()

    def _next_byte(self) -> bytes:
        """Waits for a byte, and leaves what blocks the run when the time is over."""
        while True:
            left = self._leave_at and self._leave_at - time.monotonic()
            if left is not None and left <= 0:
                self._leave_at = time.monotonic() + AGAIN_SECS
                self.leave()
                continue
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
