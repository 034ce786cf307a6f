"""The application's database, in whichever form the application has it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from synchronizer import ClosedError, InvalidArgumentError, UnsupportedError
from synchronizer.callables import is_async

from .connections import (
    AsyncPsycopgConnection,
    AsyncSqlAlchemyConnection,
    Connection,
    DbApiConnection,
    DjangoConnection,
    SqlAlchemyConnection,
    in_call,
    run,
)
from .drivers import Dialect, dialect_of, django_connection, is_instance, known_dialect
from .scripts import Script, now, settled

R = TypeVar("R")

#: How long a connection may take to find out why a pool has none.
_TRY_SECONDS: Final = 5


class Database:
    """Lends connections for one transaction each. It closes only what it has opened.

    Threads may share one that blocks; its coroutines await nothing. An asynchronous one is for one event loop, unless
    it opens a connection for each transaction: the connections of a pool belong to their loop.
    """

    def __init__(self, *, is_async: bool = False) -> None:
        self.is_async = is_async
        self._loop: asyncio.AbstractEventLoop | None = None

    async def lend(self) -> Connection:
        """Return a connection that nothing else uses until `give_back`."""
        raise NotImplementedError

    async def give_back(self, connection: Connection, *, failed: bool = False) -> None:
        """Take back a connection. After a failure its transaction may be open, and it may be of no further use."""
        with suppress(Exception):
            await settled(connection.close())

    async def perform(self, script: Callable[[Dialect], Script[R]]) -> R:
        """Run the script for the dialect on a connection of its own."""
        connection = await self.lend()
        failed = True
        try:
            returned = await run(connection, script(connection.dialect))
            failed = False
            return returned
        finally:
            await self.give_back(connection, failed=failed)

    def connect(self) -> Any:
        """Return a new connection of the driver, for the caller to close. Not of a `SingleConnection`, nor awaited."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what this object has opened for this thread."""

    @property
    def caller(self) -> int:
        """Tells apart those that call at the same time: threads, or the tasks of an event loop."""
        return id(asyncio.current_task()) if self.is_async else threading.get_ident()

    def _check_loop(self) -> None:
        if not self.is_async:
            return
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop.is_closed():
            raise InvalidArgumentError(
                "the event loop that the connections belong to has ended; open the pool and the sink in the loop that "
                "uses them, or pass an engine with poolclass=sqlalchemy.NullPool"
            )
        elif self._loop is not loop:
            raise InvalidArgumentError(
                "an asynchronous pool of connections serves one event loop, and each worker has its own; use one "
                "reader with concurrency, or an engine with poolclass=sqlalchemy.NullPool"
            )


class _EngineDatabase(Database):
    def __init__(self, engine: Any, *, is_async: bool = False) -> None:
        super().__init__(is_async=is_async)
        self._in_call = in_call(known_dialect(engine.dialect.name))
        self._engine = engine

    async def lend(self) -> Connection:
        if type(self._engine.pool).__name__ != "NullPool":
            self._check_loop()
        native = await settled(self._engine.connect())
        return AsyncSqlAlchemyConnection(native) if self.is_async else SqlAlchemyConnection(native)

    def connect(self) -> Any:
        with self._in_call:
            checked_out = self._engine.raw_connection()
        native = checked_out.driver_connection
        checked_out.detach()  # the engine's pool opens another when it needs one
        return native


