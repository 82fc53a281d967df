"""Data that no step can take is refused with an error that says what to do; nothing is taken for
something else without a word.

A case is "clear", "documented", "obscure" or "silent", as in `test_inputs`. To see one again:
`odd_data.outcome(method, form, code, documented)`.
"""

import pytest
from chaos import odd_data, outcomes

pytestmark = pytest.mark.filterwarnings("ignore")
DRAWN = 100
PARTS = 4


def check(cases, monkeypatch, folder, part=None, request=None):
    """Asserts that all cases are clear or documented, and that their number is in the table."""
    monkeypatch.chdir(folder)
    found, wrong = [], []
    for kind, method, form, code, documented in cases:
        result, why = odd_data.outcome(method, form, code, documented)
        found.append((kind, result))
        if result in {"obscure", "silent"}:
            wrong.append(f"{result}: {method}({code}): {why}")
    outcomes.check(found, wrong, "data", part, request)


@pytest.mark.thorough
def test_a_few_kinds_of_data(tmp_path, monkeypatch):
    """One case of each kind, and a few at random."""
    first = {case[0]: case for case in odd_data.by_hand()}
    check([*first.values(), *map(odd_data.drawn, range(4))], monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_data(tmp_path, monkeypatch, request, part):
    """All cases by hand, and many at random."""
    cases = [*odd_data.by_hand(), *map(odd_data.drawn, range(DRAWN))]
    check(cases[part::PARTS], monkeypatch, tmp_path, part, request)
