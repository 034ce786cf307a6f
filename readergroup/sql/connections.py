"""The application's database, in whichever form the application has it.

`open_database` takes an engine, a pool, a connection, a function that connects, or the alias of a Django connection.
`wrap` takes a connection in the middle of its transaction. Both return objects that run SQL with named parameters, as
``:name``. Drivers and frameworks are recognised by their loaded modules and never imported.

What is the same for plain and asynchronous databases is written once, as a `Script`.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from enum import Enum
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, TypeVar

from synchronizer import ClosedError, InvalidArgumentError, UnsupportedError
from synchronizer.callables import is_async

R = TypeVar("R")

Dialect = Literal["sqlite", "postgresql"]


class Statement(NamedTuple):
    """SQL with parameters as ``:name``. It has no other colons, and no percent signs."""

    sql: str
    parameters: Mapping[str, object] = {}


class Result(NamedTuple):
    rows: list[tuple[Any, ...]]
    #: How many rows were changed.
    changed: int


class Control(Enum):
    """What a script does with its transaction."""

    BEGIN = "begin"
    COMMIT = "commit"
    ROLLBACK = "rollback"


#: Statements one after the other: a generator that yields each and is sent its result.
Script = Generator[Statement | Control, Result, R]

_NOTHING: Final = Result([], 0)

_PARAMETER: Final = re.compile(r":(\w+)")
#: What the modules of drivers are called, without those below them.
_DRIVERS: Final[Mapping[str, Dialect]] = {
    "sqlite3": "sqlite",
    "_sqlite3": "sqlite",
    "aiosqlite": "sqlite",
    "pysqlite3": "sqlite",
    "sqlcipher3": "sqlite",
    "psycopg": "postgresql",
    "psycopg2": "postgresql",
    "pg8000": "postgresql",
}
#: The names of these databases in SQLAlchemy (``dialect.name``) and in Django (``vendor``).
_DIALECTS: Final[Mapping[str, Dialect]] = {"sqlite": "sqlite", "postgresql": "postgresql"}

#: Errors of PostgreSQL after which the same transaction may succeed: lost connections, a server that ends or starts,
#: transactions that wait for each other, and limits.
_PASSING_STATES: Final = frozenset({
    "25P03", "25P04", "40001", "40P01", "53000", "53100", "53200", "53300", "55P03", "57P01", "57P02", "57P03", "57P05",
})  # fmt: skip
_PASSING_CLASSES: Final = ("08",)
#: Errors of SQLite: busy, locked, full.
_PASSING_CODES: Final = frozenset({5, 6, 13})


# ---------------------------------------------------------------------- errors


def is_passing(error: BaseException) -> bool:
    """Return whether the same transaction may succeed later: the connection was lost, or it met another transaction."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if _is_passing(found):
            return True
        # SQLAlchemy keeps the driver's error in `orig`, Django as the cause.
        found = getattr(found, "orig", None) or found.__cause__
    return False


def is_conflict(error: BaseException) -> bool:
    """Return whether PostgreSQL ended the transaction because of another one: a deadlock or a failed serialization."""
    found = getattr(error, "orig", None) or error.__cause__ or error
    return (getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)) in ("40001", "40P01")


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):
        return True
    if getattr(error, "connection_invalidated", False):
        return True
    driver = type(error).__module__.partition(".")[0]
    if (code := getattr(error, "sqlite_errorcode", None)) is not None:
        return code & 0xFF in _PASSING_CODES
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state is not None:
        return state in _PASSING_STATES or str(state).startswith(_PASSING_CLASSES)
    names = {each.__name__ for each in type(error).__mro__}
    if driver in ("psycopg_pool", "sqlalchemy"):
        return bool(names & {"PoolTimeout", "TimeoutError"})
    return driver in ("psycopg", "psycopg2", "pg8000", "asyncpg") and bool(
        names & {"OperationalError", "InterfaceError"}
    )


# ---------------------------------------------------------------------- connections


