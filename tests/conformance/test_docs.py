"""Tests that the documentation site builds, is complete, and works without a network."""

import ast
import dataclasses
import html.parser
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from marking import laws_of

from trainer import Checkpoints, DataError, Divergence, Losses, Monitoring, Skips, Trainer, Updates

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))
FOLDERS = [
    *("scaling", "scaling.layerwise", "scaling.float8", "strategies"),
    *("trainer", "trainer.callbacks", "trainer.step"),
]
# Elements and attributes that make a browser fetch a file; `link` does so only with some `rel`.
FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("link", "href"),
}
FETCHED_LINKS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "manifest",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built with the documented command."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,  # it runs the tutorials
    )

    assert built.returncode == 0, built.stderr
    return folder


class Fetches(html.parser.HTMLParser):
    """Collects the addresses that a page makes a browser fetch."""

    def __init__(self, page):
        """Parses a page."""
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        """Collects the addresses in one element."""
        attributes = dict(attrs)
        if tag == "link" and not FETCHED_LINKS & set((attributes.get("rel") or "").split()):
            return
        self.found += [value for name, value in attrs if (tag, name) in FETCHED]


def external(addresses):
    """Returns the addresses that lead to another host."""
    return [address for address in addresses if re.match(r"(\w+:)?//", address or "")]


@pytest.mark.slow
def test_nothing_is_fetched_from_other_hosts(site):
    """No page or style sheet of the site makes a browser fetch from another host, and no page uses the
    theme's scripts that would (diagrams, facts about a repository).
    """
    pages = list(site.rglob("*.html"))
    for page in pages:
        text = page.read_text()
        assert not external(Fetches(text).found), page
        assert 'class="mermaid"' not in text, page
        assert 'data-md-component="source"' not in text, page
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", sheet.read_text())
        assert not external(found), sheet
    assert len(pages) > len(list(DOCS.glob("*.md")))


@pytest.mark.slow
def test_linked_repository_files_are_pages_of_the_site(site):
    """Every repository file that a page links to is a page of the site, including code, and so are the
    files that it links to in turn.
    """
    index = (site / "index.html").read_text()

    assert 'href="source/scaling/"' in index
    assert "LossScaler" in (site / "source" / "scaling" / "index.html").read_text()
    assert (site / "source" / "scaling" / "scales.png").exists()
    assert "define_flags" in (site / "source/examples/digits.py/index.html").read_text()


@pytest.mark.slow
def test_the_api_page_shows_signatures_and_examples(site):
    """The API page documents every public name, and shows examples as code."""
    page = (site / "api" / "index.html").read_text()
    shown = set(re.findall(r'id="((?:scaling|strategies|trainer)\.[\w.]+)"', page))

    assert public_names() <= shown
    assert "trainer.Trainer.compute_loss" in shown
    assert "<blockquote>" not in page  # Markdown turns >>> outside of code into this


