"""The matrix of versions: which cells there are, and how its results come into the table."""

import importlib.machinery
import importlib.util
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("matrix", str(ROOT / ".ci" / "matrix"))
matrix = importlib.util.module_from_spec(importlib.util.spec_from_loader("matrix", LOADER))
LOADER.exec_module(matrix)

TEXT = (ROOT / "pyproject.toml").read_text()
PAGE = (ROOT / "docs" / "versions.md").read_text()


def test_every_supported_python_has_a_cell():
    """Each Python of the classifiers is tried, and each Python that is tried and supported is there."""
    project = tomllib.loads(TEXT)["project"]
    named = {text.rsplit(" ", 1)[1] for text in project["classifiers"] if ":: Python ::" in text}
    tried = {cell[0] for cell in matrix.CELLS if matrix.is_supported(cell, TEXT)}

    assert tried == named


def test_the_table_says_what_is_supported():
    """The table's rows are cells of the matrix, and agree with the bounds; a supported one is green."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| 3\.\d", line)]
    cells = [[field.strip() for field in fields] for fields in rows]

    assert {tuple(fields[:3]) for fields in cells} <= set(matrix.CELLS)
    for fields in cells:
        supported = matrix.is_supported(fields[:3], TEXT)
        assert fields[3] == ("yes" if supported else "no")
        assert not supported or fields[4:6] == ["yes", "same bits"]
        assert not supported or re.fullmatch(r"\d+ passed(, \d+ \w+)*", fields[6])