class SqlConnection:
    """One connection. ``native`` is what the application knows."""

    native: Any
    dialect: Dialect

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        """Run one statement, and return its rows."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin a transaction. Raise `InvalidArgumentError` if the connection has one, or commits each statement."""
        raise NotImplementedError

    def commit(self) -> None:
        raise NotImplementedError

    def rollback(self) -> None:
        raise NotImplementedError

    @property
    def broken(self) -> bool:
        """Whether it is of no further use."""
        raise NotImplementedError


def run(connection: SqlConnection, script: Script[R]) -> R:
    """Run the statements of the script, and return what it returns."""
    try:
        statement = next(script)
        while True:
            try:
                if isinstance(statement, Control):
                    result = _NOTHING
                    getattr(connection, statement.value)()
                else:
                    result = connection.execute(*statement)
            except BaseException as error:
                statement = script.throw(error)
            else:
                statement = script.send(result)
    except StopIteration as ended:
        returned: R = ended.value
        return returned


def in_transaction(script: Script[R]) -> Script[R]:
    """Return the script with a transaction around it."""
    yield Control.BEGIN
    try:
        returned = yield from script
        yield Control.COMMIT
        return returned
    except GeneratorExit:
        raise
    except BaseException:
        with suppress(Exception):
            yield Control.ROLLBACK
        raise


class _DbApiConnection(SqlConnection):
    """A connection of a driver."""

    def __init__(self, native: Any, dialect: Dialect, *, mine: bool = True) -> None:
        self.native = native
        self.dialect = dialect
        self._mine = mine
        self._style = _paramstyle(native)

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        cursor = self._cursor()
        try:
            cursor.execute(*_translated(sql, parameters or {}, self._style))
            rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
            return Result(rows, cursor.rowcount)
        finally:
            cursor.close()

    def _cursor(self) -> Any:
        if _driver(self.native) == "psycopg":  # whatever its row and cursor factories are
            psycopg = sys.modules["psycopg"]
            return psycopg.Cursor(self.native, row_factory=psycopg.rows.tuple_row)
        cursor = self.native.cursor()
        if self.dialect == "sqlite":
            cursor.row_factory = None
        return cursor

    def begin(self) -> None:
        native = self.native
        if getattr(native, "autocommit", False) is True:
            raise autocommit()
        if self.dialect == "sqlite":
            if native.in_transaction:
                if getattr(native, "autocommit", None) is not False:
                    raise _in_transaction()
                self.execute("COMMIT")  # Python opens the next one at once, without the lock for writing
            self.execute("BEGIN IMMEDIATE")
        elif _is_in_transaction(native):
            raise _in_transaction()

    def commit(self) -> None:
        self.native.commit()

    def rollback(self) -> None:
        self.native.rollback()

    @property
    def broken(self) -> bool:
        return bool(getattr(self.native, "closed", False) or getattr(self.native, "broken", False))

    def close(self) -> None:
        self.native.close()


class _SqlAlchemyConnection(SqlConnection):
    def __init__(self, native: Any) -> None:
        self.native = native
        self.dialect = _known_dialect(native.dialect.name)
        self._transaction: Any = None

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        result = self.native.execute(sys.modules["sqlalchemy"].text(sql), dict(parameters or {}))
        rows = [tuple(row) for row in result] if result.returns_rows else []
        return Result(rows, result.rowcount)

    def begin(self) -> None:
        if self.native.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise autocommit()
        self._transaction = self.native.begin()
        driver = self.native.connection.driver_connection
        if getattr(driver, "autocommit", False) is True:
            raise autocommit()
        # The driver begins with the first change. Without an isolation level it does not, unless the application has
        # let SQLAlchemy begin.
        if self.dialect == "sqlite" and driver.isolation_level is None and not driver.in_transaction:
            raise autocommit()

    def commit(self) -> None:
        self._transaction.commit()

    def rollback(self) -> None:
        self.native.rollback()

    @property
    def broken(self) -> bool:
        return bool(self.native.closed or self.native.invalidated)

    def close(self) -> None:
        self.native.close()


