"""SIGTERM and SIGINT while a run goes on: stop soon and save; asked twice, leave at once.

Python runs a signal's handler between two of its own instructions, and so only when a graph
call has returned. But the arrival itself is written to a socket at once, by the interpreter's
own handler in C (`signal.set_wakeup_fd`); a thread reads it there.
"""

import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

# 75 is EX_TEMPFAIL of sysexits.h: nothing is wrong, try again.
EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Within, the first signal calls a function, in a thread; the second ends the process.

    Signals belong to a process's main thread: in any other this does nothing.

    Args:
        ask_to_stop: what the first one calls.
    """

    def __init__(self, ask_to_stop: Callable[[], Any]) -> None:
        """Changes nothing yet."""
        self._ask_to_stop = ask_to_stop
        self._handlers: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        """Takes over both signals."""
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, daemon=True)
            self._thread.start()
            self._handlers = {each: signal.signal(each, leave_alone) for each in SIGNALS}
            ENTERED.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives them back to who had them."""
        self.close()

    def close(self) -> None:
        """Gives them back to who had them, and hears of those that have come before."""
        if self._handlers:
            self.give_back()
            self._writer.shutdown(socket.SHUT_WR)  # ends the thread when it has read what is left
            self._thread.join()
            self._writer.close()

    def give_back(self) -> None:
        """Gives both signals back to who had them."""
        if self._handlers:
            for each, handler in self._handlers.items():
                signal.signal(each, handler)
            signal.set_wakeup_fd(self._wakeup)
        self._handlers = {}

    def _listen(self) -> None:
        """Reads the numbers of signals, one byte each, until the other end is closed."""
        while byte := self._reader.recv(1):
            if byte[0] not in SIGNALS:
                continue
            if self.received:
                # Whatever becomes of the words: who reads them may be gone, or be waiting, too.
                threading.Timer(0.5, os._exit, [128 + byte[0]]).start()
                sys.stderr.write("asked a second time to stop: gone at once, nothing is saved\n")
                sys.stderr.flush()
                # Not sys.exit, which waits for the graph call. What is half written is beside its
                # place and will be removed.
                os._exit(128 + byte[0])
            self.received = signal.Signals(byte[0])
            self._ask_to_stop()
        self._reader.close()

    def end_process(self, *, others: bool = False) -> None:
        """Raises what a signal asks for, when all is saved; returns if none has come.

        Args:
            others: whether another worker has been sent one.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM, with EXIT_CODE.
        """
        self.close()  # what comes from now on is not for the run
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received or others:
            sys.exit(EXIT_CODE)


ENTERED: "weakref.WeakSet[StopSignals]" = weakref.WeakSet()


def give_back_in_child() -> None:
    """Lets a forked process die of its signals, and not tell its parent of them."""
    for each in list(ENTERED):
        each.give_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=give_back_in_child)


def leave_alone(number: int, frame: Any) -> None:
    """Handles a signal by doing nothing: the thread has been told of it."""
    del number, frame
