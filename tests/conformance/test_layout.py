"""Which package may import which, and what no package may import."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {"scaling", "strategies", "trainer"}
ALLOWED = {"scaling": set(), "strategies": set(), "trainer": {"scaling", "strategies"}}


def imported(path):
    """The top-level names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_between_packages(package):
    """`scaling` and `strategies` import no other package of this project; `trainer`
    imports both.
    """
    files = sorted((ROOT / package).rglob("*.py"))
    found = {name for path in files for name in imported(path)} & (PACKAGES | {"tests", "examples"})

    assert files
    assert found - {package} <= ALLOWED[package]


PRIVATE = {  # `scaling`, which does not import `trainer`, has a file of its own
    ROOT / "trainer/keras_compat.py",
    ROOT / "scaling/base/traced_graphs.py",
}


def test_private_names_of_keras_and_tensorflow_stand_in_few_files():
    """Only these files use private attributes and internal modules of Keras and TensorFlow."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
                of_self = private and isinstance(node.value, ast.Name) and node.value.id == "self"
                if private and not of_self and not node.attr.startswith("__"):
                    assert path in PRIVATE or node.attr in {
                        "_asdict",
                        "_replace",
                        "_fields",
                        "_exit",  # os._exit
                    }, f"{path}:{node.lineno} uses {node.attr}"
            for internal in ("keras.src", "tensorflow.python"):
                assert path in PRIVATE or internal not in path.read_text()


def test_nothing_that_is_loaded_can_run_code():
    """No package imports a module that unpickles objects, and NumPy files are loaded without
    pickles.
    """
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert not set(imported(path)) & {"pickle", "dill", "cloudpickle", "joblib", "marshal"}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.load":
                    assert "allow_pickle=False" in ast.unparse(node)
                # export.py loads the file it has just written, to compare it with the model.
                loads = isinstance(node, ast.Call) and "load_model" in ast.unparse(node.func)
                assert not loads or path.name == "export.py"
