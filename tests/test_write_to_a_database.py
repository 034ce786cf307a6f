"""The code of docs/howto/write-to-a-database.md, taken from the page, on a PostgreSQL server."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import psycopg
import pytest

import readergroup as rg
from tests.places import DOCS

PAGE = DOCS / "howto" / "write-to-a-database.md"


@pytest.fixture
def program(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the program of the page has defined when it has run."""
    printed = re.search(r"^## PostgreSQL\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert printed
    (tmp_path / "page.py").write_text(printed[1])
    monkeypatch.setenv("DATABASE_URL", database_url)
    return runpy.run_path(str(tmp_path / "page.py"))


def rows(database: psycopg.Connection) -> list[Any]:
    return database.execute("SELECT pointer, customer, body FROM orders ORDER BY body").fetchall()


def test_each_event_is_one_row_also_after_a_repeat_and_a_former_owner_is_refused(
    program: dict[str, Any], database_url: str
) -> None:
    store = program["store"]
    with rg.connect(database_url) as client, psycopg.connect(database_url, autocommit=True) as database:
        assert [row[1:] for row in rows(database)] == [("ann", b"three pears")]
        database.execute("DELETE FROM orders")
        client.streams.create("shop/returns")
        with client.writer("shop/returns") as writer:
            for number in range(10):
                writer.write(b"pear %d" % number, routing_key="bob")
        client.streams.seal("shop/returns")
        group = client.groups.create("returns", streams=["shop/returns"])

        with group.reader("first", auto_commit=False) as reader:  # fails before it commits
            former = reader.read_batch(10)
            store(database, former)
        stored = rows(database)
        assert [row[1:] for row in stored] == [("bob", b"pear %d" % number) for number in range(10)]
        with group.reader("second", auto_commit=False) as reader:
            for batch in reader.batches():
                assert batch.fencing_token > former.fencing_token
                store(database, batch)
                store(database, batch)
                reader.commit()
        assert rows(database) == stored

        database.execute("DELETE FROM orders")
        with pytest.raises(RuntimeError, match="a newer reader owns shop/returns/0"):
            store(database, former)
        assert rows(database) == []


def test_a_pool_stores_each_event_once(program: dict[str, Any], database_url: str) -> None:
    def handle(batch: rg.EventBatch[bytes]) -> None:
        with psycopg.connect(database_url, autocommit=True) as database:
            program["store"](database, batch)

    with rg.connect(database_url) as client, psycopg.connect(database_url, autocommit=True) as database:
        database.execute("DELETE FROM orders")
        client.streams.create("shop/returns", scaling=rg.ScalingPolicy.fixed(2))
        with client.writer("shop/returns") as writer:
            for number in range(10):
                writer.write(b"pear %d" % number, routing_key=f"customer-{number}")
        client.streams.seal("shop/returns")
        client.groups.create("returns", streams=["shop/returns"]).pool(handle_batch=handle, readers=2).run()
        assert [row[2] for row in rows(database)] == [b"pear %d" % number for number in range(10)]


def test_a_former_owner_waits_for_the_present_one_and_is_then_refused(
    program: dict[str, Any], database_url: str
) -> None:
    claim = program["CLAIM"]
    with (
        psycopg.connect(database_url) as present,
        psycopg.connect(database_url, options="-c lock_timeout=100ms") as former,
    ):
        assert present.execute(claim, ("shop/returns/0", 20)).fetchone() == (20,)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            former.execute(claim, ("shop/returns/0", 10))
        former.rollback()
        present.commit()
        assert former.execute(claim, ("shop/returns/0", 10)).fetchone() is None
        former.rollback()
        assert present.execute(claim, ("shop/returns/0", 20)).fetchone() == (20,)


def test_pointers_stay_unique_when_a_stream_is_deleted_and_created_again(store_url: str) -> None:
    pointers = []
    with rg.connect(store_url) as client:
        for life in ("first", "second"):
            client.streams.create("shop/orders")
            with client.writer("shop/orders") as writer:
                writer.write(b"three pears")
            group = client.groups.create(life, streams=["shop/orders"])
            with group.reader() as reader:
                event = reader.read(timeout=20)
            assert event is not None
            pointers.append(event.pointer)
            client.groups.delete(life)
            client.streams.delete("shop/orders")
    first, second = pointers
    assert (first.segment, first.offset) == (second.segment, second.offset)
    assert str(first) != str(second)