class _DjangoConnection(SqlConnection):
    def __init__(self, native: Any) -> None:
        self.native = native
        self.dialect = _known_dialect(native.vendor)
        self._atomic: Any = None

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        with self.native.cursor() as cursor:
            if parameters:
                cursor.execute(*_translated(sql, parameters, "pyformat"))
            else:
                cursor.execute(sql)
            rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
            return Result(rows, cursor.rowcount)

    def begin(self) -> None:
        if self.native.in_atomic_block:
            raise _in_transaction()
        self.native.close_if_unusable_or_obsolete()
        if not self.native.get_autocommit():
            raise InvalidArgumentError("the Django connection has AUTOCOMMIT off; Django must manage its transactions")
        self._atomic = sys.modules["django.db.transaction"].atomic(using=self.native.alias)
        self._atomic.__enter__()

    def commit(self) -> None:
        atomic, self._atomic = self._atomic, None
        if self.native.needs_rollback:
            atomic.__exit__(None, None, None)
            raise sys.modules["django.db.transaction"].TransactionManagementError(
                "the transaction was rolled back, because an error of the database was caught inside it; put the "
                "statement that may fail into a transaction.atomic() of its own"
            )
        atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            error = RuntimeError("rolled back")
            atomic.__exit__(RuntimeError, error, None)

    @property
    def broken(self) -> bool:
        return self.native.connection is None or bool(self.native.errors_occurred and not self.native.is_usable())


def wrap(connection: Any) -> SqlConnection:
    """Return a connection of the application, in the middle of its transaction, to run statements in it.

    Args:
        connection: Of a driver, of SQLAlchemy (a ``Connection`` or ``Session``) or of Django (also its alias).

    Raises:
        InvalidArgumentError: It is none of these.
        UnsupportedError: It is a connection to a database other than SQLite and PostgreSQL.
    """
    if isinstance(connection, str):
        return _DjangoConnection(_django_connection(connection))
    if _is_instance(connection, "sqlalchemy.orm", "Session", "scoped_session"):
        return _SqlAlchemyConnection(connection.connection())
    if _is_instance(connection, "sqlalchemy.engine", "Connection"):
        return _SqlAlchemyConnection(connection)
    if _is_instance(connection, "django.db.backends.base.base", "BaseDatabaseWrapper"):
        return _DjangoConnection(connection)
    if callable(getattr(connection, "cursor", None)) and callable(getattr(connection, "commit", None)):
        if is_async(connection.commit):
            raise InvalidArgumentError("the connection is asynchronous; use the asynchronous form of this call")
        return _DbApiConnection(connection, _driver_dialect(connection))
    raise InvalidArgumentError(
        "a connection must be one of a DB-API driver, of SQLAlchemy or of Django", found=type(connection).__name__
    )


# ---------------------------------------------------------------------- databases


class Database:
    """Lends connections for one transaction each. Threads may share it. It closes only what it has opened."""

    def lend(self) -> SqlConnection:
        """Return a connection that nothing else uses until `give_back`."""
        raise NotImplementedError

    def give_back(self, connection: SqlConnection, *, failed: bool = False) -> None:
        """Take back a connection. After a failure its transaction may be open, and it may be of no further use."""
        raise NotImplementedError

    def perform(self, script: Callable[[Dialect], Script[R]]) -> R:
        """Run the script for the dialect on a connection of its own."""
        connection = self.lend()
        failed = True
        try:
            returned = run(connection, script(connection.dialect))
            failed = False
            return returned
        finally:
            self.give_back(connection, failed=failed)

    def close(self) -> None:
        """Close what this object has opened."""


class _EngineDatabase(Database):
    def __init__(self, engine: Any) -> None:
        _known_dialect(engine.dialect.name)
        self._engine = engine

    def lend(self) -> SqlConnection:
        return _SqlAlchemyConnection(self._engine.connect())

    def give_back(self, connection: SqlConnection, *, failed: bool = False) -> None:
        with suppress(Exception):
            connection.native.close()


class _PsycopgPoolDatabase(Database):
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def lend(self) -> SqlConnection:
        return _DbApiConnection(self._pool.getconn(), "postgresql")

    def give_back(self, connection: SqlConnection, *, failed: bool = False) -> None:
        with suppress(Exception):
            self._pool.putconn(connection.native)


