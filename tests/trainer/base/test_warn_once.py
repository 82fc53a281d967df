"""Warnings are not repeated."""

from trainer.base.warn_once import listed, warn_once


def test_a_warning_is_logged_once(caplog):
    """The same message is logged once, even with a percent sign; another message is logged too."""
    for message in ("a: 100% of it", "b", "a: 100% of it"):
        warn_once(message)

    assert [record.getMessage() for record in caplog.records] == ["a: 100% of it", "b"]


def test_listed():
    """A few names are listed, and the others counted."""
    assert listed(["a"]) == "'a'"
    assert listed(["a", "b"]) == "'a' and 'b'"
    assert listed(["a", "b", "c"], shown=2) == "'a', 'b' and 1 more"
