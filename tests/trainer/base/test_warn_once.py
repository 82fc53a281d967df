"""Warnings are not repeated."""

from trainer.base.warn_once import warn_once


def test_a_warning_is_logged_once(caplog):
    """The same message is logged once, even with a percent sign; another message is logged too."""
    for message in ("a: 100% of it", "b", "a: 100% of it"):
        warn_once(message)

    assert [record.getMessage() for record in caplog.records] == ["a: 100% of it", "b"]
