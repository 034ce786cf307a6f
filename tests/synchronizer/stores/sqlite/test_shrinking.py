"""A SQLite file gives the space of deleted data back to the disk."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from synchronizer import open_store
from synchronizer.stores.sqlite import schema, steps

MIB = 1024 * 1024


def fill(url: str, segment: str, mib: int, *, beside: str | None = None) -> None:
    with open_store(url) as store:
        for name in (segment, beside):
            if name is not None:
                store.create(name)
        for number in range(mib):
            store.append(segment, bytes([number % 256]) * MIB)
            if beside is not None:
                store.append(beside, bytes([number % 256]) * 20_000)


def pages(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA page_count").fetchone()[0])


@pytest.mark.parametrize("deletes", [True, False], ids=["deleted", "truncated"])
def test_the_file_shrinks_after_much_was_deleted_and_loses_nothing(tmp_path: Path, deletes: bool) -> None:
    path = tmp_path / "store.db"
    fill(f"sqlite:///{path}", "old", 100, beside="kept")
    assert os.path.getsize(path) > 80 * MIB
    with open_store(f"sqlite:///{path}") as store:
        if deletes:
            store.delete("old")
        else:
            store.truncate("old", 99 * MIB)
            assert store.read("old", 99 * MIB, 10 * MIB) == bytes([99]) * MIB
        kept = store.read("kept", 0, 10 * MIB)
        assert kept == b"".join(bytes([number]) * 20_000 for number in range(100))
    assert os.path.getsize(path) < 25 * MIB
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_the_space_of_what_comes_and_goes_is_kept(tmp_path: Path) -> None:
    """Shrinking and growing again with each truncation would cost more than the space is worth."""
    path = tmp_path / "store.db"
    fill(f"sqlite:///{path}", "log", 45)
    before = pages(path)
    with open_store(f"sqlite:///{path}") as store:
        store.truncate("log", 45 * MIB)
    assert pages(path) == before


def test_a_file_of_an_earlier_release_works_and_does_not_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"

    def make(connection: sqlite3.Connection) -> None:
        for statement in schema._SCHEMA:
            connection.execute(statement)
        schema.sqlite_rows.begin(connection)

    with monkeypatch.context() as patched:
        patched.setattr(schema, "make", make)
        fill(f"sqlite:///{path}", "old", 40)
    before = pages(path)
    with open_store(f"sqlite:///{path}") as store:
        store.delete("old")
    assert pages(path) == before
    with closing(sqlite3.connect(path)) as connection:
        assert steps.spare_pages(connection) == 0
