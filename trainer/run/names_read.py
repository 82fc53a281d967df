"""What the code of methods reads: attributes of their object, and values outside of it.

Bytecode tells it. Of functions that a method calls, only other methods of the same object are
looked at.
"""

import collections
import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from trainer.base.describe import cells_of, package_of

# The methods by which a list, a dict or a set is changed.
MUTATORS = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem",
    "popleft", "remove", "reverse", "setdefault", "sort", "update",
})  # fmt: skip
CHANGES_ITEM = ("STORE_SUBSCR", "DELETE_SUBSCR", "COPY")  # COPY: as in `self.counts[key] += 1`
FRAMEWORKS = ("keras", "tensorflow", "numpy")


class Reads(NamedTuple):
    """What the methods of a class read and do not change."""

    names: frozenset[str]  # attributes of their object
    loaded: frozenset[str]  # attributes of any object
    functions: tuple[types.FunctionType, ...]  # the methods, but those of frameworks


@functools.cache
def reads_of(cls: type, base: type, methods: tuple[str, ...]) -> Reads:
    """Returns what the methods of a class read.

    Args:
        cls: the class.
        base: the class to whose methods it has added others.
        methods: the names of the methods; what they call is looked at, too.
    """
    own: dict[str, list[types.FunctionType]] = collections.defaultdict(list)
    added = (
        [each for each in cls.__mro__ if each not in base.__mro__] if base in cls.__mro__ else []
    )
    for owner in added:
        for name, method in vars(owner).items():
            if isinstance(function := plain_function(method), types.FunctionType):
                own[name].append(function)  # a method may call the one that it overrides
    read: set[str] = set()
    changed: set[str] = set()
    loaded: set[str] = set()
    functions: list[types.FunctionType] = []
    todo, seen = [*methods], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in own:
            continue
        seen.add(name)
        functions += [each for each in own[name] if not is_of_framework(each)]
        for used in (names_used(each.__code__) for each in own[name]):
            read |= used.of_self
            changed |= used.changed
            loaded |= used.loaded
            todo += used.loaded
    hidden = "_" if cls.__module__.startswith("keras.") else " "  # Keras's own state
    names = frozenset(name for name in read - changed if not name.startswith(hidden))
    return Reads(names, frozenset(loaded - changed), tuple(functions))


def functions_added(
    owners: Iterable[object], base: type, methods: tuple[str, ...]
) -> list[types.FunctionType]:
    """Returns the methods of the user's that objects run, each once; an object may be a function.

    Args:
        owners: the objects.
        base: see `reads_of`.
        methods: see `reads_of`.
    """
    found: dict[types.FunctionType, None] = {}  # as an ordered set
    for owner in owners:
        known = base is not object and isinstance(owner, base)  # and so it is no function
        function = None if known else plain_function(owner)
        if isinstance(function, types.FunctionType):
            found |= {} if is_of_framework(function) else {function: None}
        else:
            kind = cast("Any", type(owner))  # mypy takes its __hash__ for that of its objects
            found |= dict.fromkeys(reads_of(kind, base, methods).functions)
    return list(found)


def plain_function(method: Any) -> Any:
    """Returns the function in a property, a class method, a `tf.function` or a decorated method."""
    for wrapper in ("fget", "__func__", "python_function"):
        with contextlib.suppress(Exception):  # an object of the user's may raise anything here
            method = getattr(method, wrapper)
    return inspect.unwrap(method) if callable(method) else method


def is_of_framework(item: Any) -> bool:
    """Returns whether Keras, TensorFlow or NumPy defines a function or a class."""
    return package_of(item) in FRAMEWORKS


class NamesUsed(NamedTuple):
    """The names of attributes in the code of a method, and of the functions defined in it."""

    loaded: set[str]  # of any object; they may be methods
    of_self: set[str]  # those of the method's own object
    changed: set[str]  # those that are assigned, to any object, or whose items are
    # (owner, name): names of attributes and constant keys that are read directly of another name.
    chains: set[tuple[str, str]]