def test_every_page_is_in_the_navigation():
    """The navigation lists each page in docs/ exactly once, and nothing else."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"- ([\w/-]+\.md)$", navigation, re.MULTILINE)
    tutorials = [f"tutorials/{each.stem}.md" for each in TUTORIALS]

    assert sorted(listed) == sorted([*(page.name for page in DOCS.glob("*.md")), *tutorials])


def test_every_page_can_be_found_from_the_first():
    """The first page says what each other page is for; one tutorial stands for all of them."""
    first = (DOCS / "index.md").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if f"({page.name})" not in first]

    assert missing == ["index.md"]


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_shown_with_its_outputs(site, tutorial):
    """Its page has the outputs and plots of its cells, all of which have run without an error."""
    folder = site / "tutorials"
    notebook = json.loads((folder / f"{tutorial.stem}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    page = (folder / tutorial.stem / "index.html").read_text()

    plots = sum("image/png" in output.get("data", {}) for output in outputs)

    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert page.count("<img") == plots > 0
    assert any(output["output_type"] == "stream" for output in outputs)


def public_names():
    """Returns every public name with its package."""
    folders = {folder: importlib.import_module(folder).__all__ for folder in FOLDERS}
    folders["trainer.flags"] = ["define_flags", "make_trainer", "run_mode"]
    return {f"{folder}.{name}" for folder, names in folders.items() for name in names}


def test_every_public_name_is_on_the_api_page():
    """The API page lists each public name exactly once, and nothing else."""
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)

    assert sorted(listed) == sorted(public_names())


def test_each_law_names_a_test_that_carries_its_number():
    """Each of the laws L1 to L23, in order, links to a test that `-m law` selects for this law."""
    row = r"^\| \*\*(L\d+)\*\* .* \| \[`(\w+)`\]\(\.\./([\w/.]+)\) \|$"
    laws = re.findall(row, (DOCS / "numerics.md").read_text(), re.MULTILINE)

    assert [law for law, _, _ in laws] == [f"L{number}" for number in range(1, 24)]
    for law, test, path in laws:
        functions = {
            node.name: ast.get_docstring(node)
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert test in functions, f"{law}: no {test} in {path}"
        assert law in laws_of(functions[test]), f"{law}: {test} does not carry it"


def lines_of_a_troubled_run(folder):
    """Returns the lines of a run with a skip, retries, a step in float32, recorded gradients, a
    rollback and an error.
    """
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]

    def batches():
        for step in range(1, 14):
            yield x, 3 * x + np.float32({1: np.inf, 10: 30}.get(step, 0))
        raise RuntimeError("the disk is gone")

    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        metrics=["mae"],
        precision="mixed_float16",
        loss_scale="dynamic:initial_scale=2^24",
        skips=Skips(on_overflow="retry", on_stuck="float32", max_consecutive=1),
        monitoring=Monitoring(
            record_gradients=True, divergence=Divergence(loss_above=500.0, skip_data=True)
        ),
        model_dir=folder,
        checkpoints=Checkpoints(interval=5),
        log_interval=2,
        verbose=False,
    )
    with pytest.raises(DataError, match="the disk is gone"):
        trainer.train(batches, 20, eval_data=(x, x), eval_interval=5)
    trainer.train((x, x), trainer.totals.attempted + 1, global_batch=64)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_the_fields_of_the_log_are_listed(tmp_path):
    """Every field of every kind of line that `metrics.jsonl` holds is in docs/watching.md, and no other."""
    page = (DOCS / "watching.md").read_text().partition("### The lines of `metrics.jsonl`")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .*? \| (.*) \|$", page, re.MULTILINE)
    listed = {
        tuple(re.findall(r"`(\w+)`", kinds)): re.findall(r"`(\w+)`", row) for kinds, row in rows
    }
    found = {}
    for line in lines_of_a_troubled_run(tmp_path):
        kinds = next(kinds for kinds in listed if line["split"] in kinds)
        found.setdefault(kinds, set()).update(line.keys() - {"step", "split", "mae"})

    assert found.keys() == listed.keys() - {("split",), ("float8",)}  # the first is the head
    for kinds, fields in found.items():
        assert kinds == ("validation",) or fields == set(listed[kinds]), kinds


@pytest.mark.extras
def test_the_site_shows_the_values_of_defaults():
    """Every default of a group of settings is shown as the value that it has, not as a call."""
    griffe = pytest.importorskip("griffe", reason="pip install -e '.[docs]'")
    extensions = griffe.load_extensions(str(DOCS / "site_defaults.py"))
    package = griffe.load("trainer", search_paths=[ROOT], extensions=extensions)
    for group in (Checkpoints, Losses, Monitoring, Skips, Updates):
        shown = package[f"{group.__module__.partition('.')[2]}.{group.__name__}"].members
        for field in dataclasses.fields(group):
            if field.default is not dataclasses.MISSING:
                default = eval(str(shown[field.name].value), {})  # noqa: S307  # a literal
                assert default == field.default, field.name
