"""A MkDocs hook that adds files outside docs/ to the site if a page links to them.

In the repository a page links to `../examples/digits.py`, which works wherever the repository is
browsed. The site does not contain that file, so this hook adds a page `source/examples/digits.py`
and changes the link to it.
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
    """Returns the repository file that a link in the file `path` leads to, or None."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).is_file() else None


def site_path(path: str) -> str:
    """Returns the path within the site of a repository file."""
    if path.startswith("docs/tutorials/"):
        return path.removeprefix("docs/").replace(".py", ".md")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    unchanged = path.endswith((".md", ".png"))
    return f"source/{path}" if unchanged else f"source/{path}.md"


def repository_path(path: str) -> str:
    """Returns the repository file at a path within the site; the inverse of `site_path`."""
    if not path.startswith("source/"):
        return f"docs/{path}"
    original = path.removeprefix("source/")
    return original if (ROOT / original).is_file() else original.removesuffix(".md")


def make_file(path: str, config: MkDocsConfig) -> File:
    """Returns a repository file as a file of the site; code becomes a page that shows it."""
    source = ROOT / path
    if site_path(path) == f"source/{path}":
        return File.generated(config, site_path(path), abs_src_path=str(source))
    language = source.suffix.removeprefix(".")
    code = f"# {path}\n\n```{language}\n{source.read_text()}```\n"
    return File.generated(config, site_path(path), content=code)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every file that a page links to, and the files that those link to in turn."""
    to_visit = list(files.documentation_pages())
    while to_visit:
        page = to_visit.pop()
        path = repository_path(page.src_uri)
        if not path.endswith(".md"):
            continue
        for link in LINK.findall(page.content_string):
            target = target_of(link, path)
            if target and files.get_file_from_path(site_path(target)) is None:
                files.append(make_file(target, config))
                to_visit.append(files.get_file_from_path(site_path(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Changes every link to a repository file to its path within the site."""
    here = page.file.src_uri
    path = repository_path(here)

    def new_target(link: re.Match[str]) -> str:
        target = target_of(link[0], path)
        return posixpath.relpath(site_path(target), posixpath.dirname(here)) if target else link[0]

    return LINK.sub(new_target, markdown)
