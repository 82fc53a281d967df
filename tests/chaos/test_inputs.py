"""Odd values for every public argument, found from the signatures.

Each case passes one odd value to one argument of a valid call. It must be refused with an error of
ours that names the argument and shows the value, or be one that the documentation allows. The first
is "clear", the second "documented"; another library's error is "obscure", and a value that is taken
although nothing allows it is "silent". There are none of the last two.

To see one case again: a case depends on its argument alone. `odd_inputs.outcome(place, code)` tells
what becomes of it.
"""

import collections
import types

import pytest
from chaos import odd_inputs, odd_values, outcomes
from conformance import test_errors as errors

# The values themselves, numpy's matrix for one, and casts of them are warned of.
pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = 4
WHOLE = {
    "scaling": 10,
    "scaling.float8": 10,
    "strategies": 10,
    "trainer": 4,
    "trainer.step": 4,
}  # cases for each argument
MODULES = list(WHOLE)
ACCEPTED = 8  # values for each argument of the constructor; those that it takes go into a run
METHODS = 6  # every so manieth argument of a method is tried in every run
KINDS = {
    "numbers": "numbers, NaN, inf",
    "strings": "text",
    "paths": "paths",
    "collections": "collections",
    "callables": "functions and classes",
    "tensors": "arrays and tensors",
    "objects": "objects",
}  # of values, by their pools


def column_of(place):
    """The column of the table in which an argument is counted."""
    method = place.name.startswith("Trainer.") or place.name == "find_batch_size"
    if place.module == "trainer":
        return "methods" if method else "constructors"
    return place.module.removeprefix("trainer.")


def kind_of(code):
    """The row of the table in which a value is counted."""
    return next(KINDS[name] for name, pool in odd_values.POOLS.items() if code in pool)


def check(folder, monkeypatch, cases, part=None, request=None):
    """Asserts that all cases are clear or documented, and that their number is in the table.

    A case is a place, a code, and what is called on the result.
    """
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    monkeypatch.setenv("HOME", str(folder / "inner"))
    found, wrong = collections.defaultdict(list), []
    for place, code, *go_on in cases:
        result, why = odd_inputs.outcome(place, code, *go_on)
        found[outcomes.ACCEPTED if go_on else column_of(place)].append((kind_of(code), result))
        if result in {"obscure", "silent"}:
            wrong.append(f"{result}: {place.name}({place.argument}={code}): {why}")
    for column, results in found.items():
        outcomes.check(results, wrong, column, part, request)
    assert [path.name for path in folder.rglob("*")] == ["inner"]


def all_cases(module, number):
    """Every argument of a module, with a number of odd values."""
    return [
        (place, code)
        for place in odd_inputs.places(module)
        for code in odd_inputs.drawn(place, number)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("module", MODULES)
def test_a_few_odd_inputs(tmp_path, monkeypatch, module):
    """One for each argument; of methods, which train, for some."""
    cases = all_cases(module, 1)
    methods = [case for case in cases if column_of(case[0]) == "methods"]
    check(
        tmp_path,
        monkeypatch,
        [*(case for case in cases if case not in methods), *methods[::METHODS]],
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("module", MODULES)
def test_many_odd_inputs(tmp_path, monkeypatch, request, module, part):
    """Half of them near the argument's type, half of any type."""
    cases = all_cases(module, WHOLE[module])[part::PARTS]
    check(tmp_path, monkeypatch, cases, part, request)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_accepted_value_ends_in_an_obscure_error(tmp_path, monkeypatch, request, part):
    """A value that the constructor takes is taken by two steps as well, or refused by them."""
    places = [place for place in odd_inputs.places("trainer") if place.name == "Trainer"]
    cases = [
        (place, code, ".train(data, 2, global_batch=4)")
        for place in places[part::PARTS]
        for code in odd_inputs.drawn(place, ACCEPTED)
        if odd_inputs.outcome(place, code)[0] == "documented"
    ]
    check(tmp_path, monkeypatch, cases, part, request)


def test_the_table_is_that_of_the_outcomes():
    """tests/chaos/README.md holds what the nightly tests have found."""
    before, begin, table = outcomes.TABLE.read_text().partition(outcomes.BEGIN)

    assert before
    assert begin
    assert table == outcomes.table()


@pytest.mark.thorough
@pytest.mark.parametrize("module", MODULES)
def test_every_callable_has_a_valid_call(module, full):
    """A new public callable needs a line in `CALLS`; the call with its own arguments succeeds."""
    names = {place.name for place in odd_inputs.places(module)}
    calls = {
        name: code
        for name, code in odd_inputs.CALLS[module].items()
        if name not in odd_inputs.MISSING
    }

    assert names == set(calls)
    for name, code in calls.items():
        if name.startswith("Trainer.") and not full:
            continue  # it trains
        with odd_inputs.elsewhere():
            eval(code, odd_inputs.names(code))  # noqa: S307  # a call from the table
        assert name.split(".")[-1] in code


def taken(state, width):
    """A function with arguments of its own for the tests below."""
    if width < 1:
        raise ValueError(f"`width` must be positive; got {width!r}. It is a width. Use 1.")
    return state.width * width


@pytest.mark.parametrize(
    ("code", "kind"),
    [("0", "clear"), ("2", "documented"), ('"1"', "obscure"), ("True", "silent")],
)
def test_each_kind_is_told_from_the_others(monkeypatch, code, kind):
    """A new argument is tried as it appears, and every kind of outcome is known."""
    taken.__annotations__ = {"state": object, "width": int}
    monkeypatch.setitem(errors.MODULES["scaling"], "taken", taken)
    monkeypatch.setitem(errors.ARGUMENTS["scaling"], "taken", {"state", "width"})
    monkeypatch.setitem(odd_inputs.CALLS["scaling"], "taken", "taken(SimpleNamespace(width=1), 1)")
    monkeypatch.setattr(
        odd_inputs,
        "names",
        lambda _: {"taken": taken} | vars(types),
    )
    place = odd_inputs.Place("scaling", "taken", "width")

    assert place in odd_inputs.places("scaling")
    assert odd_inputs.outcome(place, code)[0] == kind
