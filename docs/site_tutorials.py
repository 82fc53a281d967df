"""A MkDocs hook that runs the tutorials and shows them with their outputs and plots.

A tutorial is a Python file of `docs/tutorials/`, with text in comments that begin with `# %%
[markdown]`, so that it can be read, linted and run as it is, and opened in Jupyter by Jupytext.
`mkdocs build` runs each one and makes a page and a notebook from it; an error in one ends the
build. `mkdocs serve` only shows the code, so that a page appears at once after an edit.
"""

import os
import pathlib
import sys
import time
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
SECONDS = 600  # for one cell
ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "TF_CPP_MIN_LOG_LEVEL": "3",  # TensorFlow's own messages would stand between the outputs
}
execute = True


def on_startup(command: str, dirty: bool) -> None:  # noqa: ARG001  # MkDocs passes it
    """Runs the tutorials only where the site is built."""
    global execute  # noqa: PLW0603  # a hook has no other state
    execute = command == "build"


def notebook_of(path: pathlib.Path) -> Any:
    """Returns a tutorial as a notebook, with its outputs if the site is built."""
    import jupytext
    import nbclient
    import traitlets.config

    notebook = jupytext.read(path)
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    if execute:
        sockets = traitlets.config.Config({"KernelManager": {"transport": "ipc"}})  # not TCP
        client = nbclient.NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", config=sockets
        )
        try:
            client.execute(cwd=str(ROOT), env=os.environ | ENVIRONMENT)
        except nbclient.exceptions.CellExecutionError as error:
            raise PluginError(f"{path} ended in an error: {error}") from error
    return notebook


def joined(notebook: Any) -> Any:
    """Returns a notebook with each run of printed lines as one output.

    A program that flushes after each line makes as many outputs, each of which would be shown as a
    block of its own.
    """
    import nbconvert

    join = nbconvert.preprocessors.CoalesceStreamsPreprocessor(enabled=True)
    return join(notebook, {})[0]


def pages_of(path: pathlib.Path, config: MkDocsConfig) -> list[File]:
    """Returns the page of a tutorial, its plots, and its notebook, as files of the site."""
    import nbconvert
    import nbformat

    began = time.monotonic()
    notebook = joined(notebook_of(path))
    done = "ran" if execute else "read"
    sys.stderr.write(f"{done} {path.name} in {time.monotonic() - began:.0f} s\n")
    exporter = nbconvert.MarkdownExporter()
    resources = {"output_files_dir": f"{path.stem}_files", "unique_key": path.stem}
    body, resources = exporter.from_notebook_node(notebook, resources)
    found = {f"{path.stem}.md": body, f"{path.stem}.ipynb": nbformat.writes(notebook)}
    return [
        File.generated(config, f"tutorials/{name}", content=content)
        for name, content in (found | resources["outputs"]).items()
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the tutorials."""
    for path in sorted(TUTORIALS.glob("*.py")):
        for file in pages_of(path, config):
            files.append(file)
    return files
