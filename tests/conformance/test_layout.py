"""Which package may import which, and what no package may import."""

import ast
import pathlib
import re

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


PRIVATE = {  # `scaling` and `strategies`, which do not import `trainer`, have a file each
    ROOT / "trainer/keras_compat.py",
    ROOT / "scaling/base/traced_graphs.py",
    ROOT / "strategies/capabilities.py",
}


OF_PYTHON = {"_asdict", "_replace", "_fields", "_make", "_exit"}  # NamedTuple's, and os._exit
INTERNAL = ("keras.src", "tensorflow.python", "tf.__internal__", "keras.__internal__")


def defined_in(tree):
    """The private names that a file gives its own attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def private_names(source, ours=()):
    """The names in a file that are private to somebody else: attributes, also as strings, and imports.

    Args:
        source: the text of the file.
        ours: private names that other files of this project give their own attributes.
    """
    tree = ast.parse(source)
    own = {*defined_in(tree), *ours}
    # Two objects of one class may call each other's.
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    suffixes = {
        part.value
        for call in calls
        if ast.unparse(call.func).endswith((".endswith", ".removesuffix"))
        for part in ast.walk(call)
        if isinstance(part, ast.Constant)
    }
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    suffixes |= {getattr(part, "value", None) for text in texts for part in text.values[1:]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            # What a class of Keras has, a subclass of it may read as `self._name`.
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in OF_PYTHON | (own if of_self else methods):
                yield node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch("_[a-z][a-z_0-9]*", str(node.value)):
            if node.value not in own | suffixes | OF_PYTHON:
                yield node.value
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (each.name for each in node.names if re.match("_[a-z]", each.name))
    yield from (name for name in INTERNAL if name in source)


@pytest.mark.parametrize(
    "source",
    [
        "layer._losses",
        "getattr(layer, '_losses')",
        "vars(optimizer)['_tracker'] = 1",
        "operator.attrgetter('_tracker')(optimizer)",
        "def f(optimizer, name='_iterations'): return getattr(optimizer, name)",
        "class Own(keras.Layer):\n    def f(self): return self._tracker",
        "import keras.src.backend",
        "from keras.src.backend import common",
        "importlib.import_module('tensorflow.python.eager.context')",
        "from keras.ops import _hidden",
        "tf.__internal__.distribute",
    ],
)
def test_a_private_name_is_found(source):
    """However it is written: as an attribute, a string or an import."""
    assert [*private_names(source)]


def test_own_names_are_no_private_ones():
    """What a file gives its own class, and what belongs to a NamedTuple."""
    source = (
        "class A:\n    def __init__(self): self._x = getattr(self, '_x', 1)._replace(y=self._x)"
    )
    assert not [*private_names(source)]


def test_private_names_of_keras_and_tensorflow_stand_in_few_files():
    """Only these files use private attributes and internal modules of Keras and TensorFlow."""
    texts = {
        path: path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    trees = [ast.parse(text) for path, text in texts.items() if path not in PRIVATE]
    ours = {name for tree in trees for name in defined_in(tree)}
    found = {
        path.relative_to(ROOT): [*private_names(text, ours)]
        for path, text in texts.items()
        if path not in PRIVATE
    }
    assert not {path: names for path, names in found.items() if names}


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