class _PsycopgPoolDatabase(Database):
    def __init__(self, pool: Any, *, is_async: bool = False) -> None:
        super().__init__(is_async=is_async)
        self._pool = pool

    async def lend(self) -> Connection:
        self._check_loop()
        try:
            native = await settled(self._pool.getconn())
        except Exception as error:
            if type(error).__name__ == "PoolTimeout":
                await self._try_to_connect()
            raise
        return _of_psycopg(native, is_async=self.is_async)

    async def give_back(self, connection: Connection, *, failed: bool = False) -> None:
        with suppress(Exception):
            await settled(self._pool.putconn(connection.native))

    def connect(self) -> Any:
        """Connect as the pool does. A connection of the pool that is kept would be missed by the application."""
        return now(self._connect())

    async def _connect(self, **defaults: object) -> Any:
        pool = self._pool
        given = [await settled(each() if callable(each) else each) for each in (pool.conninfo, pool.kwargs)]
        return await settled(pool.connection_class.connect(given[0] or "", **{**defaults, **(given[1] or {})}))

    async def _try_to_connect(self) -> None:
        """Raise why the pool cannot connect, if it cannot: it says only that it has no connection."""
        native = await self._connect(connect_timeout=_TRY_SECONDS)
        await settled(native.close())


class SingleConnection(Database):
    """A single connection: one transaction at a time."""

    def __init__(self, native: Any, *, is_async: bool = False) -> None:
        super().__init__(is_async=is_async)
        self._connection = _of_psycopg(native, is_async=is_async)
        self._lock: Any = asyncio.Lock() if is_async else threading.Lock()
        self._lent_to: int | None = None

    async def lend(self) -> Connection:
        self._check_loop()
        if self._lent_to == self.caller:
            raise InvalidArgumentError(
                "the single connection is in a transaction that this thread or task has entered; leave that one "
                "first, or pass a pool, an engine or a function that connects"
            )
        await settled(self._lock.acquire())
        self._lent_to = self.caller
        if self._connection.broken:
            self._release()
            raise ClosedError(
                "the connection is closed or was lost, and cannot be opened again; pass a pool, an engine or a "
                "function that connects"
            )
        return self._connection

    async def give_back(self, connection: Connection, *, failed: bool = False) -> None:
        try:
            if failed:
                with suppress(Exception):
                    await settled(connection.rollback())
        finally:
            self._release()

    def _release(self) -> None:
        self._lent_to = None
        self._lock.release()


class _OwnConnection(DbApiConnection):
    """A connection that the sink has opened, closed when nothing has it any more."""

    def __init__(self, native: Any) -> None:
        self.process_id = os.getpid()
        self.thread_id = threading.get_ident()
        super().__init__(native)

    def close(self) -> None:
        if self.process_id == os.getpid():
            with suppress(Exception):
                super().close()
        else:
            _inherited.append(self.native)  # closing it would end the parent's

    def __del__(self) -> None:
        self.close()


_inherited: Final[list[object]] = []


