"""The matrix of versions: which cells there are, and how its results come into the table."""

import importlib.machinery
import importlib.util
import pathlib
import re
import tomllib

import pytest

from trainer.base.at_import import TRIED, numbers

ROOT = pathlib.Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("matrix", str(ROOT / ".ci" / "matrix"))
matrix = importlib.util.module_from_spec(importlib.util.spec_from_loader("matrix", LOADER))
LOADER.exec_module(matrix)

PAGE = (ROOT / "docs" / "versions.md").read_text()


def test_the_cells_have_the_oldest_and_the_newest_of_each():
    """Each Python of the classifiers, and the first and the last version that an import accepts without
    a word; both corners are cells.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [text.rsplit(" ", 1)[1] for text in project["classifiers"] if ":: Python ::" in text]
    tensorflows, keras = TRIED.values()

    assert {cell[0] for cell in matrix.CELLS} == set(pythons)
    tried = [(numbers(cell[1]), cell[2]) for cell in matrix.CELLS]
    assert {min(tried)[0], max(tried)[0]} == set(map(numbers, tensorflows))
    released = [numbers(version) for _, version in tried if version != matrix.NIGHTLY]
    assert (min(released), max(released)) == tuple(map(numbers, keras))
    corner = matrix.CELLS[0]
    assert (corner[0], numbers(corner[1]), numbers(corner[2])) == (
        pythons[0],
        numbers(tensorflows[0]),
        numbers(keras[0]),
    )
    corner = matrix.CELLS[-1]
    assert (corner[0], numbers(corner[1]), corner[2]) == (
        pythons[-1],
        numbers(tensorflows[1]),
        matrix.NIGHTLY,
    )


def test_no_row_of_the_table_is_red_without_a_reason():
    """The table's rows are cells of the matrix, and their failures are explained."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| 3\.\d", line)]

    assert {tuple(field.strip() for field in fields[:3]) for fields in rows} <= set(matrix.CELLS)
    assert "unexplained" not in PAGE
    for _, _, because in matrix.KNOWN:
        assert because in PAGE.replace("\n", " ")


FAILED = """
FAILED tests/a.py::test_one - AssertionError
FAILED tests/a.py::test_two[3] - ValueError
2 failed, 5 passed in 3.21s
"""


def test_what_the_table_says_about_failures(monkeypatch):
    """A failure has its reason, or is named."""
    cell = ("3.11", "2.19.1", "3.10.0")
    assert matrix.tested(cell, "5 passed in 3.21s") == "5 passed"
    assert matrix.tested(cell, FAILED).endswith(
        "unexplained: tests/a.py::test_one, tests/a.py::test_two[3]"
    )
    assert matrix.tested(cell, "E  ImportError: no").startswith("unexplained: ImportError")
    known = (("/3\\.1[0-2]\\.", "test_one", "No moments."), ("", "test_two", "No moments."))
    monkeypatch.setattr(matrix, "KNOWN", known)
    assert matrix.tested(cell, FAILED) == "2 failed, 5 passed: No moments."
    assert "unexplained" in matrix.tested(("3.11", "2.21.0", "3.15.1"), FAILED)


@pytest.mark.parametrize("keras", ["3.12.4", "nightly"])
def test_a_row_takes_the_place_of_its_cells(keras):
    """Rows of other cells stay, and a new one comes last."""
    page = f"a\n|---|---|---|---|---|---|\n| 3.12 | 2.19.1 | {keras} | x | y | z |\n\nb\n"
    line = matrix.row(("3.12", "2.19.1", keras), ("same bits", "1", "2"))
    other = matrix.row(("3.13", "2.19.1", keras), ("same bits", "1", "2"))
    assert matrix.with_rows(page, [line, other]) == (
        f"a\n|---|---|---|---|---|---|\n{line}{other}\nb\n"
    )
