"""What MkDocs does not do by itself for the site of these pages.

The README becomes the first page. A file outside this folder that a page links to becomes a page under ``files/``. The
public names, by the tables of ``api.md``, become pages under ``reference/``, made from their docstrings.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from html import escape, unescape
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = "docs"
PACKAGES: Final = ("synchronizer", "notifications", "readergroup")
#: The public modules whose names are not those of a package.
MODULES: Final = tuple(f"readergroup.{name}" for name in ("aio", "serve", "sinks", "spark", "telemetry", "testing"))
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
_PACKAGE: Final = re.compile(rf"^## ({'|'.join(PACKAGES)})\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ROW: Final = re.compile(r"^\| ([^|]+?) \| ([^|]+?) \|", re.MULTILINE)
_PARAGRAPH: Final = re.compile(r"<p>(.*?)</p>", re.DOTALL)
_TAG: Final = re.compile(r"<[^>]+>")
_NAME: Final = re.compile(r"`(\w+)`")


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of the reference and of the decisions to the navigation."""
    assert config.nav is not None
    for section in config.nav:
        match section:
            case {"Reference": list(pages)}:
                sections: dict[str, list[dict[str, str]]] = {}
                for path, (title, _) in _reference().items():
                    sections.setdefault(_section(path), []).append({title: path})
                pages += ({section: found} for section, found in sections.items())
            case {"Contribute": list(pages)}:
                decisions = sorted(each.name for each in (ROOT / DOCS / "adr").glob("0*.md"))
                pages.append({"Decisions": [f"adr/{name}" for name in ("README.md", *decisions)]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    for source in _linked([each.src_uri for each in files.documentation_pages()]):
        files.append(File.generated(config, _place(source), content=_text(source)))
    for path, (title, names) in _reference().items():
        blocks = "\n\n".join(map(_block, names))
        files.append(File.generated(config, path, content=f"# {title}\n\n{blocks}\n"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the files are on the site, and names to the reference."""
    here = page.file.src_uri
    if here == "api.md":
        markdown = _with_references(markdown)
    if here.startswith("reference/"):
        return markdown
    source = _source(here)

    def place(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        if target is None:
            return link[1]
        return posixpath.relpath(_place(target), posixpath.dirname(here) or ".")

    return _LINK.sub(place, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Describe each page to search engines by its first paragraph, and the first page by what the project is."""
    texts = (" ".join(unescape(_TAG.sub("", each)).split()) for each in _PARAGRAPH.findall(content))
    description = next(filter(None, texts), None)
    if description is not None:
        page.meta["description"] = escape(description)
    if page.file.src_uri == "index.md":
        page.meta["title"] = config.site_description


# ---------------------------------------------------------------------- files of the repository


def _linked(pages: list[str]) -> list[str]:
    """Return the files outside this folder that the pages, or these files, link to, and the README."""
    found = {"README.md": None}
    waiting = ["README.md", *(_source(page) for page in pages)]
    while waiting:
        source = waiting.pop()
        if not source.endswith(".md"):
            continue
        for link in _LINK.findall((ROOT / source).read_text()):
            target = _target(source, link)
            if target is not None and not target.startswith(f"{DOCS}/") and target not in found:
                found[target] = None
                waiting.append(target)
    return list(found)


def _target(source: str, link: str) -> str | None:
    """Return the file of the repository that the link of a page leads to; None if it leads to none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (ROOT / target).is_dir():
        target += "/README.md"
    return target if (ROOT / target).is_file() else None


def _place(source: str) -> str:
    """Return where the site has a file of the repository."""
    if source == "README.md":
        return "index.md"
    if source.startswith(f"{DOCS}/"):
        return source.removeprefix(f"{DOCS}/")
    return f"files/{source}" if source.endswith(".md") else f"files/{source}.md"


def _source(page: str) -> str:
    """Return the file of the repository that is this page of the site."""
    if page == "index.md":
        return "README.md"
    if not page.startswith("files/"):
        return f"{DOCS}/{page}"
    source = page.removeprefix("files/")
    return source if (ROOT / source).is_file() else source.removesuffix(".md")


def _text(source: str) -> str:
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        return text
    kind = posixpath.splitext(source)[1].removeprefix(".")
    return f"# {source}\n\n````{kind}\n{text}````\n"


# ---------------------------------------------------------------------- the reference


def _reference() -> Mapping[str, tuple[str, list[str]]]:
    """Return the pages of the reference, each with its title and its names."""
    found = {path: (title, names) for path, title, names, _ in _rows((ROOT / DOCS / "api.md").read_text())}
    known = {_object_path(name) for _, names in found.values() for name in names}
    for module in MODULES:
        names = [f"{module}.{name}" for name in import_module(module).__all__]
        found[f"reference/{module}.md"] = module, [name for name in names if _object_path(name) not in known]
    return found


def _section(path: str) -> str:
    """Return the section of the navigation that has this page of the reference."""
    folder, _, name = path.removeprefix("reference/").rpartition("/")
    if name.startswith("errors-"):
        return "Errors"
    return folder or "Other modules"


def _rows(text: str) -> Iterator[tuple[str, str, list[str], tuple[int, int]]]:
    """Iterate over the rows of names: the page, its title, the names, and where the cell with them is in the text."""
    for section in _PACKAGE.finditer(text):
        package = import_module(section[1])
        for row in _ROW.finditer(text, *section.span(2)):
            names = [f"{section[1]}.{name}" for name in _NAME.findall(row[2]) if name in package.__all__]
            if names:
                title = re.sub(r":.*| \(\[.*|`", "", row[1])
                if names[0].endswith("Error"):
                    title = f"errors about {title}"
                slug = re.sub(r"\W+", "-", title)
                yield f"reference/{section[1]}/{slug}.md", title.capitalize(), names, row.span(2)


def _block(name: str) -> str:
    """Return the instruction to document this name, with the signature of its constructor if users call it."""
    is_called = "Args:" in (getdoc(_object(name)) or "")
    return f"::: {_object_path(name)}\n    options:\n      merge_init_into_class: {str(is_called).lower()}"


def _with_references(text: str) -> str:
    for path, _, names, (start, end) in reversed([*_rows(text)]):
        anchors = {name.rpartition(".")[2]: f"{path}#{_object_path(name)}" for name in names}
        cell = text[start:end]
        for name, anchor in anchors.items():
            cell = cell.replace(f"`{name}`", f"[`{name}`]({anchor})")
        text = text[:start] + cell + text[end:]
    return text


def _object_path(name: str) -> str:
    """Return where the object of a public name is defined."""
    found = _object(name)
    is_ours = getattr(found, "__module__", "").partition(".")[0] in PACKAGES and hasattr(found, "__qualname__")
    return f"{found.__module__}.{found.__qualname__}" if is_ours else name


def _object(name: str) -> Any:
    package, _, attribute = name.rpartition(".")
    return getattr(import_module(package), attribute)