@functools.cache
def names_used(code: types.CodeType) -> NamesUsed:
    """Returns the names of the attributes that a method's code uses."""
    used = NamesUsed(set(), set(), set(), set())
    owner = code.co_varnames[0] if code.co_argcount else None
    for part in parts_of(code):
        before = None  # the local variable that the instruction before has loaded
        instructions = list(dis.get_instructions(part))
        used.chains.update(chains_in(instructions))
        for at, instruction in enumerate(instructions):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                used.loaded.add(instruction.argval)
                if owner is not None and before == owner:
                    used.of_self.add(instruction.argval)
                    if is_changed(instructions[at + 1 : at + 3]):
                        used.changed.add(instruction.argval)
            elif instruction.opname == "STORE_ATTR":
                used.changed.add(instruction.argval)
            loads = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
            before = instruction.argval if loads else None
            before = before[-1] if isinstance(before, tuple) else before  # loads several at once
    return used


def chains_of(functions: Iterable[types.FunctionType]) -> set[tuple[str, str]]:
    """Returns the chains in the code of functions; see `NamesUsed`."""
    return {pair for function in functions for pair in names_used(function.__code__).chains}


def chains_in(instructions: list[dis.Instruction]) -> Iterator[tuple[str, str]]:
    """Yields (owner, name) for each attribute and each constant key that is read of a name.

    `self.args.scale` and `args["scale"]` give ("args", "scale") and ("args", "'scale'"), and so do
    `a = self.args` and `a.scale`.
    """
    aliases: dict[str, Any] = {}  # what local variables stand for
    owner: Any = None
    key: Any = None
    for each in instructions:
        if each.opname in ("CACHE", "PRECALL", "NOP"):
            continue
        local = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if owner is not None:
                yield owner, each.argval
            owner, key = each.argval, None
        elif each.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")):
            owner, key = aliases.get(local, local), None
        elif each.opname in ("STORE_FAST", "STORE_DEREF"):
            aliases[local], owner, key = owner or local, None, None
        elif each.opname == "LOAD_CONST":
            key = each.argval
        elif each.opname == "BINARY_SUBSCR" and owner is not None and key is not None:
            yield owner, repr(key)
            key = None
        else:
            owner = key = None


def is_changed(following: list[dis.Instruction]) -> bool:
    """Returns whether two instructions change an item of what was loaded before them."""
    if following and following[0].argval in MUTATORS:
        return following[0].opname in ("LOAD_ATTR", "LOAD_METHOD")
    loads = bool(following) and following[0].opname.startswith("LOAD_")
    return loads and len(following) > 1 and following[1].opname in CHANGES_ITEM


def names_loaded(function: types.FunctionType) -> frozenset[str]:
    """Returns the names of attributes, of any object, that a function reads but does not change."""
    used = names_used(function.__code__)
    return frozenset(used.loaded - used.changed)


def values_outside(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values that a function reads of its module and its closure, by name.

    Those that it assigns, or whose items it changes, are left out.
    """
    of_module, of_closure = names_outside(function.__code__)
    closure = dict(zip(function.__code__.co_freevars, cells_of(function), strict=True))
    module = function.__globals__
    found = {name: module[name] for name in of_module if name in module}
    return found | {name: closure[name] for name in of_closure if name in closure}


@functools.cache
def names_outside(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names that code reads of its module and of its closure, and does not change."""
    of_module: set[str] = set()
    of_closure: set[str] = set()
    changed: set[str] = set()
    for part in parts_of(code):
        instructions = list(dis.get_instructions(part))
        for at, each in enumerate(instructions):
            if each.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                changed.add(each.argval)
            elif each.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF"):
                (of_module if each.opname == "LOAD_GLOBAL" else of_closure).add(each.argval)
                if is_changed(instructions[at + 1 : at + 3]):
                    changed.add(each.argval)
    return frozenset(of_module - changed), frozenset(of_closure - changed)


def parts_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from parts_of(constant)
