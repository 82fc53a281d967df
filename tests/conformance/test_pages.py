"""README and cards: what they show runs, and prints what they say."""

import doctest
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# What is read first; the others run with --full alone.
CARDS = ["README.md", "scaling/README.md", "strategies/README.md", "trainer/README.md"]
PAGES = [
    *CARDS,
    "docs/from-gradscaler.md",
    "docs/from-keras.md",
    "docs/from-orbit.md",
    "docs/hooks.md",
    "docs/index.md",
    "docs/numerics.md",
    "docs/resume.md",
    "docs/tour.md",
    "docs/troubleshooting.md",
    "docs/watching.md",
]
SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in PAGES if page not in CARDS]
OTHERS = [
    "docs/report.md",
    "docs/scale.md",
    "docs/performance.md",
    "docs/skipped-steps.md",
    "CONTRIBUTING.md",
    "examples/README.md",
]


def blocks(page):
    """The Python code blocks of a page, and the line each begins in."""
    text = (ROOT / page).read_text()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 2, match[1]


# Keras, where it saves a model; NumPy 2 says so.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("page", [*CARDS, *SLOW])
def test_python_in_pages_runs(page, tmp_path):
    """Every block runs, each after those before it; with >>>, it prints what it says."""
    names = {}
    found = list(blocks(page))
    for line, code in found:
        if code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, names, page, page, line)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, clear_globs=False)
            names.update(test.globs)

            assert runner.summarize(verbose=False).failed == 0
        else:
            # A file of its own, since AutoGraph reads the source of what it traces.
            source = tmp_path / f"line_{line}.py"
            source.write_text(code)
            exec(compile(code, str(source), "exec"), names)  # noqa: S102
    assert found


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_links_between_pages_lead_somewhere(page):
    """A relative link names a file that exists."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http|#)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
