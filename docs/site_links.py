"""Brings into the site what its pages link to outside docs/.

In the repository a page links to `../examples/digits.py`, and whatever shows the repository follows
that. The site has no such file, so each file that is linked to becomes a page of it,
`source/examples/digits.py`, and the link leads there.
"""

import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)[^)#\s]+")


def target_of(link: str, path: str) -> str | None:
    """Returns the file of the repository that a link in another leads to, if it leads to one."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).is_file() else None


def place(path: str) -> str:
    """Returns where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    as_it_is = path.endswith((".md", ".png"))
    return f"source/{path}" if as_it_is else f"source/{path}.md"


def repository_path(place: str) -> str:
    """Returns which file of the repository the site has there."""
    if not place.startswith("source/"):
        return f"docs/{place}"
    path = place.removeprefix("source/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def made_page(path: str, config: MkDocsConfig) -> File:
    """Returns a file of the repository as one of the site: code is a page that shows it."""
    source = ROOT / path
    if place(path) == f"source/{path}":
        return File.generated(config, place(path), abs_src_path=str(source))
    language = source.suffix.removeprefix(".")
    code = f"# {path}\n\n```{language}\n{source.read_text()}```\n"
    return File.generated(config, place(path), content=code)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every file that a page links to, and what those link to in turn."""
    waiting = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    while waiting:
        path = waiting.pop()
        if not path.endswith(".md"):
            continue
        for link in LINK.findall((ROOT / path).read_text()):
            target = target_of(link, path)
            if target and files.get_file_from_path(place(target)) is None:
                files.append(made_page(target, config))
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Leads every link to where the site has its file."""
    here = page.file.src_uri
    path = repository_path(here)

    def moved(link: re.Match[str]) -> str:
        target = target_of(link[0], path)
        return posixpath.relpath(place(target), posixpath.dirname(here)) if target else link[0]

    return LINK.sub(moved, markdown)
