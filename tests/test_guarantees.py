"""Every guarantee and every schedule names tests that exist, and what the page says of a store is what that says."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict
from functools import cache

import pytest

from synchronizer import open_store
from tests.places import ROOT

PAGE = (ROOT / "docs/guarantees.md").read_text()
NUMBERS = [*(f"S{number}" for number in range(1, 9)), *(f"L{number}" for number in range(1, 6))]


@pytest.mark.parametrize("number", NUMBERS)
def test_guarantee_is_held_by_tests_that_exist(number: str) -> None:
    (section,) = re.findall(rf"^\*\*{number} .*?(?=^\*\*[SL]\d|^## )", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r"^- `(tests/\S+)::(\w+)`$", section, re.MULTILINE)
    assert named
    check_exist(named)


def test_stored_forms_are_held_by_tests_that_exist() -> None:
    section = PAGE.partition("## What stays readable")[2].partition("\n## ")[0]
    named = re.findall(r"^- `(tests/\S+)::(\w+)`$", section, re.MULTILINE)
    assert named
    check_exist(named)


def test_each_row_that_compares_with_kafka_names_a_test_that_exists() -> None:
    section = (ROOT / "docs/spark.md").read_text().partition("## Compared with Spark's Kafka source")[2]
    rows = re.findall(r"^\| .* \| (.*)\|$", section.partition("\n## ")[0], re.MULTILINE)[2:]
    named = [pair for row in rows for pair in re.findall(r"`(\w+)::(\w+)`", row)]
    assert len(named) >= len(rows) - 1 > 10
    check_exist([(f"tests/readergroup/spark/{file}.py", name) for file, name in named])


def test_every_schedule_is_brought_about_by_something_that_exists() -> None:
    page = (ROOT / "docs/schedules.md").read_text()
    rows = re.findall(r"^\| (F\d+)? \| .* \| (.*) \|$", page, re.MULTILINE)
    assert [number for number, _ in rows if number] == [f"F{number}" for number in range(1, 25)]
    for _, tests in rows:
        named = re.findall(r"`([^`]+)::(\w+)`", tests)
        assert named
        check_exist(named)


def check_exist(tests: list[tuple[str, str]]) -> None:
    for path, name in tests:
        assert name in names_in(path), f"{path} has no {name}"


@cache
def names_in(path: str) -> set[str]:
    """Its functions and classes, also those inside others."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.stores
def test_a_store_guarantees_what_the_table_says(store_url: str, request: pytest.FixtureRequest) -> None:
    columns = ["memory", "sqlite", "postgresql", "nats", "nats-cluster"]
    backend = request.node.callspec.params["store_url"]
    if backend not in columns:
        pytest.skip("a server of somebody's own may be set otherwise")
    rows = re.findall(r"^\| `(\w+)`.*?\| (.*) \|$", PAGE.partition("## What a store promises")[2], re.MULTILINE)
    said = {name: cells.split(" | ")[columns.index(backend)] for name, cells in rows if "://" not in cells}
    with open_store(store_url) as store:
        guaranteed = {name: _in_words(value) for name, value in asdict(store.guarantees).items()}
    assert {name: re.sub(" [¹²³⁴⁵⁶]$", "", cell) for name, cell in said.items()} == guaranteed


def _in_words(value: bool | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value // 1024**2} MiB"
