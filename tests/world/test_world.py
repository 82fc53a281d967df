"""Other people's architectures against a plain loop, and docs/world.md, which is generated from their
entries.
"""

import importlib.util

import pytest
from world import page
from world.check import check
from world.entries import ENTRIES
from world.entry import CELLS

import strategies

# Other people's packages warn about much.
pytestmark = pytest.mark.filterwarnings("ignore")


def params():
    """All cells. CI tries two cells of ten architectures, three nights the others."""
    for entry in ENTRIES:
        for key in CELLS:
            in_ci = entry.in_ci and key in ("float16", "replicas")
            marks = [pytest.mark.thorough if in_ci else pytest.mark.slow]
            if entry.needs:
                marks.append(pytest.mark.extras)
            yield pytest.param(entry, key, marks=marks, id=f"{entry.name}-{key}")


@pytest.mark.parametrize(("entry", "key"), [*params()])
def test_an_architecture_trains_as_in_a_plain_loop(entry, key, mirrored):
    """L5, L8: weights go where a plain loop takes them, or the division is refused in one line."""
    for package in entry.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    cell = CELLS[key]
    strategy = mirrored(2) if cell.replicas == 2 else strategies.create("default")
    check(entry, cell, strategy)


def test_there_are_many():
    """At least forty architectures, each with a name of its own, of which CI tries ten."""
    names = [(entry.name, entry.source) for entry in ENTRIES]

    assert len(names) == len(set(names)) >= 40
    assert sum(entry.in_ci for entry in ENTRIES) == 10


def test_the_page_says_what_the_entries_say(request):
    """docs/world.md is what the entries generate; `--regenerate` writes it."""
    if request.config.getoption("--regenerate"):
        page.PATH.write_text(page.page())

    assert page.PATH.read_text() == page.page()