class _FactoryDatabase(Database):
    """Keeps a connection for each thread, and connects again after an error of the connection."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__()
        self._connect = connect
        self._in_call = in_call("sqlite")  # until it is known what the function connects to
        self._of_thread = threading.local()

    async def lend(self) -> Connection:
        kept = self._take()
        if kept is None or kept.process_id != os.getpid() or kept.broken:
            kept = _OwnConnection(self.connect())
            if kept.broken:
                raise InvalidArgumentError(
                    "the function returned a connection that is closed; it must open a new one at each call",
                    found=type(kept.native).__name__,
                )
        return kept

    async def give_back(self, connection: Connection, *, failed: bool = False) -> None:
        assert isinstance(connection, _OwnConnection)
        if failed or connection.broken or connection.thread_id != threading.get_ident():
            connection.close()
        else:
            self.close()  # what a transaction within this one has left
            self._of_thread.kept = connection

    def _take(self) -> _OwnConnection | None:
        kept: _OwnConnection | None = getattr(self._of_thread, "kept", None)
        self._of_thread.kept = None
        return kept

    def connect(self) -> Any:
        with self._in_call:
            native = self._connect()
        if not callable(getattr(native, "cursor", None)) or is_async(getattr(native, "commit", None)):
            if asyncio.iscoroutine(native):
                native.close()
            raise InvalidArgumentError(
                "the function must return a new connection of a DB-API driver, and none that is asynchronous; a sink "
                "takes an async def too, which returns a psycopg.AsyncConnection",
                found=type(native).__name__,
            )
        try:
            self._in_call = in_call(dialect_of(native))
        except UnsupportedError:
            native.close()
            raise
        return native

    def close(self) -> None:
        if (kept := self._take()) is not None:
            kept.close()


class _AsyncFactoryDatabase(Database):
    """Connects for each transaction."""

    def __init__(self, connect: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(is_async=True)
        self._connect = connect

    async def lend(self) -> Connection:
        native = await self._connect()
        if not is_instance(native, "psycopg", "AsyncConnection"):
            raise InvalidArgumentError(
                "the async function must return a psycopg.AsyncConnection", found=type(native).__name__
            )
        return AsyncPsycopgConnection(native)


class _DjangoDatabase(Database):
    def __init__(self, alias: str) -> None:
        super().__init__()
        self._alias = alias
        self._in_call = in_call(known_dialect(django_connection(alias).vendor))

    async def lend(self) -> Connection:
        return DjangoConnection(django_connection(self._alias))  # that of this thread

    async def give_back(self, connection: Connection, *, failed: bool = False) -> None:
        if failed:
            with suppress(Exception):
                await settled(connection.rollback())
        if connection.broken:
            connection.native.close()

    def connect(self) -> Any:
        wrapper = django_connection(self._alias).copy()
        with self._in_call:
            wrapper.connect()
        return wrapper.connection


def _of_psycopg(native: Any, *, is_async: bool) -> Connection:
    return AsyncPsycopgConnection(native) if is_async else DbApiConnection(native)


def open_database(engine_or_connect: Any) -> Database:
    """Return the database behind what the application has.

    Args:
        engine_or_connect: A SQLAlchemy ``Engine`` or ``AsyncEngine``, a psycopg connection or pool, plain or
            asynchronous, the alias of a Django connection, or a function that returns a new connection of a driver.

    Raises:
        InvalidArgumentError: It is none of these.
        UnsupportedError: The database is neither SQLite nor PostgreSQL.
    """
    given = engine_or_connect
    if isinstance(given, str):
        scheme, separator, _ = given.partition("://")
        if separator:  # the rest may contain a password
            raise InvalidArgumentError(
                "the database must not be given as an address; pass create_engine(url) of SQLAlchemy, or a function "
                "that connects, such as lambda: sqlite3.connect(path)",
                found=f"{scheme}://",
            )
        return _DjangoDatabase(given)
    if is_instance(given, "sqlalchemy.engine", "Engine"):
        return _EngineDatabase(given)
    if is_instance(given, "sqlalchemy.ext.asyncio", "AsyncEngine"):
        return _EngineDatabase(given, is_async=True)
    if is_instance(given, "psycopg_pool", "ConnectionPool", "NullConnectionPool"):
        return _PsycopgPoolDatabase(given)
    if is_instance(given, "psycopg_pool", "AsyncConnectionPool", "AsyncNullConnectionPool"):
        return _PsycopgPoolDatabase(given, is_async=True)
    if is_instance(given, "psycopg", "AsyncConnection"):
        return SingleConnection(given, is_async=True)
    if is_instance(given, "psycopg", "Connection"):
        return SingleConnection(given)
    if not isinstance(given, type) and callable(getattr(given, "cursor", None)):
        raise InvalidArgumentError(
            "a single connection of this kind cannot be shared by threads or opened again; pass a function that "
            "connects, such as lambda: sqlite3.connect('shop.db')",
            found=type(given).__name__,
        )
    if is_async(given):
        return _AsyncFactoryDatabase(given)
    if callable(given):
        return _FactoryDatabase(given)
    raise InvalidArgumentError(
        "the database must be given as an engine of SQLAlchemy, a psycopg connection or pool, the alias of a Django "
        "connection, or a function that connects",
        found=type(given).__name__,
    )
