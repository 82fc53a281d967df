"""Odd texts for every flag: absl or this project refuses each with a clear error, or its meaning is
documented.

To see a case again: `odd_flags.outcome(flag, text)`.
"""

import pytest
from chaos import odd_flags, outcomes

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = 5  # for each flag
PARTS = 2


def check(cases, monkeypatch, folder, part=None, request=None):
    """Asserts that all cases are clear or documented, and that their number is in the table."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    found, wrong = [], []
    for flag, text in cases:
        result, why = odd_flags.outcome(flag, text)
        found.append(("text of a flag", result))
        if result in {"obscure", "silent"}:
            wrong.append(f"{result}: --{flag}={text}: {why}")
    outcomes.check(found, wrong, "flags", part, request)


@pytest.mark.slow
def test_a_few_texts(tmp_path, monkeypatch):
    """One for every twentieth flag."""
    cases = [(flag, odd_flags.drawn(flag, 1)[0]) for flag in odd_flags.names()[::20]]
    check(cases, monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_texts(tmp_path, monkeypatch, request, part):
    """Several for every flag."""
    cases = [
        (flag, text)
        for flag in odd_flags.names()[part::PARTS]
        for text in odd_flags.drawn(flag, TEXTS)
    ]
    check(cases, monkeypatch, tmp_path, part, request)
