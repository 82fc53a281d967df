"""The matrix of versions: which cells there are, and how its results come into the table."""

import importlib.machinery
import importlib.util
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("matrix", str(ROOT / ".ci" / "matrix"))
matrix = importlib.util.module_from_spec(importlib.util.spec_from_loader("matrix", LOADER))
LOADER.exec_module(matrix)

TEXT = (ROOT / "pyproject.toml").read_text()
PAGE = (ROOT / "docs" / "versions.md").read_text()
HEAD = (
    "before\n\n| Python | TensorFlow | Keras | supported | installs | ten steps | quick tests |\n"
)
EMPTY = HEAD + "|---|---|---|---|---|---|---|\n\nafter\n"


def test_every_supported_python_has_a_cell():
    """Each Python of the classifiers is tried, and each Python that is tried and supported is there."""
    project = tomllib.loads(TEXT)["project"]
    named = {text.rsplit(" ", 1)[1] for text in project["classifiers"] if ":: Python ::" in text}
    tried = {cell[0] for cell in matrix.CELLS if matrix.is_supported(cell, TEXT)}

    assert tried == named


@pytest.mark.parametrize(
    ("cell", "supported"),
    [
        (("3.11", "2.21.0", "3.15.1"), True),
        (("3.13", "2.21.1", "3.16.0"), True),
        (("3.10", "2.21.0", "3.15.1"), False),
        (("3.14", "2.21.0", "3.15.1"), False),
        (("3.11", "2.20.0", "3.15.1"), False),
        (("3.11", "2.9.0", "3.15.1"), False),
        (("3.11", "2.21.0", "3.14.1"), False),
        (("3.11", "2.21.0", "4.0.0"), False),
    ],
)
def test_bounds(cell, supported):
    """A cell is supported if all three of its versions are within the bounds of `pyproject.toml`."""
    text = (
        'requires-python = ">=3.11,<3.14"\n'
        'dependencies = ["keras>=3.15,<4", "tensorflow>=2.21,<2.22"]\n'
    )

    assert matrix.is_supported(cell, text) == supported


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


def test_rows_find_their_place():
    """A new cell's row is added at the end, that of a known cell is replaced; the rest stays."""
    first = matrix.row(("3.11", "2.21.0", "3.15.1"), True, ("yes", "same bits", "9 passed"))
    second = matrix.row(("3.12", "2.21.0", "3.15.1"), True, ("yes", "same bits", "8 passed"))
    again = matrix.row(("3.11", "2.21.0", "3.15.1"), True, ("yes", r"E\1", "1 failed"))
    page = matrix.with_rows(matrix.with_rows(EMPTY, [first]), [second])
    start, end = EMPTY.split("\nafter")

    assert page == f"{start}{first}{second}\nafter{end}"
    assert matrix.with_rows(page, [again]) == f"{start}{again}{second}\nafter{end}"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "x\nE   ImportError: cannot import name 'a' (/home/me/a.py)\nFAILED t.py\n",
            "ImportError: cannot import name 'a'",
        ),
        (
            "WARNING: w\nERROR: No matching distribution found for keras\n",
            "ERROR: No matching distribution found for keras",
        ),
        ("no python `a|b`\n", "no python 'a/b'"),
        ("", "no output"),
    ],
)
def test_the_reason_is_one_line(output, said):
    """A red cell says what went wrong in one line that a table can hold, without paths of a machine."""
    assert matrix.reason(output) == said


def test_wider_bounds(tmp_path):
    """The copy for a cell that is not supported has no bounds, at installation and at import."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "pyproject.toml").write_text(TEXT)
    start = tmp_path / "trainer" / "__init__.py"
    start.write_text((ROOT / "trainer" / "__init__.py").read_text())
    matrix.widen(tmp_path)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]

    assert {"keras", "tensorflow"} <= set(project["dependencies"])
    assert project["requires-python"] == ">=3"
    assert "check_versions" not in start.read_text()
