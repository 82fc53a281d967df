"""README and cards: what they show runs, and prints what they say."""

import doctest
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# What is read first; the others run with --full alone.
CARDS = ["README.md", "scaling/README.md", "strategies/README.md", "trainer/README.md"]
PAPERS = [
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
SLOW = [pytest.param(paper, marks=pytest.mark.slow) for paper in PAPERS if paper not in CARDS]
OTHERS = [
    "docs/report.md",
    "docs/scale.md",
    "docs/performance.md",
    "docs/skipped-steps.md",
    "CONTRIBUTING.md",
    "examples/README.md",
]


def blocks(paper):
    """The Python code blocks of a paper, and the line each begins in."""
    text = (ROOT / paper).read_text()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 2, match[1]


# Keras, where it saves a model; NumPy 2 says so.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("paper", [*CARDS, *SLOW])
def test_python_in_papers_runs(paper, tmp_path):
    """Every block runs, each after those before it; with >>>, it prints what it says."""
    names = {}
    found = list(blocks(paper))
    for line, code in found:
        if code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, names, paper, paper, line)
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


@pytest.mark.parametrize("paper", [*PAPERS, *OTHERS])
def test_links_between_papers_lead_somewhere(paper):
    """A relative link names a file that exists."""
    text = (ROOT / paper).read_text()
    for target in re.findall(r"\]\((?!http|#)([^)#]+)\)", text):
        assert ((ROOT / paper).parent / target).exists(), target
