"""Checks that code in the pages runs, prints what they show, and that their links and paths exist."""

import doctest
import pathlib
import re

import keras
import pytest

ROOT = pathlib.Path(__file__).parents[2]
# These are read first, so their code always runs; the other pages run with --full.
READMES = ["README.md", "scaling/README.md", "strategies/README.md", "trainer/README.md"]
PAGES = [
    *READMES,
    "docs/from-gradscaler.md",
    "docs/from-keras.md",
    "docs/from-lightning.md",
    "docs/keras_faults.md",
    "docs/from-orbit.md",
    "docs/callbacks.md",
    "docs/float8.md",
    "docs/hooks.md",
    "docs/index.md",
    "docs/numerics.md",
    "docs/online.md",
    "docs/performance.md",
    "docs/resume.md",
    "docs/tour.md",
    "docs/troubleshooting.md",
    "docs/watching.md",
]
SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in PAGES if page not in READMES]
OTHERS = [
    "docs/architecture.md",
    "docs/catalogue.md",
    "docs/report.md",
    "docs/devices.md",
    "docs/limits.md",
    "docs/words.md",
    "docs/peers_tests.md",
    "docs/skipped-steps.md",
    "docs/versions.md",
    "CONTRIBUTING.md",
    "examples/README.md",
]
# Every page of the site; a tutorial is a notebook, whose text is in comments.
SITE = [
    str(path.relative_to(ROOT))
    for pattern in ("docs/*.md", "docs/tutorials/*.py")
    for path in ROOT.glob(pattern)
]


FOLDERS = ["scaling", "strategies", "trainer"]
# The READMEs of the folders within a package, such as trainer/log/README.md.
FOLDER_READMES = sorted(
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*/README.md")
)
READMES_WITH_CODE = [readme for readme in FOLDER_READMES if "```py" in (ROOT / readme).read_text()]
# Files that a page names and that are not ours: the reader's own, and another project's.
FOREIGN_FILES = {"controller.py", "scaling.py", "standard_runner.py", "strategies.py", "train.py"}
# Examples of keras-io, with which examples/README.md compares.
FOREIGN_FILES |= {"generative/vae.py", "generative/wgan_gp.py", "nlp/lstm_seq2seq.py", "reptile.py"}
FOREIGN_FILES |= {"rl/ppo_cartpole.py", "vision/image_classification_efficientnet_fine_tuning.py"}
FOREIGN_FILES |= {"vision/knowledge_distillation.py", "vision/reptile.py"}
FOREIGN_FILES |= {"vision/semisupervised_simclr.py"}


def blocks(page):
    """Yields each block of Python, or of a Python console, of a page: the number of its first line, the
    code, and the block of text that follows it and shows what it prints, or None.
    """
    text = (ROOT / page).read_text()
    pattern = r"^```py(?:thon|con)\n(.*?)^```(?:\n+```text\n(.*?)^```)?"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 2, match[1], match[2]


def without_numbers(text):
    """Returns the lines of an output without numbers other than steps, which differ between machines."""
    number = r"(?<!step )(?<![\w/])-?\d[\d,.:]*(e-?\d+)?%?( [kM]?B\b)?"
    return [" ".join(line.split()) for line in re.sub(number, "#", text).strip().splitlines()]


# NumPy 2 raises this warning when Keras saves a model.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("page", [*READMES, *READMES_WITH_CODE, *SLOW])
def test_python_in_pages_runs(page, tmp_path, capsys):
    """The Python blocks of a page run in order, and print what the page shows: consoles exactly,
    others up to numbers that differ between machines.
    """
    names = {}
    found = list(blocks(page))
    keras.utils.clear_session()  # names of layers are numbered as in a process of its own
    for line, code, shown in found:
        if code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, names, page, page, line)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, clear_globs=False)
            names.update(test.globs)

            assert runner.summarize(verbose=False).failed == 0
        else:
            # AutoGraph reads the source of the functions it traces, so the block needs a file.
            source = tmp_path / f"line_{line}.py"
            source.write_text(code)
            capsys.readouterr()
            exec(compile(code, str(source), "exec"), names)  # noqa: S102
            printed = capsys.readouterr().out
            assert shown is None or without_numbers(printed) == without_numbers(shown)
    assert found


@pytest.mark.parametrize("page", PAGES)
def test_pages_import_trainer_first(page):
    """It configures TensorFlow, so a block that imports both imports it before TensorFlow and Keras."""
    for line, code, _ in blocks(page):
        imports = r"^(?:>>> )?(?:import|from) (trainer(?!\.)|keras|tensorflow)\b"
        order = re.findall(imports, code, re.MULTILINE)
        assert "trainer" not in order or order[0] == "trainer", line


@pytest.mark.parametrize("page", sorted({*PAGES, *OTHERS, *FOLDER_READMES, *SITE}))
def test_relative_links_lead_to_files(page):
    """Every relative link of a page names a file that exists."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http|#)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def named_files(text):
    """Returns the code spans of a page that look like files or folders of the repository."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([\w./-]+)`", prose)
    tops = ("benchmarks/", "docs/", "examples/", "scaling/", "strategies/", "tests/", "trainer/")
    return [
        span
        for span in spans
        if span.endswith(".py") or (span.startswith(tops) and (span.endswith("/") or "." in span))
    ]


def exists_for(page, name):
    """Returns whether a file exists as a page names it.

    A path starts at the repository's root, at the page's folder, or at the package of a folder's readme.
    A bare file name may stand for a file in any folder below a readme's own, and on the other pages in
    any folder.
    """
    folder = (ROOT / page).parent
    if any((start / name).exists() for start in (ROOT, folder, ROOT / page.split("/")[0])):
        return True
    in_package = page.startswith(tuple(f"{folder}/" for folder in FOLDERS))
    below = [folder] if in_package else [ROOT / top for top in ("benchmarks", "examples", *FOLDERS)]
    return "/" not in name and any(any(top.rglob(name)) for top in below)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *FOLDER_READMES, "CHANGELOG.md"])
def test_named_files_exist(page):
    """Every file of the repository that a page names in a code span exists."""
    names = set(named_files((ROOT / page).read_text())) - FOREIGN_FILES

    assert not [name for name in sorted(names) if not exists_for(page, name)]
