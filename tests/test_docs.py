"""Every Python block of the README and the docs runs as printed, in an empty folder; every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import DOCS, ROOT
from tests.seeds import some_and_broad
from tests.waiting import PATIENCE_SECONDS

PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
#: What runs in the tests of Spark.
NEEDS_SPARK = [DOCS / "spark.md", DOCS / "howto" / "use-event-time.md"]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


PROGRAMS = [page for page in PAGES if blocks(page) and page not in NEEDS_SPARK]


@pytest.mark.parametrize("page", some_and_broad(PROGRAMS), ids=name)
def test_python_blocks_run_as_printed(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = tmp_path / "page.py"
    program.touch()
    for block in blocks(page):
        # A block that begins with the name of a file is that file.
        named = re.match(r"# (\w+\.py)\n", block)
        with open(tmp_path / named[1] if named else program, "a") as file:
            file.write(block + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "READERGROUP_URL"}
    if "DATABASE_URL" in program.read_text():
        environment["DATABASE_URL"] = request.getfixturevalue("database_url")
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    # A block of text right after one of Python is what it prints.
    for shown in re.findall(r"^```python\n.*?^```\n+```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        assert shown in done.stdout


def test_the_programs_of_the_readme_run_again_in_the_same_folder(tmp_path: Path) -> None:
    for _ in range(2):
        for program in blocks(ROOT / "README.md"):
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path
            )
            assert done.returncode == 0, done.stderr


def test_the_targets_of_make_that_pages_name_exist() -> None:
    texts = [page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"]]
    named = {target for text in texts for target in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test", "test-spark-broad"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def headings(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    plain = [re.sub(r"[`*]", "", each).lower() for each in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", each).replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    found = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    targets = [(page.parent / file if file else page, heading) for file, heading in found]
    assert [(str(file), heading) for file, heading in targets if heading not in headings(file)] == []
