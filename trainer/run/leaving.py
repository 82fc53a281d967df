"""Leaves what blocks a run that was asked to stop: data that does not come, hooks that do not end.

The signal's thread calls `Leaving.attempt` some time after the signal, again and again, until the
run has ended. Code in Python is left by an exception, which the signal's handler raises in the main
thread. Code in C++, in which no handler runs, cannot be left: the run is then saved in the signal's
thread while the main thread is held back, and the process ends.
"""

import contextlib
import enum
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple, NoReturn

from trainer.run.stop_signals import EXIT_CODE, StopSignals

USER_SECS = 5.0  # how long code of the user may always take, even long after the signal
REACH_SECS = 3.0  # after this time without an answer, the main thread is in C++


class LeftError(BaseException):
    """Raised in code of the user that does not end. Not an Exception, which that code may catch."""


class Phase(enum.Enum):
    """What the main thread does."""

    STARTING = "before the first step"  # nothing has changed since the newest checkpoint
    STEPS = "waiting for data"  # in an inner loop
    USER = "in a hook, an action, a callback or an evaluation"  # between two steps
    OTHER = "saving"  # is not left


class Now(NamedTuple):
    """The phase, and since when the main thread is in it: the value of `time.monotonic()`."""

    phase: Phase
    since: float


class Leaving:
    """Leaves what the main thread is in.

    Args:
        signals: the run's stop signals. None: nothing is ever left.
    """

    def __init__(self, signals: StopSignals | None = None) -> None:
        """Begins with `Phase.STARTING`."""
        self._signals = signals or StopSignals(lambda: None)  # without effect if not entered
        self._now = Now(Phase.STARTING, time.monotonic())
        self._hold: Callable[[], bool] = lambda: False  # see `in_steps`
        self._save: Callable[[Phase], str] | None = None  # see `begin`
        self._skip_position: Callable[[], object] = lambda: None  # see `begin`
        self._lock = threading.Lock()  # of the two fields below
        self._answered = False  # whether the main thread has run the handler
        self._taken_over = False  # whether the signal's thread saves the run and ends the process
        self._signals.leave, self._signals.on_main = self.attempt, self._in_main_thread

    def begin(self, save: Callable[[Phase], str], skip_position: Callable[[], object]) -> None:
        """Notes that there is something to save from here on.

        Args:
            save: saves the run, called in another thread than the main one, with the phase in which
                that is held back. Returns what to tell the user.
            skip_position: called while the main thread saves. Saving may wait for data, because of
                the position in them; this makes it go on without.
        """
        self._save, self._skip_position = save, skip_position
        self._enter(Phase.OTHER)

    def call(self, function: Callable[[], object]) -> None:
        """Calls code of the user, which may be left.

        Args:
            function: has no arguments and no result.
        """
        try:
            try:
                self._enter(Phase.USER)
                function()
            finally:
                self._enter(Phase.OTHER)
        except LeftError as error:
            self._enter(Phase.OTHER)
            sys.stderr.write(f"{error}\n")

    @contextlib.contextmanager
    def in_steps(self, hold: Callable[[], bool]) -> Iterator[None]:
        """Context manager for an inner loop.

        Args:
            hold: keeps the loop from its next step if it waits for data; returns whether it does.
        """
        self._hold = hold
        self._enter(Phase.STEPS)
        try:
            yield
        except Exception:
            with self._lock:  # the batch may have arrived after `hold`, and before or after this
                taken_over = self._taken_over
                self._enter(Phase.OTHER)
            if taken_over:
                wait_for_the_end()
            raise
        self._enter(Phase.OTHER)

    def attempt(self) -> None:
        """Leaves what the main thread is in, if that is possible. The signal's thread calls it."""
        phase, since = self._now
        terminated = self._signals.received is signal.SIGTERM
        if phase is Phase.USER and time.monotonic() - since >= USER_SECS:
            if not self._reaches_main_thread() and terminated:
                self._take_over(phase)
        elif phase is Phase.STARTING and terminated:
            end("stopped, as asked: nothing new had to be saved")
        elif phase is Phase.STEPS and terminated and self._hold():
            self._take_over(phase)
        elif phase is Phase.OTHER and terminated:
            self._skip_position()

    def end_process(self, *, others: bool, blocked: bool) -> None:
        """Ends the process if a stop signal was received, after everything is saved.

        Args:
            others: whether another worker has received a signal.
            blocked: whether the data may be blocked: its iterator cannot be deleted then, and the
                process would not end.
        """
        asked = self._signals.received or others
        if blocked and asked and asked is not signal.SIGINT:
            end("data that did not come after the stop signal was given up")
        self._signals.end_process(others=others)

    def others_ended(self, message: str) -> None:
        """Ends the process if SIGTERM was received: that is why another worker has ended, too.

        Args:
            message: tells the user what was saved.
        """
        if self._signals.received is signal.SIGTERM:
            end(message)

    def _enter(self, phase: Phase) -> None:
        self._now = Now(phase, time.monotonic())

    def _reaches_main_thread(self) -> bool:
        """Has the main thread run the handler; returns whether it did."""
        self._answered = False
        self._signals.wake_main_thread()
        end = time.monotonic() + REACH_SECS
        while time.monotonic() < end:
            if self._answered:
                return True
            time.sleep(0.01)
        with self._lock:
            self._taken_over = not self._answered
        return not self._taken_over

    def _in_main_thread(self, frame: FrameType | None) -> None:
        """The handler: raises if the main thread is in code of the user."""
        with self._lock:
            self._answered, taken_over = True, self._taken_over
        if taken_over:
            wait_for_the_end()
        if self._now.phase is Phase.USER:
            self._enter(Phase.USER)  # USER_SECS for `finally` blocks before the next error
            raise LeftError(f"left code that did not end after the stop signal{place_of(frame)}")

    def _take_over(self, phase: Phase) -> None:
        """Saves the run and ends the process."""
        with self._lock:
            if self._now.phase is not phase:
                return
            self._taken_over = True
        message = "the run could not be saved"
        try:
            if self._save:
                message = self._save(phase)
        except BaseException:  # noqa: BLE001  # nobody above could handle it
            traceback.print_exc()
            end(f"{message}: the newest checkpoint is an earlier one")
        end(message)


def place_of(frame: FrameType | None) -> str:
    """Returns where a program is, as text: its last line outside of Python's own library."""
    library = sysconfig.get_path("stdlib")
    for each in reversed(traceback.extract_stack(frame)):
        if not each.filename.startswith((library, "<")):
            return f", at {each.filename}:{each.lineno}"
    return ""


def wait_for_the_end() -> NoReturn:
    """Waits until another thread ends the process."""
    while True:
        time.sleep(1.0)


def end(message: str) -> NoReturn:
    """Ends the process although its main thread is blocked.

    Args:
        message: what to tell the user.
    """
    for child in multiprocessing.active_children():  # they would outlive a process that ends so
        child.terminate()
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)
