"""The folders: `docs/architecture.md` shows how they stand on each other, and each readme lists its files."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
FILES = sorted(
    path for name in ("scaling", "strategies", "trainer") for path in (ROOT / name).rglob("*.py")
)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}
FOLDERS = sorted({path.parent.relative_to(ROOT).as_posix() for path in FILES})


def layers():
    """The folders of each layer, from the top down, as the page draws them."""
    [picture] = re.findall(r"```text\n(trainer .*?)```", PAGE, re.DOTALL)
    return [line.split("   ")[0].split("  ") for line in picture.splitlines()]


def imports(path):
    """The modules of ours that a file imports, but for those that only its annotations name."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inside]
        else:
            continue
        yield from (name for name in names if name in MODULES)


def folder_of(path):
    """The folder a file stands in."""
    return path.parent.relative_to(ROOT).as_posix()


def test_the_picture_has_every_folder_once():
    """Each folder with code stands on one layer."""
    assert sorted(folder for layer in layers() for folder in layer) == FOLDERS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_import_goes_up(path):
    """A file imports its own folder and folders on lower layers. The front of a package imports what it
    exports, wherever that stands; everyone may import `keras_compat`, which imports
    nothing of ours, and `fingerprint`, which imports only that.
    """
    everywhere = {"trainer.keras_compat", "trainer.fingerprint"}
    assert not list(imports(MODULES["trainer.keras_compat"]))
    assert {*imports(MODULES["trainer.fingerprint"])} == {"trainer.keras_compat"}
    height = {folder: -place for place, layer in enumerate(layers()) for folder in layer}
    own = folder_of(path)
    if path.name == "__init__.py" and own in {"scaling", "strategies", "trainer"}:
        return
    above = [
        name
        for name in imports(path)
        if name not in everywhere
        and folder_of(MODULES[name]) != own
        and height[folder_of(MODULES[name])] >= height[own]
    ]

    assert not above


def test_trainer_has_few_loose_files():
    """What does not belong to a folder is the face of the package."""
    loose = {path.name for path in FILES if folder_of(path) == "trainer"}

    face = {"__init__.py", "trainer.py", "task.py", "flags.py"}
    assert loose == {*face, "fingerprint.py", "keras_compat.py", "tune.py"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_readme_lists_the_files_of_its_folder(folder):
    """A folder has a readme with one row for each of its files, and names no file that is not there."""
    readme = (ROOT / folder / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]*) \|", readme, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row)}
    there = {path.name for path in FILES if folder_of(path) == folder} - {"__init__.py"}

    assert listed == there


def test_the_architecture_page_names_files_that_exist():
    """Paths in code spans lead to files and folders of the repository."""
    for place in re.findall(r"`((?:scaling|strategies|trainer|tests)/[\w./]*)`", PAGE):
        assert (ROOT / place).exists(), place


def test_the_readme_of_the_benchmarks_lists_its_files():
    """It lists each file of the folder."""
    folder = ROOT / "benchmarks"
    listed = re.findall(r"`(\w+\.(?:py|json))`", (folder / "README.md").read_text())
    names = [path.name for path in folder.iterdir() if path.suffix in (".py", ".json")]
    assert sorted(set(listed)) == sorted(names)


# Functions whose arguments are public settings.
PUBLIC_SETTINGS = {"trainer/trainer.py __init__", "trainer/step/plan.py plan_step"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_fit_on_a_screen(path):
    """A function has at most 50 lines without its docstring, and at most 8 parameters."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        lines = node.end_lineno - node.lineno + 1
        lines -= (ast.get_docstring(node, clean=False) or "").count("\n")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [each.arg for each in arguments if each.arg not in {"self", "cls"}]
        place = f"{path.relative_to(ROOT).as_posix()} {node.name}"
        fits = lines <= 50 and len(names) <= 8

        assert fits or place in PUBLIC_SETTINGS, f"{place}: {lines} lines, {len(names)} parameters"


def test_the_walk_of_a_batch_names_lines_of_the_code(request):
    """Each row of the page's walk through a step names a line at which a function or class begins."""
    page = ROOT / "docs/architecture.md"

    def at_its_line(match):
        source = (ROOT / match["file"]).read_text()
        [begins] = re.finditer(rf"^(?:def|class) {match['name']}\b", source, re.MULTILINE)
        line = source[: begins.start()].count("\n") + 1
        return f"| `{match['file']}:{line}` | `{match['name']}` |"

    text = page.read_text()
    walk = r"\| `(?P<file>[\w/]+\.py):\d+` \| `(?P<name>\w+)` \|"
    expected = re.sub(walk, at_its_line, text)
    if request.config.getoption("--regenerate"):
        page.write_text(expected)

    assert len(re.findall(walk, text)) > 20
    assert page.read_text() == expected