class _OneConnectionDatabase(Database):
    """A single connection: one transaction at a time."""

    def __init__(self, native: Any) -> None:
        self._connection = _DbApiConnection(native, _driver_dialect(native))
        self._lock = threading.Lock()

    def lend(self) -> SqlConnection:
        self._lock.acquire()
        if self._connection.broken:
            self._lock.release()
            raise ClosedError(
                "the connection is closed or was lost, and cannot be opened again; pass a pool, an engine or a "
                "function that connects"
            )
        return self._connection

    def give_back(self, connection: SqlConnection, *, failed: bool = False) -> None:
        try:
            if failed:
                with suppress(Exception):
                    connection.rollback()
        finally:
            self._lock.release()


class _Kept:
    """A connection of one thread, closed when the thread ends."""

    def __init__(self, connection: _DbApiConnection) -> None:
        self.connection = connection
        self.process_id = os.getpid()

    def close(self) -> None:
        if self.process_id == os.getpid():
            with suppress(Exception):
                self.connection.close()
        else:
            _inherited.append(self.connection)  # closing it would end the parent's

    def __del__(self) -> None:
        self.close()


_inherited: Final[list[object]] = []


class _FactoryDatabase(Database):
    """Connects once per thread, and again after an error of the connection."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._of_thread = threading.local()

    def lend(self) -> SqlConnection:
        kept: _Kept | None = getattr(self._of_thread, "kept", None)
        self._of_thread.kept = None
        if kept is None or kept.process_id != os.getpid() or kept.connection.broken:
            native = self._connect()
            if not callable(getattr(native, "cursor", None)) or is_async(getattr(native, "commit", None)):
                if asyncio.iscoroutine(native):
                    native.close()
                raise InvalidArgumentError(
                    "the function must return a new connection of a DB-API driver", found=type(native).__name__
                )
            try:
                kept = _Kept(_DbApiConnection(native, _driver_dialect(native)))
            except UnsupportedError:
                native.close()
                raise
        self._of_thread.lent = kept
        return kept.connection

    def give_back(self, connection: SqlConnection, *, failed: bool = False) -> None:
        kept: _Kept = self._of_thread.lent
        self._of_thread.lent = None
        if failed or connection.broken:
            kept.close()
        else:
            self._of_thread.kept = kept

    def close(self) -> None:
        kept: _Kept | None = getattr(self._of_thread, "kept", None)
        self._of_thread.kept = None
        if kept is not None:
            kept.close()


class _DjangoDatabase(Database):
    def __init__(self, alias: str) -> None:
        self._alias = alias
        _known_dialect(_django_connection(alias).vendor)

    def lend(self) -> SqlConnection:
        return _DjangoConnection(_django_connection(self._alias))  # that of this thread

    def give_back(self, connection: SqlConnection, *, failed: bool = False) -> None:
        if failed:
            with suppress(Exception):
                connection.rollback()
        if connection.broken:
            connection.native.close()


# ---------------------------------------------------------------------- asynchronous ones


class AsyncSqlConnection:
    """`SqlConnection`, awaited."""

    native: Any
    dialect: Dialect

    async def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        raise NotImplementedError

    async def begin(self) -> None:
        raise NotImplementedError

    async def commit(self) -> None:
        raise NotImplementedError

    async def rollback(self) -> None:
        raise NotImplementedError

    @property
    def broken(self) -> bool:
        raise NotImplementedError


async def run_async(connection: AsyncSqlConnection, script: Script[R]) -> R:
    """`run`, awaited."""
    try:
        statement = next(script)
        while True:
            try:
                if isinstance(statement, Control):
                    result = _NOTHING
                    await getattr(connection, statement.value)()
                else:
                    result = await connection.execute(*statement)
            except BaseException as error:
                statement = script.throw(error)
            else:
                statement = script.send(result)
    except StopIteration as ended:
        returned: R = ended.value
        return returned


class _AsyncPsycopgConnection(AsyncSqlConnection):
    dialect: Dialect = "postgresql"

    def __init__(self, native: Any) -> None:
        self.native = native

    async def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        psycopg = sys.modules["psycopg"]
        async with psycopg.AsyncCursor(self.native, row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(*_translated(sql, parameters or {}, "pyformat"))
            rows = await cursor.fetchall() if cursor.description else []
            return Result(rows, cursor.rowcount)

    async def begin(self) -> None:
        if self.native.autocommit:
            raise autocommit()
        if _is_in_transaction(self.native):
            raise _in_transaction()

    async def commit(self) -> None:
        await self.native.commit()

    async def rollback(self) -> None:
        await self.native.rollback()

    @property
    def broken(self) -> bool:
        return bool(self.native.closed or self.native.broken)


class _AsyncSqlAlchemyConnection(AsyncSqlConnection):
    def __init__(self, native: Any) -> None:
        self.native = native
        self._sync = _SqlAlchemyConnection(native.sync_connection)
        self.dialect = self._sync.dialect

    async def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        found: Result = await self.native.run_sync(lambda _: self._sync.execute(sql, parameters))
        return found

    async def begin(self) -> None:
        await self.native.run_sync(lambda _: self._sync.begin())

    async def commit(self) -> None:
        await self.native.run_sync(lambda _: self._sync.commit())

    async def rollback(self) -> None:
        await self.native.run_sync(lambda _: self._sync.rollback())

    @property
    def broken(self) -> bool:
        return self._sync.broken


class AsyncDatabase:
    """`Database` for one event loop. It refuses a second one: the connections of a pool belong to their loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        elif self._loop is not loop:
            raise InvalidArgumentError(
                "an asynchronous pool of connections serves one event loop, and each worker has its own; use one "
                "reader with concurrency, or an engine with poolclass=sqlalchemy.NullPool"
            )

    async def lend(self) -> AsyncSqlConnection:
        raise NotImplementedError

    async def give_back(self, connection: AsyncSqlConnection, *, failed: bool = False) -> None:
        raise NotImplementedError

    async def perform(self, script: Callable[[Dialect], Script[R]]) -> R:
        """Run the script for the dialect on a connection of its own."""
        connection = await self.lend()
        failed = True
        try:
            returned = await run_async(connection, script(connection.dialect))
            failed = False
            return returned
        finally:
            await self.give_back(connection, failed=failed)


