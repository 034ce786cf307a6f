"""The code of docs/howto/write-to-a-database.md, taken from the page, on a PostgreSQL server."""

from __future__ import annotations

import re
import runpy
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

import readergroup as rg
from readergroup.sinks import SqlSink
from tests.places import DOCS
from tests.waiting import PATIENCE_SECONDS

PAGE = DOCS / "howto" / "write-to-a-database.md"


@pytest.fixture
def program(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the programs of the page have defined when they have run."""
    printed = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(printed))
    monkeypatch.setenv("DATABASE_URL", database_url)
    return runpy.run_path(str(tmp_path / "page.py"))


def test_the_handler_of_the_page_stores_each_event_once(program: dict[str, Any], database_url: str) -> None:
    with rg.connect(database_url) as client, psycopg.connect(database_url, autocommit=True) as database:
        rows = database.execute("SELECT customer, body FROM orders").fetchall()
        assert rows == 2 * [("ann", b"three pears")]  # of two groups, each once
        database.execute("DELETE FROM orders")
        for group in ("archive", "audit"):
            client.groups.delete(group)
            again = client.groups.create(group, streams=["shop/orders"])
            again.pool(program["store"], sink=SqlSink(program["connect"])).run()
        assert database.execute("SELECT * FROM orders").fetchall() == []


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_printed_statements_create_the_tables(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments = ["sink", "ddl", "--table", "progress"]
    if kind == "sqlite":

        def connect() -> Any:
            return sqlite3.connect(tmp_path / "shop.db")
    else:
        url = request.getfixturevalue("database_url")
        arguments += ["--schema", "shop"]

        def connect() -> Any:
            return psycopg.connect(url)

    run = [sys.executable, "-m", "readergroup.cli", *arguments]
    printed = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True).stdout
    connection = connect()
    if kind == "sqlite":
        connection.executescript(printed)
    else:
        connection.execute("CREATE SCHEMA shop")
        connection.execute(printed)
    connection.commit()
    connection.close()
    sink = SqlSink(connect, "progress", schema=None if kind == "sqlite" else "shop", create_table=False)
    handled = []
    with rg.connect("memory://") as client:
        client.streams.create("shop/orders")
        with client.writer("shop/orders") as writer:
            writer.write(b"three pears")
        client.streams.seal("shop/orders")
        for _ in range(2):
            group = client.groups.create("billing", streams=["shop/orders"])
            group.pool(lambda event, connection: handled.append(event.raw), sink=sink).run()
            client.groups.delete("billing")
    sink.close()
    assert handled == [b"three pears"]


def test_pointers_stay_unique_when_a_stream_is_deleted_and_created_again(store_url: str) -> None:
    pointers = []
    with rg.connect(store_url) as client:
        for life in ("first", "second"):
            client.streams.create("shop/orders")
            with client.writer("shop/orders") as writer:
                writer.write(b"three pears")
            group = client.groups.create(life, streams=["shop/orders"])
            with group.reader() as reader:
                event = reader.read(timeout=PATIENCE_SECONDS)
            assert event is not None
            pointers.append(event.pointer)
            client.groups.delete(life)
            client.streams.delete("shop/orders")
    first, second = pointers
    assert (first.segment, first.offset) == (second.segment, second.offset)
    assert str(first) != str(second)
