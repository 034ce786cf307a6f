"""Connections of a driver, of SQLAlchemy or of Django, which run SQL with parameters as ``:name``."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from synchronizer import InvalidArgumentError
from synchronizer.stores.forking import forks_wait

from .drivers import (
    Dialect,
    commits_each_statement,
    dialect_of,
    django_connection,
    driver_of,
    has_transaction,
    is_instance,
    known_dialect,
    paramstyle,
    translated,
    was_closed,
)
from .scripts import NOTHING, Control, R, Result, Script, settled


class Connection:
    """One connection, whose calls block or return awaitables. ``native`` is what the application knows."""

    native: Any
    dialect: Dialect

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result | Awaitable[Result]:
        """Run one statement, and return its rows."""
        raise NotImplementedError

    def begin(self) -> Awaitable[None] | None:
        """Begin a transaction. Raise `InvalidArgumentError` if the connection has one, or commits each statement.

        Raise another error if the connection was lost.
        """
        raise NotImplementedError

    def commit(self) -> Awaitable[None] | None:
        raise NotImplementedError

    def rollback(self) -> Awaitable[None] | None:
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Close it, or give it back to the pool of its engine."""
        closed: Awaitable[None] | None = self.native.close()
        return closed

    @property
    def broken(self) -> bool:
        """Whether it is of no further use."""
        raise NotImplementedError

    @property
    def was_closed(self) -> bool:
        """Whether the application has closed it. False if it was lost."""
        return was_closed(self.native)


class SqlConnection(Connection):
    """A connection whose calls block."""

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        raise NotImplementedError

    @property
    def of_driver(self) -> Any:
        """The connection of the driver."""
        return self.native


async def run(connection: Connection, script: Script[R]) -> R:
    """Run the statements of the script, and return what it returns."""
    try:
        statement = next(script)
        while True:
            try:
                if isinstance(statement, Control):
                    await settled(getattr(connection, statement.value)())
                    result = NOTHING
                elif isinstance(answer := connection.execute(*statement), Result):
                    result = answer
                else:
                    result = await answer
            except BaseException as error:
                statement = script.throw(error)
            else:
                statement = script.send(result)
    except StopIteration as ended:
        returned: R = ended.value
        return returned


def in_call(dialect: Dialect) -> AbstractContextManager[None]:
    """Around a call to a driver: the process does not fork while another thread is inside a call to SQLite.

    A lock of SQLite that this thread holds would be held in the child for ever.
    """
    return forks_wait if dialect == "sqlite" else nullcontext()