class _AsyncEngineDatabase(AsyncDatabase):
    def __init__(self, engine: Any) -> None:
        super().__init__()
        _known_dialect(engine.dialect.name)
        self._engine = engine

    async def lend(self) -> AsyncSqlConnection:
        if type(self._engine.pool).__name__ != "NullPool":
            self._check_loop()
        return _AsyncSqlAlchemyConnection(await self._engine.connect())

    async def give_back(self, connection: AsyncSqlConnection, *, failed: bool = False) -> None:
        with suppress(Exception):
            await connection.native.close()


class _AsyncPsycopgPoolDatabase(AsyncDatabase):
    def __init__(self, pool: Any) -> None:
        super().__init__()
        self._pool = pool

    async def lend(self) -> AsyncSqlConnection:
        self._check_loop()
        return _AsyncPsycopgConnection(await self._pool.getconn())

    async def give_back(self, connection: AsyncSqlConnection, *, failed: bool = False) -> None:
        with suppress(Exception):
            await self._pool.putconn(connection.native)


class _AsyncFactoryDatabase(AsyncDatabase):
    """Connects for each transaction."""

    def __init__(self, connect: Callable[[], Awaitable[Any]]) -> None:
        super().__init__()
        self._connect = connect

    async def lend(self) -> AsyncSqlConnection:
        native = await self._connect()
        if not _is_instance(native, "psycopg", "AsyncConnection"):
            raise InvalidArgumentError(
                "the async function must return a psycopg.AsyncConnection", found=type(native).__name__
            )
        return _AsyncPsycopgConnection(native)

    async def give_back(self, connection: AsyncSqlConnection, *, failed: bool = False) -> None:
        with suppress(Exception):
            await connection.native.close()


