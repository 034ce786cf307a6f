"""Databases of an application, in each form that a sink takes, with a table that shows every effect."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psycopg

import readergroup as rg

PLAIN: Final = (
    "sqlite3",
    "sqlalchemy-sqlite",
    "psycopg-function",
    "psycopg-pool",
    "psycopg-connection",
    "psycopg2",
    "pg8000",
    "sqlalchemy-psycopg",
)
ASYNCHRONOUS: Final = (
    "sqlalchemy-aiosqlite",
    "sqlalchemy-psycopg-async",
    "psycopg-async-pool",
    "psycopg-async-function",
)

_SQLITE = "CREATE TABLE effects (id integer PRIMARY KEY AUTOINCREMENT, key text, number integer, pointer text)"
_POSTGRESQL = "CREATE TABLE effects (id bigserial PRIMARY KEY, key text, number integer, pointer text)"
_INSERT = "INSERT INTO effects (key, number, pointer) VALUES ({})"


class ApplicationDatabase:
    """One database, and how the application of this kind reaches it."""

    def __init__(self, kind: str, folder: Path, postgresql: Callable[[], str]) -> None:
        self.kind = kind
        self.is_sqlite = "sqlite" in kind
        self.path = folder / "application.db"
        self.url = "" if self.is_sqlite else postgresql()
        self._opened: list[Any] = []
        self.execute(_SQLITE if self.is_sqlite else _POSTGRESQL)

    def connect(self, **options: Any) -> Any:
        """A new connection of the driver."""
        if self.is_sqlite:
            return sqlite3.connect(self.path, timeout=30, **options)
        return psycopg.connect(self.url, **options)

    def _connect_pg8000(self) -> Any:
        import pg8000

        server = urlsplit(self.url)
        return pg8000.connect(
            server.username or "", host=server.hostname, port=server.port, database=server.path.lstrip("/")
        )

    def given(self) -> Any:
        """What the application gives to a sink."""
        match self.kind:
            case "sqlite3" | "psycopg-function":
                return self.connect
            case "psycopg-connection":
                self._opened.append(connection := self.connect())
                return connection
            case "psycopg2":
                import psycopg2

                return partial(psycopg2.connect, self.url)
            case "pg8000":
                return self._connect_pg8000
            case "psycopg-pool":
                from psycopg_pool import ConnectionPool

                self._opened.append(pool := ConnectionPool(self.url, min_size=1, max_size=16, open=True))
                return pool
            case "psycopg-async-pool":
                from psycopg_pool import AsyncConnectionPool

                return AsyncConnectionPool(self.url, min_size=1, max_size=16, open=False)
            case "psycopg-async-function":

                async def connect() -> psycopg.AsyncConnection:
                    return await psycopg.AsyncConnection.connect(self.url)

                return connect
        import sqlalchemy
        from sqlalchemy.ext.asyncio import create_async_engine

        url = {
            "sqlalchemy-sqlite": f"sqlite:///{self.path}?timeout=30",
            "sqlalchemy-aiosqlite": f"sqlite+aiosqlite:///{self.path}?timeout=30",
        }.get(self.kind, self.url.replace("postgresql://", "postgresql+psycopg://"))
        if self.kind in ASYNCHRONOUS:
            return create_async_engine(url, poolclass=sqlalchemy.NullPool)
        engine = sqlalchemy.create_engine(url)
        self._opened.append(engine)
        return engine

    def store(self, connection: Any, event: rg.Event[bytes]) -> None:
        """The effect of the event, as the application has it."""
        key, number = event.raw.decode().split(":")
        values: Any = (key, int(number), str(event.pointer))
        if self.kind.startswith("sqlalchemy"):
            import sqlalchemy

            statement = sqlalchemy.text(_INSERT.format(":key, :number, :pointer"))
            connection.execute(statement, dict(zip(("key", "number", "pointer"), values, strict=True)))
        else:
            connection.cursor().execute(_INSERT.format("?, ?, ?" if self.is_sqlite else "%s, %s, %s"), values)

    def fill_up(self, connection: Any) -> None:
        """Raise in this transaction what the database raises when its disk is full."""
        if self.is_sqlite:
            connection.execute("PRAGMA max_page_count = 1")  # the present size
            try:
                connection.execute("INSERT INTO effects (key) VALUES (zeroblob(1000000))")
            finally:
                connection.execute("PRAGMA max_page_count = 1000000")
        else:
            statement = "DO $$ BEGIN RAISE SQLSTATE '53100' USING MESSAGE = 'No space left on device'; END $$"
            if self.kind.startswith("sqlalchemy"):
                connection.exec_driver_sql(statement)
            else:
                connection.execute(statement)

    async def store_async(self, connection: Any, event: rg.Event[bytes]) -> None:
        if self.kind.startswith("sqlalchemy"):
            await connection.run_sync(self.store, event)
        else:
            key, number = event.raw.decode().split(":")
            await connection.execute(_INSERT.format("%s, %s, %s"), (key, int(number), str(event.pointer)))

    def execute(self, sql: str) -> Sequence[Any]:
        """Run a statement beside the application, and return its rows."""
        with closing(self.connect()) as connection:
            cursor = connection.execute(sql)
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
            return [tuple(row) for row in rows]

    def end_connections(self) -> None:
        """Let PostgreSQL end all other connections to this database."""
        self.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    def progress(self) -> Sequence[Any]:
        return self.execute(
            "SELECT group_name, segment, incarnation, next_offset, fencing_token "
            "FROM readergroup_progress ORDER BY 1, 2"
        )

    def effects(self) -> dict[str, list[int]]:
        """The numbers of each key, in the order of their transactions."""
        found = defaultdict(list)
        for key, number in self.execute("SELECT key, number FROM effects ORDER BY id"):
            found[key].append(number)
        return dict(found)

    def check(self, expected: dict[str, int]) -> None:
        """Each event has one effect, and those of each key are in order."""
        effects = self.effects()
        pointers = Counter(row[0] for row in self.execute("SELECT pointer FROM effects"))
        assert [pointer for pointer, count in pointers.items() if count > 1] == []
        assert effects == {key: list(range(count)) for key, count in expected.items() if count}

    def close(self) -> None:
        for each in self._opened:
            getattr(each, "dispose", None) and each.dispose()
            getattr(each, "close", None) and each.close()