class DbApiConnection(SqlConnection):
    """A connection of a driver."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.dialect = dialect_of(native)
        self._style = paramstyle(native)
        self._in_call = in_call(self.dialect)

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        with self._in_call:
            cursor = self._cursor()
            try:
                cursor.execute(*translated(sql, parameters or {}, self._style))
                rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
                return Result(rows, cursor.rowcount)
            finally:
                cursor.close()

    def _cursor(self) -> Any:
        if driver_of(self.native) == "psycopg":  # whatever its row and cursor factories are
            psycopg = sys.modules["psycopg"]
            return psycopg.Cursor(self.native, row_factory=psycopg.rows.tuple_row)
        cursor = self.native.cursor()
        if self.dialect == "sqlite":
            cursor.row_factory = None
        return cursor

    def begin(self) -> None:
        if self.dialect == "sqlite" and getattr(self.native, "autocommit", None) is False:
            self.execute("COMMIT")  # Python opens the next one at once, without the lock for writing
        else:
            _check_begins(self.native)
        if self.dialect == "sqlite":
            self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        with self._in_call:
            self.native.commit()

    def rollback(self) -> None:
        with self._in_call:
            self.native.rollback()

    def close(self) -> None:
        with self._in_call:
            self.native.close()

    @property
    def broken(self) -> bool:
        native = self.native
        return self.was_closed or bool(getattr(native, "closed", False) or getattr(native, "broken", False))


class SqlAlchemyConnection(SqlConnection):
    """A connection of SQLAlchemy. Forks do not wait for the calls of an asynchronous one, which switch the task."""

    def __init__(self, native: Any, *, is_async: bool = False) -> None:
        self.native = native
        self.dialect = known_dialect(native.dialect.name)
        self._in_call = nullcontext() if is_async else in_call(self.dialect)
        self._transaction: Any = None

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        with self._in_call:
            result = self.native.execute(sys.modules["sqlalchemy"].text(sql), dict(parameters or {}))
            rows = [tuple(row) for row in result] if result.returns_rows else []
            return Result(rows, result.rowcount)

    def begin(self) -> None:
        if self.native.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise autocommit()
        self._transaction = self.native.begin()
        # The driver begins with the first change, or the application has let SQLAlchemy begin.
        if commits_each_statement(self.of_driver):
            raise autocommit()

    def commit(self) -> None:
        with self._in_call:
            self._transaction.commit()

    def rollback(self) -> None:
        with self._in_call:
            self.native.rollback()

    def close(self) -> None:
        with self._in_call:
            self.native.close()

    @property
    def broken(self) -> bool:
        return bool(self.native.closed or self.native.invalidated)

    @property
    def was_closed(self) -> bool:
        return bool(self.native.closed)

    @property
    def of_driver(self) -> Any:
        return self.native.connection.driver_connection


class DjangoConnection(SqlConnection):
    def __init__(self, native: Any) -> None:
        self.native = native
        self.dialect = known_dialect(native.vendor)
        self._in_call = in_call(self.dialect)
        self._atomic: Any = None

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        with self._in_call, self.native.cursor() as cursor:
            if parameters:
                cursor.execute(*translated(sql, parameters, "pyformat"))
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
        with self._in_call:
            self._atomic.__enter__()

    def commit(self) -> None:
        atomic, self._atomic = self._atomic, None
        was_rolled_back = self.native.needs_rollback
        with self._in_call:
            atomic.__exit__(None, None, None)
        if was_rolled_back:
            raise sys.modules["django.db.transaction"].TransactionManagementError(
                "the transaction was rolled back, because an error of the database was caught inside it; put the "
                "statement that may fail into a transaction.atomic() of its own"
            )

    def rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            error = RuntimeError("rolled back")
            with self._in_call:
                atomic.__exit__(RuntimeError, error, None)

    @property
    def broken(self) -> bool:
        return self.native.connection is None or bool(self.native.errors_occurred and not self.native.is_usable())

    @property
    def was_closed(self) -> bool:
        return bool(self.native.closed_in_transaction)

    @property
    def of_driver(self) -> Any:
        self.native.ensure_connection()
        return self.native.connection


class AsyncPsycopgConnection(Connection):
    dialect: Dialect = "postgresql"

    def __init__(self, native: Any) -> None:
        self.native = native

    async def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Result:
        psycopg = sys.modules["psycopg"]
        async with psycopg.AsyncCursor(self.native, row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(*translated(sql, parameters or {}, "pyformat"))
            rows = await cursor.fetchall() if cursor.description else []
            return Result(rows, cursor.rowcount)

    def begin(self) -> None:
        _check_begins(self.native)

    async def commit(self) -> None:
        await self.native.commit()

    async def rollback(self) -> None:
        await self.native.rollback()

    @property
    def broken(self) -> bool:
        return bool(self.native.closed or self.native.broken)


class AsyncSqlAlchemyConnection(Connection):
    def __init__(self, native: Any) -> None:
        self.native = native
        self._blocking = SqlAlchemyConnection(native.sync_connection, is_async=True)
        self.dialect = self._blocking.dialect

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> Awaitable[Result]:
        return self._run(self._blocking.execute, sql, parameters)

    def begin(self) -> Awaitable[None]:
        return self._run(self._blocking.begin)

    def commit(self) -> Awaitable[None]:
        return self._run(self._blocking.commit)

    def rollback(self) -> Awaitable[None]:
        return self._run(self._blocking.rollback)

    def _run(self, call: Callable[..., R], *arguments: object) -> Awaitable[R]:
        running: Awaitable[R] = self.native.run_sync(lambda _: call(*arguments))
        return running

    @property
    def broken(self) -> bool:
        return self._blocking.broken

    @property
    def was_closed(self) -> bool:
        return self._blocking.was_closed


def autocommit() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the connection commits each statement by itself (autocommit), so that nothing could be stored together; "
        "open it without autocommit"
    )


def _check_begins(native: Any) -> None:
    """Raise an error if a driver's connection cannot begin a transaction."""
    if getattr(native, "closed", False):
        raise ConnectionError("the connection to the database was lost")
    if getattr(native, "autocommit", False) is True:
        raise autocommit()
    if has_transaction(native):
        raise _in_transaction()


def _in_transaction() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the connection has an open transaction; end it first, or pass a connection that nothing else uses"
    )


def wrap(connection: Any) -> SqlConnection:
    """Return a connection of the application, in the middle of its transaction, to run statements in it.

    Args:
        connection: Of a driver, of SQLAlchemy (a ``Connection`` or ``Session``) or of Django (also its alias).

    Raises:
        InvalidArgumentError: It is none of these.
        UnsupportedError: It is a connection to a database other than SQLite and PostgreSQL.
    """
    if isinstance(connection, str):
        return DjangoConnection(django_connection(connection, instead="the connection of your transaction"))
    if is_instance(connection, "sqlalchemy.orm", "Session", "scoped_session"):
        return SqlAlchemyConnection(connection.connection())
    if is_instance(connection, "sqlalchemy.engine", "Connection"):
        return SqlAlchemyConnection(connection)
    if is_instance(connection, "django.db.backends.base.base", "BaseDatabaseWrapper"):
        return DjangoConnection(connection)
    if callable(getattr(connection, "cursor", None)) and callable(getattr(connection, "commit", None)):
        return DbApiConnection(connection)
    raise InvalidArgumentError(
        "a connection must be one of a DB-API driver, of SQLAlchemy or of Django", found=type(connection).__name__
    )
