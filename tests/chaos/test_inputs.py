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
from chaos import odd_inputs
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


def check(folder, monkeypatch, cases, record_property):
    """Asserts that all cases are clear or documented. Prints how many ended in which way."""
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    monkeypatch.setenv("HOME", str(folder / "inner"))
    counts, wrong = collections.Counter(), []
    for place, code in cases:
        kind, why = odd_inputs.outcome(place, code)
        counts[kind] += 1
        if kind in {"obscure", "silent"}:
            wrong.append(f"{kind}: {place.name}({place.argument}={code}): {why}")
    print(dict(counts))  # noqa: T201
    record_property("outcomes", dict(counts))
    assert not wrong, "\n".join(wrong)
    assert counts["clear"]
    assert [path.name for path in folder.rglob("*")] == ["inner"]


def all_cases(module, number):
    """Every argument of a module, with a number of odd values."""
    return [
        (place, code)
        for place in odd_inputs.places(module)
        for code in odd_inputs.drawn(place, number)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_a_few_odd_inputs(tmp_path, monkeypatch, record_property, module):
    """One for each argument."""
    check(tmp_path, monkeypatch, all_cases(module, 1), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("module", MODULES)
def test_many_odd_inputs(tmp_path, monkeypatch, record_property, module, part):
    """Half of them near the argument's type, half of any type."""
    cases = all_cases(module, WHOLE[module])[part::PARTS]
    check(tmp_path, monkeypatch, cases, record_property)


@pytest.mark.parametrize("module", MODULES)
def test_every_callable_has_a_valid_call(module):
    """A new public callable needs a line in `CALLS`; the call with its own arguments succeeds."""
    names = {place.name for place in odd_inputs.places(module)}
    calls = {
        name: code
        for name, code in odd_inputs.CALLS[module].items()
        if name not in odd_inputs.MISSING
    }

    assert names == set(calls)
    for name, code in calls.items():
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
