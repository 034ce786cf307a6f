"""The site that `make site` builds from the docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from tests.places import PACKAGES, ROOT


def test_the_site_builds_without_a_warning_and_documents_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    pages = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    documented = {each for page in pages for each in re.findall(r'id="[\w.]*?(\w+)" class="doc doc-heading"', page)}
    public = {each for package in PACKAGES for each in import_module(package).__all__}
    assert public - documented == set()
    loaded = re.compile(r'<(?:script|link|img)[^>]* (?:src|href)="?(?:https?:)?//(?!127)[^" >]+')
    assert [found[0] for page in pages for found in loaded.finditer(page) if "canonical" not in found[0]] == []