class _AsyncOneConnectionDatabase(AsyncDatabase):
    def __init__(self, native: Any) -> None:
        super().__init__()
        self._connection = _AsyncPsycopgConnection(native)
        self._lock = asyncio.Lock()

    async def lend(self) -> AsyncSqlConnection:
        self._check_loop()
        await self._lock.acquire()
        if self._connection.broken:
            self._lock.release()
            raise ClosedError(
                "the connection is closed or was lost, and cannot be opened again; pass a pool, an engine or a "
                "function that connects"
            )
        return self._connection

    async def give_back(self, connection: AsyncSqlConnection, *, failed: bool = False) -> None:
        try:
            if failed:
                with suppress(Exception):
                    await connection.rollback()
        finally:
            self._lock.release()


def open_database(engine_or_connect: Any) -> Database | AsyncDatabase:
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
        return _DjangoDatabase(given)
    if _is_instance(given, "sqlalchemy.engine", "Engine"):
        return _EngineDatabase(given)
    if _is_instance(given, "sqlalchemy.ext.asyncio", "AsyncEngine"):
        return _AsyncEngineDatabase(given)
    if _is_instance(given, "psycopg_pool", "ConnectionPool", "NullConnectionPool"):
        return _PsycopgPoolDatabase(given)
    if _is_instance(given, "psycopg_pool", "AsyncConnectionPool", "AsyncNullConnectionPool"):
        return _AsyncPsycopgPoolDatabase(given)
    if _is_instance(given, "psycopg", "AsyncConnection"):
        return _AsyncOneConnectionDatabase(given)
    if _is_instance(given, "psycopg", "Connection"):
        return _OneConnectionDatabase(given)
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


# ---------------------------------------------------------------------- recognition


def _is_instance(value: object, module: str, *names: str) -> bool:
    """Whether it is of one of these classes of a module, which is loaded if there is such an object."""
    found = sys.modules.get(module)
    classes = tuple(each for name in names if isinstance(each := getattr(found, name, None), type))
    return isinstance(value, classes)


def _driver(native: Any) -> str:
    """The driver's top module, also of a subclass that the application has made."""
    for each in type(native).__mro__:
        name = each.__module__.partition(".")[0]
        if name in _DRIVERS:
            return name
    return type(native).__module__.partition(".")[0]


def _driver_dialect(native: Any) -> Dialect:
    driver = _driver(native)
    if driver not in _DRIVERS:
        raise _unsupported(driver)
    return _DRIVERS[driver]


def _known_dialect(name: str) -> Dialect:
    if name not in _DIALECTS:
        raise _unsupported(name)
    return _DIALECTS[name]


def _unsupported(found: str) -> UnsupportedError:
    return UnsupportedError("the database must be SQLite or PostgreSQL", found=found)


def _paramstyle(native: Any) -> str:
    driver = _driver(native)
    if _DRIVERS[driver] == "sqlite":
        return "named"
    if driver in ("psycopg", "psycopg2"):
        return "pyformat"
    module: ModuleType | None = sys.modules.get(type(native).__module__) or sys.modules.get(driver)
    return str(getattr(module, "paramstyle", "format"))


def _translated(sql: str, parameters: Mapping[str, object], style: str) -> tuple[str, Any]:
    """The statement as the driver takes it."""
    if style == "named":
        return sql, dict(parameters)
    if style == "pyformat":
        return _PARAMETER.sub(r"%(\1)s", sql), dict(parameters)
    values = [parameters[name] for name in _PARAMETER.findall(sql)]
    return _PARAMETER.sub("%s" if style == "format" else "?", sql), values


def _is_in_transaction(native: Any) -> bool:
    status = getattr(getattr(native, "info", None), "transaction_status", 0)
    return int(status) != 0


def autocommit() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the connection commits each statement by itself (autocommit), so that nothing could be stored together; "
        "open it without autocommit"
    )


def _in_transaction() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the connection has an open transaction; end it first, or pass a connection that nothing else uses"
    )


def _django_connection(alias: str) -> Any:
    module = sys.modules.get("django.db")
    if module is None:
        raise InvalidArgumentError(
            "a text is the alias of a Django connection, and Django is not set up in this process; pass an engine, a "
            "pool, or a function that connects",
            found=alias.partition("://")[0],  # no passwords
        )
    try:
        return module.connections[alias]
    except Exception as error:
        raise InvalidArgumentError("Django has no connection of this alias", alias=alias) from error
