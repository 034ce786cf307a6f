"""Connections to the database of an outbox: the user's, in a transaction, and the outbox's own."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from synchronizer import InvalidArgumentError, StoreUnavailableError, UnsupportedError
from synchronizer.callables import is_async

from ..sql.connections import SqlConnection, wrap
from ..sql.databases import SingleConnection, open_database
from ..sql.drivers import commits_each_statement


def in_transaction(connection: object) -> SqlConnection:
    """Return the user's connection, to run statements in its transaction. Refuse one that has none."""
    if is_async(getattr(connection, "commit", None)):
        raise InvalidArgumentError(
            "the connection is asynchronous, and an outbox does not await; with SQLAlchemy, call await "
            "session.run_sync(lambda session: outbox.write(session, ...)); with a driver alone, run the transaction on "
            "a synchronous connection, in asyncio.to_thread",
            found=type(connection).__name__,
        )
    wrapped = wrap(connection)
    if commits_each_statement(wrapped.of_driver):
        raise InvalidArgumentError(
            "the connection is in autocommit mode and has no transaction, so the event would belong to none; begin a "
            "transaction first"
        )
    return wrapped


class Session:
    """A connection of the outbox's own, on which each statement is a transaction. For one thread at a time.

    It closes the connection of the driver, ``raw``.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._connection = wrap(raw)
        self.dialect = self._connection.dialect
        self._is_notified = False
        raw.rollback()
        if isinstance(getattr(raw, "autocommit", None), bool):
            raw.autocommit = True
        else:  # sqlite3 before Python 3.12, and by default after it
            raw.isolation_level = None
        self._has_handlers = hasattr(raw, "add_notify_handler")  # of psycopg
        #: Whether the server wakes `wait_for_notification`.
        self.can_listen = self._has_handlers or isinstance(getattr(raw, "notifies", None), list)
        if self._has_handlers:  # a notification may also come with the answer to a statement
            raw.add_notify_handler(self._on_notification)

    def execute(self, sql: str, parameters: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement with parameters as ``:name``, and return its rows."""
        return self._connection.execute(sql, parameters).rows

    def wait_for_notification(self, seconds: float) -> bool:
        """Return whether the server has notified since the last call that returned True; wait for that."""
        if not self._take_notifications():
            ready = select.poll()
            ready.register(self._raw.fileno(), select.POLLIN)
            if ready.poll(seconds * 1000):
                self._receive()
        is_notified = self._take_notifications()
        self._is_notified = False
        return is_notified

    def _take_notifications(self) -> bool:
        if not self._has_handlers and self._raw.notifies:
            self._raw.notifies.clear()
            self._is_notified = True
        return self._is_notified

    def _receive(self) -> None:
        """Take in what has arrived. Raise the driver's error if the server has closed the connection."""
        if not self._has_handlers:
            self._raw.poll()
            return
        self._raw.pgconn.consume_input()
        while self._raw.pgconn.notifies():
            self._is_notified = True

    def _on_notification(self, _: object) -> None:
        self._is_notified = True

    def close(self) -> None:
        with suppress(Exception):  # it may be broken
            self._connection.close()


def opener(engine_or_connect: Any) -> Callable[[], Session]:
    """Return a function that opens a connection of the outbox's own.

    It takes what a sink takes, but no single connection, and nothing asynchronous.
    """
    database = open_database(engine_or_connect)
    if isinstance(database, SingleConnection):
        raise InvalidArgumentError(
            "an outbox opens connections of its own, which block; pass a synchronous engine of SQLAlchemy, a pool of "
            "psycopg, an alias of Django, or a function that connects",
            found=type(engine_or_connect).__name__,
        )
    if database.is_async:
        raise UnsupportedError(
            "an asynchronous engine, pool or function cannot open connections for an outbox; pass a synchronous one",
            found=type(engine_or_connect).__name__,
        )
    return lambda: Session(database.connect())


def is_database_error(error: BaseException) -> bool:
    """Return whether a driver or a framework raised this error of a database."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError) or not names.isdisjoint(("Error", "SQLAlchemyError"))


def is_locked(error: BaseException) -> bool:
    """Return whether another connection writes to the SQLite database."""
    return type(error).__name__ == "OperationalError" and str(error).startswith("database is locked")


def unavailable(error: BaseException) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the database of the outbox did not do what was asked; see the cause, or try again",
        cause=" ".join(str(error).split()),
    )
