"""A worker or server serves until its chief has ended; whole jobs are in test_parameter_server.py."""

import os
import signal
import time

import pytest

from strategies import serving
from strategies.launch import free_ports
from strategies.liveness import Answer


@pytest.fixture
def chief(monkeypatch):
    """The answers of a chief, one for each question; the last one is repeated."""
    answers = []
    monkeypatch.setattr(serving, "POLL_SECS", 0.01)
    monkeypatch.setattr(serving, "ASK_SECS", 0.0)
    monkeypatch.setattr(serving, "SILENT_SECS", 0.3)
    monkeypatch.setattr(serving, "GRACE_SECS", 0.6)
    monkeypatch.setattr(
        serving, "ask", lambda _: answers.pop(0) if len(answers) > 1 else answers[0]
    )
    return answers


@pytest.fixture
def signals():
    """Stop requests, whose handlers are removed after the test."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield serving.StopRequests()
    for each, handler in before.items():
        signal.signal(each, handler)


def test_it_ends_with_the_chief(chief, signals):
    """A chief that has ended leaves nothing to serve: 0."""
    chief += [Answer.ALIVE] * 5 + [Answer.REFUSED]
    assert serving.wait_for_end("chief:1", "worker 0", signals) == 0


def test_a_chief_that_does_not_answer_is_named(chief, signals, caplog):
    """It is running, so something is wrong with it: an error, and 75. A short silence is none."""
    chief += [Answer.ALIVE] * 3 + [Answer.SILENT] * 3 + [Answer.ALIVE] * 3 + [Answer.SILENT]
    assert serving.wait_for_end("chief:1", "worker 0", signals) == 75
    assert "The chief at chief:1 has not answered for" in caplog.text
    assert "so worker 0 ends" in caplog.text


def test_after_a_signal_it_serves_a_chief_that_saves(chief, signals):
    """The first signal does not end it while the chief answers; the chief's end does: 75."""
    chief += [Answer.ALIVE] * 10 + [Answer.REFUSED]
    os.kill(os.getpid(), signal.SIGTERM)
    assert serving.wait_for_end("chief:1", "worker 0", signals) == 75
    assert chief == [Answer.REFUSED]


def test_after_a_signal_it_waits_only_so_long(chief, signals):
    """A chief that goes on for ever is not served for ever."""
    chief += [Answer.ALIVE]
    os.kill(os.getpid(), signal.SIGINT)
    began = time.monotonic()
    assert serving.wait_for_end("chief:1", "worker 0", signals) == 75
    assert time.monotonic() - began >= 0.6


def test_the_second_signal_ends_it(signals):
    """Without waiting for anything."""
    signals._note(signal.SIGTERM, None)
    with pytest.raises(SystemExit) as ended:
        signals._note(signal.SIGINT, None)
    assert ended.value.code == 128 + signal.SIGINT


def test_a_chief_that_never_comes(monkeypatch, signals, caplog):
    """It is named while a worker waits, and after the whole time in an error; a signal ends the
    wait.
    """
    monkeypatch.setattr(serving, "POLL_SECS", 0.01)
    monkeypatch.setattr(serving, "WAIT_SECS", 0.2)
    monkeypatch.setattr(serving, "WARN_INTERVAL_SECS", 0.1)
    chief = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(TimeoutError, match=f"the chief at {chief}"):
        serving.wait_for_chief(chief, "ps 0", signals)
    assert f"Still waiting for the chief at {chief} after 0 s." in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        serving.wait_for_chief(chief, "ps 0", signals)
    assert ended.value.code == 75
