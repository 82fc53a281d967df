"""Which room may import which."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = {"scaling", "strategies", "trainer"}
ALLOWED = {"scaling": set(), "strategies": set(), "trainer": {"scaling", "strategies"}}


def imported(path):
    """The top-level names a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_the_arrows_between_rooms(room):
    """`scaling` and `strategies` import nothing of ours; `trainer` imports both."""
    files = sorted((ROOT / room).rglob("*.py"))
    found = {name for path in files for name in imported(path)} & (ROOMS | {"tests", "examples"})

    assert files
    assert found - {room} <= ALLOWED[room]


def test_private_names_of_keras_and_tensorflow_stand_in_one_file():
    """No other file reaches for an underscore of Keras's or TensorFlow's, or for their inner modules."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                inner = isinstance(node, ast.Attribute) and node.attr.startswith("_")
                of_ours = inner and isinstance(node.value, ast.Name) and node.value.id == "self"
                if inner and not of_ours and not node.attr.startswith("__"):
                    assert path.name == "keras_private.py" or node.attr in {
                        "_asdict",
                        "_replace",
                        "_fields",
                        "_exit",  # of os, where it is the only way
                    }, f"{path}:{node.lineno} uses {node.attr}"
            assert "keras.src" not in path.read_text()
            assert "tensorflow.python" not in path.read_text()


def test_the_top_level_is_what_a_reader_expects():
    """Rooms, tests, examples, and the documents of a repository."""
    expected = {"pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", ".ci"}

    assert expected | ROOMS | {"tests", "examples"} <= {path.name for path in ROOT.iterdir()}
    for room in ROOMS:
        assert (ROOT / room / "README.md").exists()
        assert (ROOT / room / "py.typed").exists()


def test_nothing_that_is_loaded_can_run_code():
    """No room imports a module that loads objects, and NumPy's files are read without them."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert not set(imported(path)) & {"pickle", "dill", "cloudpickle", "joblib", "marshal"}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.load":
                    assert "allow_pickle=False" in ast.unparse(node)
                # An export is compared with what stands in the file that it has just written.
                loads = isinstance(node, ast.Call) and "load_model" in ast.unparse(node.func)
                assert not loads or path.name == "export.py"
