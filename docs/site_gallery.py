"""A MkDocs hook that adds the reports of docs/gallery.md to the site; and writes its pictures.

`mkdocs build` runs the commands of the page, and links each picture to the report of its name.
`mkdocs serve` runs nothing and links nothing. The pictures in docs/gallery/ are written by

    python docs/site_gallery.py

which needs the extras `browser`, `examples` and `report`.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
COMMAND = re.compile(r"^\$ python (examples/.*)$", re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]*\]\(gallery/(\w+)\.png\)")
ENDS_IN_AN_ERROR = {"stuck"}
FIGURES = {"unscaled": "underflow", "float8": "float8"}  # shown instead of the top of the page
WIDTH, HEIGHT = 900, 1000  # of a picture, in pixels
execute = True


def on_startup(command: str, dirty: bool) -> None:  # noqa: ARG001  # MkDocs passes it
    """Makes the runs only where the site is built."""
    global execute  # noqa: PLW0603  # a hook has no other state
    execute = command == "build"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reports."""
    if execute:
        with tempfile.TemporaryDirectory() as folder:
            for name, report in reports(pathlib.Path(folder)).items():
                files.append(
                    File.generated(config, f"gallery/{name}.html", content=report.read_text())
                )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Makes each picture of the gallery a link to its report."""
    if page.file.src_uri != PAGE.name or not execute:
        return markdown
    return PICTURE.sub(r"[\g<0>](gallery/\1.html)", markdown)


def reports(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Runs the commands of the page in a folder. Returns the reports, keyed by the runs' names."""
    found: dict[str, pathlib.Path] = {}
    for command in COMMAND.findall(PAGE.read_text()):
        began = time.monotonic()
        script, *flags = shlex.split(command)
        [run] = [each.partition("=")[2] for each in flags if each.startswith("--model_dir=")]
        name = pathlib.Path(run).name
        program = [str(ROOT / script), *flags, "--verbose=quiet"]
        run_program(program, folder, fails=name in ENDS_IN_AN_ERROR)
        run_program(["-m", "trainer.report", run], folder)
        sys.stderr.write(f"ran {command} in {time.monotonic() - began:.0f} s\n")
        found[name] = folder / run / "report" / "report.html"
    return found


def run_program(program: Sequence[str], folder: pathlib.Path, *, fails: bool = False) -> None:
    """Runs a Python program in a folder, and ends the build if it fails and is not meant to."""
    ended = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if bool(ended.returncode) != fails:
        raise PluginError(f"{program} ended with {ended.returncode}: {ended.stderr}")


def photograph(report: pathlib.Path, picture: pathlib.Path) -> None:
    """Saves the top of a report, as a browser shows it, as a PNG file."""
    from PIL import Image

    whole = report.with_suffix(".png")
    wanted = {"width": WIDTH, "dark": False, "pages": {str(report): str(whole)}}
    browser = [sys.executable, ROOT / "tests" / "browser.py", json.dumps(wanted)]
    subprocess.run(browser, check=True, capture_output=True)
    with Image.open(whole) as image:
        top = image.crop((0, 0, image.width, min(image.height, HEIGHT)))
        top.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


def main() -> None:
    """Writes the pictures."""
    pictures = PAGE.with_suffix("")
    pictures.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, report in reports(pathlib.Path(folder)).items():
            if figure := FIGURES.get(name):
                shutil.copy(report.with_name(f"{figure}.png"), pictures / f"{name}.png")
            else:
                photograph(report, pictures / f"{name}.png")


if __name__ == "__main__":
    main()
