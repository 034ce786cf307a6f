"""The format of SQLite files: the golden file is read and written, other formats are migrated or refused."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from synchronizer.errors import UnsupportedError
from synchronizer.stores import open_store
from synchronizer.stores.sqlite import schema as sqlite_schema
from synchronizer.stores.sqlite import steps as sqlite_steps
from synchronizer.stores.sqlite.file import APPLICATION_ID
from tests.golden import golden_path, is_to_write

from ..golden_contents import LARGE, check_contents, use_contents, write_contents
from .extents import check_extents

GOLDEN = golden_path("sqlite-v1.db")
TO_FREE = "SELECT count(*) FROM segment WHERE state > 1 AND id < 1 << 23"


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def write(path: Path) -> None:
    with open_store(f"sqlite:///{path}") as store:
        write_contents(store)
        store.create("shop/cut-off")
        store.append("shop/cut-off", LARGE)
    with connected(path) as connection:  # as after a kill: nothing of it is freed yet
        sqlite_steps.delete(connection, "shop/cut-off", most=0)


def held(path: Path) -> dict[str, list[Any]]:
    """What the file holds. The bytes of the file itself depend on the version of SQLite."""
    with connected(path) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        pragmas = ("application_id", "user_version", "page_size", "journal_mode")
        return {
            **{table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in tables},
            **{pragma: connection.execute(f"PRAGMA {pragma}").fetchall() for pragma in pragmas},
            "schema": sorted(connection.execute("SELECT name, sql FROM sqlite_master").fetchall()),
        }


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    if is_to_write(GOLDEN):
        write(GOLDEN)
        for beside in GOLDEN.parent.glob(f"{GOLDEN.name}.*"):
            beside.unlink()
    path = tmp_path / "golden.db"
    shutil.copy(GOLDEN, path)
    return path


def test_a_file_is_written_and_read_as_in_the_first_release(stored: Path, tmp_path: Path) -> None:
    written = tmp_path / "written.db"
    write(written)
    assert held(written) == held(stored)
    with connected(stored) as connection:
        assert connection.execute(TO_FREE).fetchone() == (1,)
    with open_store(f"sqlite:///{stored}") as store:
        check_contents(store)
        use_contents(store)
    with connected(stored) as connection:
        check_extents(connection)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute(TO_FREE).fetchone() == (0,)


# Other formats


@pytest.mark.parametrize("format", [0, 2, 3])
def test_a_file_of_an_unknown_format_is_refused_and_stays_as_it_is(stored: Path, format: int) -> None:
    with connected(stored) as connection:
        connection.execute(f"PRAGMA user_version = {format}")
    before = stored.read_bytes()
    with pytest.raises(UnsupportedError, match=f"upgrade to the release that wrote it.* format={format} known=1"):
        open_store(f"sqlite:///{stored}")
    assert stored.read_bytes() == before


def test_a_file_with_other_tables_is_refused_as_one_of_an_unknown_format(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with connected(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
        connection.execute("CREATE TABLE segment (id INTEGER PRIMARY KEY, name TEXT UNIQUE)")
        connection.execute("CREATE TABLE chunk (key INTEGER PRIMARY KEY, data BLOB)")
    with pytest.raises(UnsupportedError, match="tables of an unknown format"):
        open_store(f"sqlite:///{path}")


class TestMigration:
    @pytest.fixture(autouse=True)
    def a_newer_format(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_schema, "FORMAT", 2)
        monkeypatch.setattr(sqlite_schema, "MIGRATIONS", {1: self.add_a_table})
        self.is_cut_off = False

    def add_a_table(self, connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE extra (text TEXT)")
        if self.is_cut_off:
            raise KeyboardInterrupt

    def test_a_file_of_an_older_format_is_migrated_once(self, stored: Path) -> None:
        with ThreadPoolExecutor(4) as threads:
            stores = list(threads.map(lambda _: open_store(f"sqlite:///{stored}"), range(4)))
        for store in stores:
            check_contents(store)
            store.close()
        assert held(stored)["user_version"] == [(2,)]
        assert held(stored)["extra"] == []

    def test_a_migration_that_is_cut_off_changes_nothing(self, stored: Path) -> None:
        before = held(stored)
        self.is_cut_off = True
        with pytest.raises(KeyboardInterrupt):
            open_store(f"sqlite:///{stored}")
        assert held(stored) == before
        self.is_cut_off = False
        with open_store(f"sqlite:///{stored}") as store:
            check_contents(store)
