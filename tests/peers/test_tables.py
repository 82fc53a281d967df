"""The tables of `docs/peers_tests.md` agree with the tests and, for Keras, with the installed package."""

import ast
import functools
import pathlib
import re
from collections import Counter

import keras
import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs/peers_tests.md").read_text()
OUTCOMES = ["passes", "different by design", "not applicable", "open"]


def rows_of(text):
    """The cells of the rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def suites():
    """Title, test file and rows of each suite: those of its table, and the cases that pass."""
    for section in PAGE.split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        [file] = re.findall(r"^Tests: \[`tests/peers/(\w+\.py)`\]", rest, re.MULTILINE)
        listed = re.search(r"^Passes: (.*?)\.$", rest, re.MULTILINE | re.DOTALL)
        pairs = re.split(r";\s", listed[1]) if listed else []
        yield title, file, [*rows_of(rest), *([*pair.split(":", 1), "passes"] for pair in pairs)]


def outcome_of(text):
    """The word with which an outcome begins."""
    [word] = [each for each in OUTCOMES if re.match(rf"{each}($|: .)", text)]
    return word


@functools.cache
def names_in(path):
    """The names of a test file's tests."""
    names = (node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name"))
    return {name for name in names if name.startswith("test_")}


def test_counts():
    """The first table counts what the others list."""
    expected, total = [], Counter()
    for title, _, rows in suites():
        counts = Counter(outcome_of(outcome) for *_, outcome in rows)
        total += counts
        expected.append([title, len(rows), *(counts[each] for each in OUTCOMES)])
    expected.append(["**all**", total.total(), *(total[each] for each in OUTCOMES)])

    assert rows_of(PAGE.split("\n## ")[0]) == [list(map(str, row)) for row in expected]


@pytest.mark.parametrize(
    ("title", "file", "rows"), list(suites()), ids=lambda value: str(value)[:40]
)
def test_every_case_has_its_tests(title, file, rows):
    """A case that passes or differs by design names tests that exist; no case stands twice."""
    assert len({case for case, *_ in rows}) == len(rows), title
    for case, tests, outcome in rows:
        named = re.findall(r"`(?:([\w/]+\.py)::)?(\w+)`", tests)
        for other, name in named:
            assert name in names_in(ROOT / other if other else HERE / file), case
        assert bool(named) == (outcome_of(outcome) in OUTCOMES[:2]), case


def test_every_test_has_its_case():
    """A test in this folder stands in a table."""
    named = {}
    for _, file, rows in suites():
        named.setdefault(file, set()).update(re.findall(r"`(test_\w+)`", str([r[1] for r in rows])))
    files = {path.name for path in HERE.glob("test_*.py")} - {"test_tables.py"}

    assert set(named) == files
    for file, tests in named.items():
        assert names_in(HERE / file) == tests, file


def cases_in(path):
    """The cases of a test file of Keras."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(b) for b in node.bases):
            functions = (each for each in node.body if isinstance(each, ast.FunctionDef))
            yield from (each.name for each in functions if each.name.startswith("test_"))


def test_every_case_of_keras_has_a_row():
    """The suites of one file of Keras list all of its cases."""
    source = pathlib.Path(keras.__file__).parent / "src"
    compared = []
    for title, _, rows in suites():
        files = re.findall(r"[\w/]+_test\.py", title)
        if title.startswith(f"Keras {keras.__version__}, ") and ":" not in title:
            path = source / files[0]
            if not path.exists():
                pytest.skip("this Keras is installed without its tests")
            assert sorted(cases_in(path)) == sorted(case.strip("`") for case, *_ in rows), title
            compared.append(title)

    assert len(compared) == 7
