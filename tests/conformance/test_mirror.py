"""Every module has a test file of its name, and every test file a module."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("scaling", "strategies", "trainer")

# Modules without a test file of their own: where they are tested instead, or why not.
UNTESTED = {
    "trainer/run/parts.py": "only types",
    "trainer/step/types.py": "only types",
}
# Test files that belong to no single module, with the reason.
OF_SEVERAL_MODULES = {
    "tests/strategies/test_workers.py": "processes that agree, through several modules",
}


def expected_test_file(module):
    """The test file of a module; both are relative to the repository."""
    stem = module.stem.strip("_")
    return pathlib.Path("tests", module.parent, f"test_{stem}.py")


def module_of(test_file):
    """The module of a test file; both are relative to the repository."""
    stem = test_file.stem.removeprefix("test_")
    folder = test_file.parent.relative_to("tests")
    return folder / (f"__{stem}__.py" if stem in {"init", "main"} else f"{stem}.py")


def files_in(folder, pattern):
    """The files in a folder and below, as paths relative to the repository."""
    return [path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob(pattern))]


def names_of_tests(path):
    """The names of a file's tests."""
    return [
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_test_file(package):
    """`trainer/log/summary.py` is tested in `tests/trainer/log/test_summary.py`, in at least one test."""
    modules = [path for path in files_in(package, "*.py") if path.name != "__init__.py"]
    missing = []
    for module in modules:
        path = expected_test_file(module)
        if not (ROOT / path).exists():
            missing.append(module.as_posix())
        else:
            assert names_of_tests(path), path

    assert modules
    assert set(missing) <= UNTESTED.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_test_file_has_a_module(package):
    """A test file has the name and the folder of the module that it tests."""
    found = files_in(f"tests/{package}", "test_*.py")
    strays = {path.as_posix() for path in found if not (ROOT / module_of(path)).exists()}

    assert found
    assert strays <= OF_SEVERAL_MODULES.keys()


def test_every_folder_is_mirrored():
    """Tests of these packages are in test files, and helpers are in tests/ itself."""
    for package in PACKAGES:
        for path in files_in(f"tests/{package}", "*.py"):
            assert path.name.startswith("test_"), path
