"""Tests of laws are marked. What is left out by default is tried in CI or by night."""

import ast
import itertools
import pathlib
import re

import pytest
from marking import laws_of, tiers

TESTS = pathlib.Path(__file__).parents[1]
NAMED_TUPLES = "_asdict", "_fields", "_replace"
AGAIN = "mark.extras", "mark.thorough", "mark.slow"


@pytest.mark.parametrize(
    ("docstring", "laws"),
    [
        ("L6: nothing moves.", ["L6"]),
        ("L3, L11 and L17 for `LogMaxLossScale`, in every state.", ["L3", "L11", "L17"]),
        ("L15: one trace.\n\nL14: one call.", ["L15", "L14"]),
        ("Three steps with kernel L2, with L1 and others.", []),
        (None, []),
    ],
)
def test_the_laws_of_a_test(docstring, laws):
    """Their numbers are told from L1 and L2 penalties."""
    assert laws_of(docstring) == laws


def test_laws_reach_inside_through_one_file():
    """Tests in `tests/laws` use public names of ours, and `tests/access.py` for all others."""
    public = {"scaling", "strategies", "trainer", "trainer.callbacks", "trainer.step"}
    for path in sorted((TESTS / "laws").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                inner = node.module.split(".")[0] in public and node.module not in public
                assert not inner, f"{path.name}: {node.module}"
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                private = re.match(r"_[a-z]", node.attr) and node.attr not in NAMED_TUPLES
                # Keras's own, in the test of Keras.
                allowed = not private or node.value.id in {"self", "inner"}
                assert allowed, f"{path.name}: {ast.unparse(node)}"


@pytest.mark.parametrize(("axes", "by_default", "in_ci"), [(2, 1, 3), (3, 3, 9), (4, 9, 27)])
def test_samples_of_a_matrix(axes, by_default, in_ci):
    """A ninth runs by default and a third in CI, in which every value of every axis is tried; of three
    axes or more, it is by default, too.
    """
    marked = list(zip(itertools.product(range(3), repeat=axes), tiers(3**axes), strict=True))
    first = [case for case, marker in marked if marker is None]
    second = [case for case, marker in marked if marker != "slow"]

    assert (len(first), len(second)) == (by_default, in_ci)
    assert {marker for _, marker in marked} == {None, "thorough", "slow"}
    assert all(set(values) == {0, 1, 2} for values in zip(*second, strict=True))
    assert axes == 2 or all(set(values) == {0, 1, 2} for values in zip(*first, strict=True))


def test_one_case_is_always_tried():
    """The first number has no marker, however few cases there are."""
    assert [tiers(cases)[0] for cases in (1, 2, 5, 100)] == [None] * 4


@pytest.mark.thorough
def test_what_skips_without_a_package_is_tried_with_it():
    """A test that skips itself is marked, so that CI or the nightly run tries it with the package."""
    unmarked = [
        f"{path.name}::{node.name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        if "importorskip" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if any(ast.unparse(each) == "pytest.importorskip" for each in ast.walk(node))
        if not any(mark in ast.unparse(each) for each in node.decorator_list for mark in AGAIN)
    ]

    assert unmarked == []
