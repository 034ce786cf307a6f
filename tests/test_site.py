"""The site that `make site` builds from the docs."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module

import pytest

from tests.places import PACKAGES, ROOT

_DOCUMENTED = re.compile(r'id="([\w.]+)" class="doc doc-heading"')


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The pages of the site, by their addresses."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}


def test_the_site_builds_without_a_warning_and_documents_every_public_name(pages: Mapping[str, str]) -> None:
    documented = {each for page in pages.values() for each in _DOCUMENTED.findall(page)}
    public = {each for package in PACKAGES for each in import_module(package).__all__}
    assert public - {each.rpartition(".")[2] for each in documented} == set()
    assert sorted(set(_fields()) - documented) == []
    loaded = re.compile(r'<(?:script|link|img)[^>]* (?:src|href)="?(?:https?:)?//(?!127)[^" >]+')
    external = [found[0] for page in pages.values() for found in loaded.finditer(page) if "canonical" not in found[0]]
    assert external == []


def _fields() -> Iterator[str]:
    """Iterate over the fields of public classes that do not explain them as arguments."""
    for package in PACKAGES:
        module = import_module(package)
        for found in (getattr(module, name) for name in module.__all__):
            is_record = dataclasses.is_dataclass(found) or hasattr(found, "model_fields")
            if isinstance(found, type) and is_record and "Args:" not in (found.__doc__ or ""):
                for field in found.__dict__.get("__annotations__", {}):
                    if not field.startswith("_") and "ClassVar" not in str(found.__annotations__[field]):
                        yield f"{found.__module__}.{found.__qualname__}.{field}"


def test_the_reference_shows_examples_as_code_and_comments_as_text(pages: Mapping[str, str]) -> None:
    reference = {address: page for address, page in pages.items() if address.startswith("reference/")}
    assert [address for address, page in reference.items() if "<blockquote>" in page] == []
    assert "The most bytes of" in reference["reference/synchronizer/know-its-limits.html"]


def test_the_navigation_groups_the_reference_and_each_page_describes_itself(pages: Mapping[str, str]) -> None:
    labels = re.findall(r'<span class="md-ellipsis">\s*(.*?)\s*</span>', pages["reference/readergroup/read.html"])
    assert {"readergroup", "Errors", "synchronizer", "notifications", "Other modules"} <= set(labels)
    described = re.compile(r'<meta name="description" content="([^"]*)">')
    descriptions = Counter(described.findall(page)[0] for page in pages.values())
    assert descriptions.most_common(1)[0][1] < len(pages) / 10
    assert "<title>readergroup - readergroup" not in pages["index.html"]
